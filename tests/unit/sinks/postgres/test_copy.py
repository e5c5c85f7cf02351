"""Values of every type go into PostgreSQL and come back as they were."""

from __future__ import annotations

import contextlib
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
from cairn.sinks.postgres.binary import Form, binary_rows, find_forms
from cairn.sinks.postgres.copy import csv_rows
from cairn.sinks.postgres.table import type_in_table
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
BINARY = [i for i, ddl in enumerate(VALUES) if not ddl.startswith("decimal")]
"""Columns with a binary form. If a table has others, all of its rows are sent as text."""
BINARY_SCHEMA = pa.schema([SCHEMA.field(i) for i in BINARY])


def _rows() -> st.SearchStrategy[list[tuple[Any, ...]]]:
    values = st.tuples(*[st.none() | values for values in VALUES.values()])
    # Rows without null take another way than columns with some.
    row = values | st.tuples(*VALUES.values())
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
    with contextlib.closing(_open_sink(table, schema)) as driver:
        _query(f"truncate {table}", "delete from cairn_marks")
        writer = driver.writer(2, 0, Execution())
        for batch in batches:
            writer.write(batch)
        committable = writer.prepare()
        assert committable is not None
        driver.commit(2, [committable])
    return _query(f"select * from {table}")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b)
    return bool(a == b)


@pytest.mark.parametrize("is_binary", [False, True])
@settings(suppress_health_check=list(HealthCheck))
@given(rows=_rows(), cut=st.integers(0, 8))
def test_values_of_every_type_come_back_as_they_were(
    is_binary: bool, rows: list[Any], cut: int
) -> None:
    batch = _batch(SCHEMA, rows)
    if is_binary:
        rows = [tuple(row[i] for i in BINARY) for row in rows]
        batch = batch.select(BINARY)
    table = "binary_types" if is_binary else "every_type"
    found = _through(table, batch.schema, batch.slice(0, cut), batch.slice(cut))
    assert len(found) == len(rows)
    for wanted, got in zip(rows, found, strict=True):
        for name, a, b in zip(batch.schema.names, wanted, got, strict=True):
            assert _same(a, b), (name, a, b)


@given(rows=_rows(), cut=st.integers(0, 8))
def test_the_text_is_the_same_however_rows_are_cut_into_batches(rows: list[Any], cut: int) -> None:
    batch = _batch(SCHEMA, rows)
    parts = [part for part in (batch.slice(0, cut), batch.slice(cut)) if part.num_rows]
    assert b"".join(map(csv_rows, parts)) == csv_rows(batch)
    forms = _forms(BINARY_SCHEMA)
    assert forms is not None
    sent = [binary_rows(part.select(BINARY), forms) for part in parts]
    assert b"".join(sent) == binary_rows(batch.select(BINARY), forms)


def _forms(schema: pa.Schema, **types: str) -> list[Form] | None:
    """How rows are sent into a table with these types, or with those that it is created with."""
    made = {field.name: type_in_table(field.type) for field in schema} | types
    return find_forms(schema, {name: (type, False) for name, type in made.items()})


@pytest.mark.parametrize(
    ("ddl", "in_table", "is_binary"),
    [
        ("v int", "bigint", True),
        ("v int", "numeric", False),
        ("v float", "double precision", True),
        ("v decimal(10,2)", "numeric(10,2)", False),
        ("v string", "character varying(9)", True),
        ("v string", "json", True),
        ("v string", "jsonb", False),
        ("v string", "uuid", False),
        ("v array<int>", "json", True),
        ("v array<int>", "jsonb", True),
    ],
)
def test_rows_are_sent_in_binary_form_if_every_column_of_the_table_has_one(
    ddl: str, in_table: str, is_binary: bool
) -> None:
    schema = parse_schema(f"k long, {ddl}")
    assert (_forms(schema, v=in_table) is not None) == is_binary


def test_columns_of_wider_and_special_types_get_the_values() -> None:
    _query(
        "drop table if exists wide",
        "drop type if exists mood",
        "drop domain if exists positive",
        "create type mood as enum ('calm', 'é')",
        "create domain positive as bigint check (value > 0)",
        "create table wide (n numeric default 1, i bigint, d positive, f double precision,"
        " m mood, v varchar(3), j json, b jsonb, note text default 'kept')",
    )
    schema = parse_schema("b array<int>, i int, d int, f float, m string, v string, j map<int,int>")
    rows = [([1, None], 2, 3, 0.5, "é", "abc", [(1, 2)]), (None, -1, 1, None, "calm", None, None)]
    found = _through("wide", schema, _batch(schema, rows))
    assert found == [
        (1, 2, 3, 0.5, "é".encode(), "abc", {"1": 2}, [1, None], "kept"),
        (1, -1, 1, None, b"calm", None, None, None, "kept"),
    ]
    for wrong, said in [
        ({"d": 0}, "positive"),
        ({"m": "sad"}, "mood"),
        ({"v": "long"}, "too long"),
    ]:
        row = rows[0]
        changed = [tuple(wrong.get(n, v) for n, v in zip(schema.names, row, strict=True))]
        with pytest.raises(EpochError, match=said):
            _through("wide", schema, _batch(schema, changed))


def test_times_that_the_server_does_not_hold_are_refused() -> None:
    schema = parse_schema("d date, t timestamp")
    forms = _forms(schema)
    assert forms is not None
    lowest_day, lowest = pa.array([-(2**31)], pa.int32()), pa.array([-(2**63)], pa.int64())
    days = {"d": lowest_day.cast(pa.date32()), "t": pa.nulls(1, pa.timestamp("us", "UTC"))}
    times = {"d": pa.nulls(1, pa.date32()), "t": lowest.cast(pa.timestamp("us", "UTC"))}
    for columns in (days, times):
        with pytest.raises(EpochError, match="too early"):
            binary_rows(pa.RecordBatch.from_pydict(columns, schema), forms)
    early = pa.array([-(2**62)], pa.int64()).cast(pa.timestamp("us", "UTC"))
    with pytest.raises(EpochError, match="timestamp out of range"):
        _through("early", schema, pa.RecordBatch.from_pydict({**times, "t": early}, schema))


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
    batch = _batch(schema, [(1, None), (2, value)])
    with pytest.raises(EpochError, match=r"column 'v'.*NUL"):
        csv_rows(batch)
    forms = _forms(schema)
    assert forms is not None
    with pytest.raises(EpochError, match=r"column 'v'.*NUL"):
        binary_rows(batch, forms)
    assert binary_rows(batch.slice(0, 1), forms)


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
