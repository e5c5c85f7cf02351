"""The views of states, against what the packing stored."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from cairn.backends.cached.described import StoredState
from cairn.backends.cached.numbers import state_number
from cairn.backends.packing import Packing
from cairn.backends.postgres.layout import create_tables, register_states
from cairn.backends.postgres.views import quote_name, view_name
from cairn.types.codec import codec
from tests import servers

DAY = dt.datetime(9999, 12, 31, 23, 59, 59, 999999)

# Declared type, the value, and what the view shows.
VALUES: list[tuple[str, Any, Any]] = [
    ("boolean", True, True),
    ("tinyint", -128, -128),
    ("int", -(2**31), -(2**31)),
    ("bigint", 2**63 - 1, 2**63 - 1),
    ("float", 1.5, 1.5),
    ("double", -1e-300, -1e-300),
    ("double", float("inf"), float("inf")),
    ("string", "naïve \"quoted\" 'text' \\ %s {s} 🙂", "naïve \"quoted\" 'text' \\ %s {s} 🙂"),
    ("string", "", ""),
    ("binary", b"\x00\xff", b"\x00\xff"),
    ("decimal(38,6)", Decimal("-12345678901234567890.5"), Decimal("-12345678901234567890.500000")),
    ("decimal(5,0)", Decimal(7), Decimal(7)),
    ("date", dt.date(1, 1, 1), dt.date(1, 1, 1)),
    ("timestamp", DAY.replace(tzinfo=dt.UTC), DAY.replace(tzinfo=dt.UTC)),
    ("timestamp_ntz", dt.datetime(1, 1, 1, 0, 0, 0, 1), dt.datetime(1, 1, 1, 0, 0, 0, 1)),
    ("interval day to second", dt.timedelta(days=-1, microseconds=5), dt.timedelta(-1, 0, 5)),
    ("array<array<date>>", [[dt.date(2024, 2, 29)], [], None], [["2024-02-29"], [], None]),
    ("array<int>", [], []),
    ("map<string,decimal(9,2)>", {"a'b": Decimal("1.5"), "c": None}, [["a'b", 1.5], ["c", None]]),
    ("array<struct<`it's`:int,b:array<int>>>", [(1, [2])], [{"it's": 1, "b": [2]}]),
]


@pytest.fixture
def database() -> Iterator[tuple[psycopg.Connection[Any], str]]:
    schema = f"cairn_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(servers.state_database(), autocommit=True) as connection:
        create_tables(connection, schema)
        yield connection, schema


def stored(kind: str, key: str, value: str, entry: str | None = None) -> StoredState:
    return StoredState(kind=kind, type=value, entry_type=entry, key_type=key, counts={})


def put(database: Any, operator: str, name: str, state: StoredState, rows: dict[Any, Any]) -> None:
    """Write rows as a base does; names of maps and lists are pairs of key and entry."""
    connection, schema = database
    register_states(connection, schema, operator, {name: state})
    number = state_number(operator, name, state)
    packing = state.packing()
    connection.execute(
        f"insert into {schema}.visible values (%s, 3, '{{[1,9)}}')"
        " on conflict (state, grp) do nothing",
        [number],
    )
    for key, value in rows.items():
        connection.execute(
            f"insert into {schema}.rows values (3, %s, %s, 5, %s)",
            (number, named(packing, key), None if value is None else packing.value(value)),
        )


def named(packing: Packing, key: Any) -> bytes:
    if packing.kind == "map" and isinstance(key, list):
        return packing.key(key[0]) + packing.entry(key[1])
    return packing.key(key)


def shown(database: Any, view: str) -> list[dict[str, Any]]:
    connection, schema = database
    cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
    cursor.execute(f"select * from {schema}.{quote_name(view)}")
    return cursor.fetchall()


@pytest.mark.parametrize(("ddl", "value", "expected"), VALUES, ids=lambda each: str(each)[:30])
def test_a_value_of_each_type_is_shown_as_that_type(database, ddl, value, expected) -> None:
    state = stored("value", "string", ddl)
    put(database, "op", "held", state, {"k": codec(ddl).normalise(value)})
    found = shown(database, "op.held")
    assert found == [{"key_group": 3, "key": "k", "value": expected, "epoch": 5}]
    assert type(found[0]["value"]) is type(expected)


def test_fields_of_structs_are_columns_and_those_that_clash_have_a_prefix(database) -> None:
    state = stored(
        "value", "struct<epoch:int,id:string>", "struct<id:date,entry:double,n:decimal(4,1)>"
    )
    value = codec(state.type).normalise((dt.date(2024, 1, 2), None, Decimal("1.5")))
    put(database, "op", "held", state, {codec(state.key_type).normalise_key((1, "a")): value})
    assert shown(database, "op.held") == [
        {
            "key_group": 3, "key_epoch": 1, "id": "a", "value_id": dt.date(2024, 1, 2),
            "value_entry": None, "n": Decimal("1.5"), "epoch": 5,
        }
    ]  # fmt: skip


def test_entries_of_maps_have_a_row_each_and_deleted_rows_none(database) -> None:
    state = stored("map", "bigint", "int", "date")
    day = dt.date(2024, 1, 2)
    rows = {1: 2, 2: None}
    put(database, "op", "held", state, rows)
    connection, schema = database
    packing, number = state.packing(), state_number("op", "held", state)
    for entry, value in ((day, packing.value(7)), (dt.date(2024, 1, 3), None)):
        connection.execute(
            f"insert into {schema}.rows values (3, %s, %s, 5, %s)",
            (number, packing.key(1) + packing.entry(entry), value),
        )
    found = shown(database, "op.held")
    assert found == [{"key_group": 3, "key": 1, "entry": day, "value": 7, "epoch": 5}]


def test_a_view_follows_the_newest_types_and_back(database) -> None:
    old, new = stored("value", "int", "int"), stored("value", "int", "string")
    for state, value in ((old, 1), (new, "one"), (old, 2)):
        put(database, "op", "held", state, {value if state is old else 1: value})
        assert shown(database, "op.held")[-1]["value"] == value


def test_long_and_odd_names_have_views_of_their_own(database) -> None:
    operator = 'ü"x' * 30
    state = stored("value", "int", "int")
    names = [view_name(operator, name, state_number(operator, name, state)) for name in "ab"]
    for value, name in enumerate("ab"):
        put(database, operator, name, state, {1: value})
    assert names[0] != names[1]
    assert [shown(database, name)[0]["value"] for name in names] == [0, 1]
