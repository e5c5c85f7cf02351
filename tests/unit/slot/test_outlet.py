"""Rows out of a function fit the declared schema, or are refused by name."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from cairn.errors import FunctionError
from cairn.slot.outlet import BATCH_ROWS_MAX, Outlet
from cairn.types import parse_schema, row_class

NEW_YEAR = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


class Pair(NamedTuple):
    b: str | None
    a: int


@dataclasses.dataclass
class PairData:
    a: int
    b: str | None = None


def emitted(schema: str, *rows: Any, tag: str | None = None) -> list[tuple[Any, ...]]:
    outlet = Outlet("score", tag, parse_schema(schema))
    batches: list[pa.RecordBatch] = []
    outlet.targets.append(batches.append)
    for row in rows:
        outlet.emit(row)
    outlet.flush()
    assert outlet.rows == [] and outlet.rows_out == len(rows)
    assert all(batch.schema == outlet.schema for batch in batches)
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize(
    "row",
    [
        (1, "x"),
        {"a": 1, "b": "x"},
        {"b": "x", "a": 1},
        Pair(a=1, b="x"),
        PairData(1, "x"),
        row_class(["a", "b"])._make((1, "x")),  # type: ignore[attr-defined]
        row_class(["b", "a"])._make(("x", 1)),  # type: ignore[attr-defined]
    ],
    ids=["tuple", "dict", "other order", "named tuple", "dataclass", "row", "row, other order"],
)
def test_rows_of_any_form_leave_in_the_order_of_the_schema(row: Any) -> None:
    assert emitted("a long, b string", row, row) == [(1, "x")] * 2


def test_fields_a_dict_leaves_out_are_null() -> None:
    assert emitted("a long, b string", {"a": 1}, {}) == [(1, None), (None, None)]


def test_rows_leave_in_the_order_they_came_and_no_row_waits_for_ever() -> None:
    outlet = Outlet("score", None, parse_schema("a long"))
    batches: list[pa.RecordBatch] = []
    outlet.targets.append(batches.append)
    for n in range(100_000):
        outlet.emit((n,))
    assert len(batches) > 1 and len(outlet.rows) < 100_000
    outlet.flush()
    assert pa.Table.from_batches(batches)["a"].to_pylist() == list(range(100_000))


def test_packed_rows_leave_before_later_ones_in_batches_of_the_same_size() -> None:
    outlet = Outlet("score", None, parse_schema("a long, b string"))
    batches: list[pa.RecordBatch] = []
    outlet.targets.append(batches.append)
    rows = [(n, None if n % 3 else str(n)) for n in range(100_000)]
    at = 0
    while at < len(rows):
        some = rows[at : at + outlet.pack_rows]
        outlet.rows += some
        outlet.pack()
        at += len(some)
    outlet.emit((-1, "last"))
    outlet.flush()
    found = pa.Table.from_batches(batches)
    assert list(zip(*found.to_pydict().values(), strict=True)) == [*rows, (-1, "last")]
    assert {batch.num_rows for batch in batches[1:-1]} == {BATCH_ROWS_MAX}
    assert outlet.rows_out == len(rows) + 1


def test_packed_rows_that_are_wide_do_not_pile_up() -> None:
    outlet = Outlet("score", None, parse_schema("a string"))
    batches: list[pa.RecordBatch] = []
    outlet.targets.append(batches.append)
    for _ in range(8):
        outlet.rows += [("x" * 1_000_000,)] * min(40, outlet.pack_rows)
        outlet.pack()
        outlet.flush()
    assert outlet.pack_rows < 40 and max(batch.num_rows for batch in batches[1:]) < 40


def test_a_row_goes_to_every_target() -> None:
    outlet = Outlet("score", None, parse_schema("a long"))
    first: list[Any] = []
    second: list[Any] = []
    outlet.targets += [first.append, second.append]
    outlet.emit((1,))
    outlet.flush()
    outlet.flush()
    assert len(first) == len(second) == 1


def test_a_schema_without_columns_counts_rows() -> None:
    outlet = Outlet("score", None, pa.schema([]))
    batches: list[pa.RecordBatch] = []
    outlet.targets.append(batches.append)
    outlet.emit(())
    outlet.emit(())
    outlet.flush()
    assert [batch.num_rows for batch in batches] == [2]


@pytest.mark.parametrize(
    ("ddl", "value", "kept"),
    [
        ("double", 1, 1.0),
        ("double", 2**60 + 1, float(2**60 + 1)),
        ("double", np.float32(1.5), 1.5),
        ("long", np.int32(3), 3),
        ("binary", bytearray(b"x"), b"x"),
        ("boolean", np.bool_(True), True),
        ("decimal(4,1)", decimal.Decimal("1.25"), decimal.Decimal("1.3")),
        ("timestamp", NEW_YEAR, NEW_YEAR),
        ("array<struct<x:long>>", [{"x": 1}, None], [{"x": 1}, None]),
        ("map<string,long>", {"a": 1}, [("a", 1)]),
    ],
)  # fmt: skip
def test_values_that_fit_are_brought_to_the_declared_type(ddl: str, value: Any, kept: Any) -> None:
    assert emitted(f"a {ddl}", (value,), (None,)) == [(kept,), (None,)]


@pytest.mark.parametrize(
    ("ddl", "value"),
    [
        ("long", 1.5),
        ("long", 1.0),
        ("long", decimal.Decimal("3.5")),
        ("long", True),
        ("long", "1"),
        ("long", 2**63),
        ("int", 2**31),
        ("double", "1"),
        ("double", True),
        ("double", decimal.Decimal("1.1")),
        ("string", b"abc"),
        ("string", 1),
        ("string", "\ud800"),
        ("binary", "abc"),
        ("boolean", 1),
        ("date", dt.datetime(2024, 1, 1)),
        ("timestamp", dt.datetime(2024, 1, 1)),
    ],
)
def test_a_value_that_does_not_fit_is_refused_and_never_bent(ddl: str, value: Any) -> None:
    with pytest.raises(FunctionError) as caught:
        emitted(f"n long, a {ddl}", (1, None), (2, value))
    error = caught.value
    assert (error.operator, error.field) == ("score", "a")
    assert error.row == repr((2, value))
    assert "field 'a'" in str(error) and "expected: n bigint, a " in str(error)


def test_a_misfit_deep_inside_is_named_by_its_path() -> None:
    with pytest.raises(FunctionError) as caught:
        emitted("a struct<b:array<long>>", ({"b": [1, "x"]},))
    assert caught.value.field == "a.b[1]"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((1,), "it has 1 values"),
        ((1, "x", 2), "it has 3 values"),
        ({"a": 1, "c": 2}, "field 'c': no such field"),
        ("ab", "a str is not a row"),
        ([1, "x"], "a list is not a row"),
        (5, "a int is not a row"),
        (PairData, "a type is not a row"),
    ],
)
def test_what_is_no_row_of_the_schema_is_refused(row: Any, message: str) -> None:
    with pytest.raises(FunctionError, match=message) as caught:
        emitted("a long, b string", (1, "ok"), row)
    assert "operator 'score' emitted" in str(caught.value)


@pytest.mark.parametrize("row", [(None, "x"), {"b": "x"}])
def test_null_in_a_not_null_field_is_refused(row: Any) -> None:
    with pytest.raises(FunctionError, match="declared NOT NULL") as caught:
        emitted("a long NOT NULL, b string", (1, None), row)
    assert caught.value.field == "a"


def test_the_error_of_a_side_output_names_its_tag() -> None:
    with pytest.raises(FunctionError, match="operator 'score', side output 'late'"):
        emitted("a long", ("x",), tag="late")


def test_a_reset_outlet_forgets_what_it_collected() -> None:
    outlet = Outlet("score", None, parse_schema("a long"))
    outlet.emit((1,))
    outlet.pack()
    outlet.emit((2,))
    outlet.reset()
    outlet.flush()
    assert outlet.rows_out == 0


def test_a_long_row_is_cut_in_the_message() -> None:
    with pytest.raises(FunctionError) as caught:
        emitted("a long", ("x" * 10_000,))
    assert len(str(caught.value)) < 3000
