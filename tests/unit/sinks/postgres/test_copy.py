"""Values of every type go into PostgreSQL and come back as they were."""

from __future__ import annotations

import datetime as dt
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.errors import EpochError
from cairn.sinks import Postgres, SinkContext
from cairn.sinks.base import Execution
from cairn.sinks.postgres.copy import csv_rows
from cairn.types import parse_schema
from tests.places.postgres import shared_database

UTC = dt.UTC
TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=12)
STAMPS = st.datetimes(dt.datetime(1, 1, 3), dt.datetime(9999, 12, 29))

VALUES: dict[str, Any] = {
    "boolean": st.booleans(),
    "tinyint": st.integers(-(2**7), 2**7 - 1),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "int": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32),
    "double": st.floats(),
    "decimal(38,10)": st.decimals(
        -(10**27), 10**27, allow_nan=False, allow_infinity=False, places=10
    ),
    "decimal(5,0)": st.integers(-99999, 99999).map(Decimal),
    "string": TEXT | st.sampled_from(["", " ", "\\.", '"', '""', ",", "\r\n", "\\N", "NULL", "é𝄞"]),
    "binary": st.binary(max_size=12),
    "date": st.dates(),
    "timestamp": STAMPS.map(lambda at: at.replace(tzinfo=UTC)),
    "timestamp_ntz": STAMPS,
    "interval day to second": st.timedeltas(dt.timedelta(-(10**6)), dt.timedelta(10**6)),
}
NAMES = {ddl: f"c{i} {ddl}" for i, ddl in enumerate(VALUES)}
SCHEMA = parse_schema(", ".join(f"`{name}` {ddl}" for ddl, name in NAMES.items()))


def _rows() -> st.SearchStrategy[list[tuple[Any, ...]]]:
    row = st.tuples(*[st.none() | values for values in VALUES.values()])
    return st.lists(row, min_size=1, max_size=8)


def _batch(schema: pa.Schema, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = [pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _query(*statements: str) -> list[tuple[Any, ...]]:
    """Return the rows of the last statement."""
    with psycopg.connect(shared_database(), autocommit=True) as outside:
        outside.execute("set timezone = 'UTC'")
        with outside.cursor(binary=True) as cursor:
            for statement in statements:
                cursor.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


def _open_sink(table: str, schema: pa.Schema, scratch: str | None = None) -> Postgres:
    sink = Postgres(shared_database(), table, create=True)
    sink.open(SinkContext("types", "j", table, schema, scratch))
    return sink


def _through(table: str, schema: pa.Schema, *batches: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """The rows as a reader of the table gets them."""
    driver = _open_sink(table, schema)
    _query(f"truncate {table}", "delete from cairn_marks")
    writer = driver.writer(2, 0, Execution())
    for batch in batches:
        writer.write(batch)
    committable = writer.prepare()
    assert committable is not None
    driver.commit(2, [committable])
    driver.close()
    return _query(f"select * from {table}")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b)
    return bool(a == b)


@settings(suppress_health_check=list(HealthCheck))
@given(rows=_rows(), cut=st.integers(0, 8))
def test_values_of_every_type_come_back_as_they_were(rows: list[Any], cut: int) -> None:
    batch = _batch(SCHEMA, rows)
    found = _through("every_type", SCHEMA, batch.slice(0, cut), batch.slice(cut))
    assert len(found) == len(rows)
    for wanted, got in zip(rows, found, strict=True):
        for name, a, b in zip(SCHEMA.names, wanted, got, strict=True):
            assert _same(a, b), (name, a, b)


@given(rows=_rows(), cut=st.integers(0, 8))
def test_the_text_is_the_same_however_rows_are_cut_into_batches(rows: list[Any], cut: int) -> None:
    batch = _batch(SCHEMA, rows)
    parts = [part for part in (batch.slice(0, cut), batch.slice(cut)) if part.num_rows]
    assert b"".join(map(csv_rows, parts)) == csv_rows(batch)


def test_a_null_in_a_table_of_one_column_is_a_row() -> None:
    schema = parse_schema("only string")
    rows = [("a",), (None,), ("",), ("\\.",), (None,)]
    assert _through("one_column", schema, _batch(schema, rows)) == rows


def test_nested_values_are_stored_as_json() -> None:
    schema = parse_schema(
        "s struct<a:int,t:timestamp,`n m`:struct<x:string>>, l array<double>,"
        " m map<string,decimal(20,2)>, by map<int,array<date>>, b array<binary>,"
        " i array<interval day to second>, n array<boolean>"
    )
    at = dt.datetime(2024, 2, 29, 12, 0, 0, 5, tzinfo=UTC)
    row = (
        {"a": None, "t": at, "n m": {"x": 'é"\\\n'}},
        [1.5, math.nan, -math.inf, 2.5e10, None],
        [("k\u2028", Decimal("123456789012345678.90")), ("", None)],
        [(7, [dt.date(2024, 1, 2)]), (-1, [])],
        [b"\x00\xff"],
        [dt.timedelta(seconds=-1)],
        [True, False],
    )
    nothing = (None,) * len(schema)
    found = _through("nested", schema, _batch(schema, [row, nothing]))
    assert found == [
        (
            {"t": "2024-02-29T12:00:00.000005Z", "n m": {"x": 'é"\\\n'}},
            [1.5, "NaN", "-Infinity", 2.5e10, None],
            {"k\u2028": pytest.approx(123456789012345678.90), "": None},
            {"7": ["2024-01-02"], "-1": []},
            ["AP8="],
            ["INTERVAL '-0 00:00:01.000000' DAY TO SECOND"],
            [True, False],
        ),
        nothing,
    ]
    exact = _query("select m->>'k\u2028' from nested limit 1")
    assert exact == [("123456789012345678.90",)]


@pytest.mark.parametrize(
    ("ddl", "value"),
    [
        ("v string", "a\x00b"),
        ("v array<string>", ["a\x00b"]),
        ("v map<string,int>", [("\x00", 1)]),
        ("v struct<x:string>", {"x": "\x00"}),
        ("v struct<x:string>", {"x": "\\\x00"}),
    ],
)
def test_a_string_with_nul_is_refused_by_name_of_its_column(ddl: str, value: Any) -> None:
    schema = parse_schema(f"k long, {ddl}")
    with pytest.raises(EpochError, match=r"column 'v'.*NUL"):
        csv_rows(_batch(schema, [(1, None), (2, value)]))


def test_a_refused_batch_names_the_sink_and_leaves_nothing(tmp_path: Path) -> None:
    schema = parse_schema("k long, v string")
    driver, slot = _open_sink("nul", schema), _open_sink("nul", schema, str(tmp_path))
    writer = slot.writer(2, 0, Execution())
    writer.write(_batch(schema, [(1, "a")]))
    with pytest.raises(EpochError, match=r"sink 'nul': column 'v'"):
        writer.write(_batch(schema, [(1, "\x00")]))
    writer.abort()
    left = "select count(*) from pg_class where relname like 'cairn_piece%'"
    assert _query(left) == [(0,)]
    again = slot.writer(2, 0, Execution(attempt=1))
    again.write(_batch(schema, [(1, "a")]))
    driver.commit(2, [again.prepare()])  # type: ignore[list-item]
    assert _query("select * from nul") == [(1, "a")]
    slot.close()
    driver.close()


def test_binary_of_a_slice_is_that_of_the_slice() -> None:
    schema = parse_schema("b binary")
    batch = _batch(schema, [(b"ab",), (b"cd",), (None,), (b"",), (b"\xff",)])
    assert csv_rows(batch.slice(1)) == b'"\\x6364"\n\n"\\x"\n"\\xff"\n'


def test_what_is_inside_json_is_json(tmp_path: Path) -> None:
    schema = parse_schema("v array<struct<a:string,b:double>>")
    value = [{"a": '"', "b": 0.1}, {"a": None, "b": None}]
    text = csv_rows(_batch(schema, [(value,)])).decode().rstrip("\n")
    assert json.loads(text[1:-1].replace('""', '"')) == [{"a": '"', "b": 0.1}, {}]


def test_a_backslash_before_u0000_inside_json_is_no_nul() -> None:
    schema = parse_schema("v struct<x:string>")
    assert csv_rows(_batch(schema, [({"x": "\\u0000"},)])) == b'"{""x"":""\\\\u0000""}"\n'
