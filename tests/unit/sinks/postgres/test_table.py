"""Tables that a sink accepts or refuses, and its errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from cairn.errors import PlanError
from cairn.sinks import Postgres, SinkContext
from cairn.sinks.base import Execution
from cairn.sinks.postgres.table import parse_name, quote
from cairn.types import parse_schema
from tests.places.postgres import shared_database

ROWS = "k long, s string, d decimal(10,2), at timestamp"


@pytest.fixture
def outside() -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(shared_database(), autocommit=True) as connection:
        connection.execute("drop schema if exists shop cascade; create schema shop")
        yield connection


def _open_sink(table: str, rows: str = ROWS, **options: Any) -> Postgres:
    sink = Postgres(shared_database(), table, **options)
    sink.open(SinkContext("job", "j", "out", parse_schema(rows)))
    sink.close()
    return sink


def _columns(outside: psycopg.Connection[Any]) -> list[str]:
    described = outside.execute("select * from shop.orders").description
    return [column.name for column in described or ()]


@pytest.mark.parametrize(
    ("table", "parsed"),
    [
        ("orders", (None, "orders")),
        ("shop.Orders", ("shop", "Orders")),
        ("my shop.größe €", ("my shop", "größe €")),
        ('"a.b"."c ""d"""', ("a.b", 'c "d"')),
        ('shop."x.y"', ("shop", "x.y")),
    ],
)
def test_names_are_taken_as_they_are_written(table: str, parsed: Any) -> None:
    assert parse_name(table) == parsed


@pytest.mark.parametrize("table", ["a.b.c", ".a", "a.", '"a', 'a"b', "x" * 64, "é" * 32])
def test_what_is_no_name_is_refused(table: str) -> None:
    with pytest.raises(PlanError, match=r"is not the name of a table|cannot be a name"):
        Postgres("", table)


@pytest.mark.parametrize("table", ["Shop Ünits.Tab;le", '"sh""op"."select"', "shop.x'y%s{}"])
def test_tables_of_any_name_are_made_and_written(
    outside: psycopg.Connection[Any], table: str
) -> None:
    schema, name = parse_name(table)
    assert schema is not None
    outside.execute(f"drop schema if exists {quote(schema)} cascade".encode())
    outside.execute(f"create schema {quote(schema)}".encode())
    rows = parse_schema("`a b` long, `ü'\"` string, `%s` string")
    sink = Postgres(shared_database(), table, mode="upsert", key="a b", create=True)
    sink.open(SinkContext("it's", "j'", "ü$cairn$'%s", rows))
    writer = sink.writer(2, 0, Execution())
    writer.write(pa.RecordBatch.from_pydict({"a b": [1], "ü'\"": ["x"], "%s": ["y"]}, rows))
    sink.commit(2, [writer.prepare()])  # type: ignore[list-item]
    sink.recover(3)
    sink.close()
    found = outside.execute(f"select * from {quote(schema, name)}".encode()).fetchall()
    assert found == [(1, "x", "y")]
    outside.execute(f"drop schema {quote(schema)} cascade".encode())


def test_a_missing_table_is_refused_with_the_statement_that_makes_it(
    outside: psycopg.Connection[Any],
) -> None:
    with pytest.raises(PlanError, match=r"table 'shop\.orders' does not exist") as refused:
        _open_sink("shop.orders", mode="upsert", key=("k",))
    statement = str(refused.value).split("or run\n")[1]
    outside.execute(statement.encode())
    _open_sink("shop.orders", mode="upsert", key=("k",))


def test_a_table_that_is_there_is_not_made_again(outside: psycopg.Connection[Any]) -> None:
    outside.execute("create table shop.orders (k bigint, more text default 'x')")
    _open_sink("shop.orders", "k long", create=True)
    assert _columns(outside) == ["k", "more"]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("k bigint, s text, d numeric(10,2)", "'at' is missing"),
        ("k integer, s text, d numeric(10,2), at timestamptz", "'k' is integer, .* bigint"),
        ("k bigint, s bytea, d numeric(10,2), at timestamptz", "'s' is bytea, .* text"),
        ("k bigint, s name, d numeric(10,2), at timestamptz", "'s' is name, .* text"),
        ("k bigint, s char(5), d numeric(10,2), at timestamptz", r"'s' is character\(5\), .* text"),
        ("k bigint, s text, d numeric(10,1), at timestamptz", r"'d' is numeric\(10,1\)"),
        ("k bigint, s text, d numeric(9,2), at timestamptz", r"'d' is numeric\(9,2\)"),
        ("k numeric(18,0), s text, d numeric, at timestamptz", r"'k' is numeric\(18,0\)"),
        ("k bigint, s text, d float8, at timestamptz", "'d' is double precision"),
        ("k bigint, s text, d numeric, at timestamp", "'at' is timestamp without time zone"),
        ("k bigint, s text, d numeric, at timestamptz(3)", r"'at' is timestamp\(3\) with"),
        ("k bigint, s text, d numeric, at timestamptz, x int not null", "'x' is not null"),
    ],
)
def test_a_table_that_rows_do_not_fit_is_refused_with_what_makes_it_fit(
    outside: psycopg.Connection[Any], columns: str, said: str
) -> None:
    outside.execute(f"create table shop.orders ({columns})".encode())
    with pytest.raises(PlanError, match=said) as refused:
        _open_sink("shop.orders")
    (statement,) = re.findall(r"^    (alter table .*;)$", str(refused.value), re.MULTILINE)
    if "'s' is bytea" in said:
        statement = "alter table shop.orders alter column s type text using encode(s, 'hex')"
    outside.execute(statement.encode())
    _open_sink("shop.orders")


@pytest.mark.parametrize(
    "columns",
    [
        "k bigint, s varchar(3), d numeric, at timestamptz",
        "k numeric(19), s uuid, d numeric(20,10), at timestamptz(6)",
        "at timestamptz, extra int, d numeric(38,2), s jsonb, k bigint primary key",
        "k bigint, s shop.mood, d shop.money, at timestamptz, x int not null default 1",
        "k bigint, s text, d numeric(10,2), at timestamptz, id int generated always as identity",
    ],
)
def test_a_table_that_rows_fit_is_taken(outside: psycopg.Connection[Any], columns: str) -> None:
    outside.execute("create type shop.mood as enum ('a'); create domain shop.money numeric(12,2)")
    outside.execute(f"create table shop.orders ({columns})".encode())
    before = _columns(outside)
    _open_sink("shop.orders")
    assert _columns(outside) == before


def test_a_column_the_table_computes_is_not_written(outside: psycopg.Connection[Any]) -> None:
    outside.execute("create table shop.orders (k bigint, l bigint generated always as (k) stored)")
    with pytest.raises(PlanError, match="'l' is computed"):
        _open_sink("shop.orders", "k long, l long")


@pytest.mark.parametrize(
    "columns",
    [
        "k bigint, s text",
        "k bigint, s text, primary key (k, s)",
        "k bigint, s text, unique (k) deferrable",
    ],
)
def test_an_upsert_needs_a_unique_index_on_its_key(
    outside: psycopg.Connection[Any], columns: str
) -> None:
    outside.execute(f"create table shop.orders ({columns})".encode())
    with pytest.raises(PlanError, match=r"unique index is on exactly \(k\)"):
        _open_sink("shop.orders", "k long, s string", mode="upsert", key="k")
    outside.execute("create unique index on shop.orders (k) include (s)")
    _open_sink("shop.orders", "k long, s string", mode="upsert", key="k")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "upsert"}, "needs key="),
        ({"mode": "append", "key": "k"}, "key= is for mode='upsert'"),
        ({"mode": "merge"}, "unknown mode 'merge'"),
        ({"mode": "upsert", "key": ("k", "nope")}, "the key 'nope' is not a column"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        _open_sink("shop.orders", create=True, **options)


def test_columns_whose_names_are_too_long_are_refused(outside: psycopg.Connection[Any]) -> None:
    with pytest.raises(PlanError, match="at most 63 bytes"):
        _open_sink("shop.orders", f"`{'x' * 64}` long", create=True)
