"""A view per state, with a typed column per part of key and value: `"<operator>.<state>"`.

    key_group, the key's columns, entry (of maps, lists and timers), the value's columns, epoch

A struct gives a column per field; any other key is `key` and any other value is `value`. Structs,
arrays and maps within them are JSON: objects, arrays, and arrays of pairs. Pickled objects and
texts that PostgreSQL cannot hold stay as they are stored.

Always true here:
- a view shows the state with the newest types that a base has written;
- two states have two views, however long their names are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from cairn.backends.cached.described import StoredState
from cairn.types import OBJECT, parse_type

if TYPE_CHECKING:
    from psycopg import Connection

_NAME_BYTES_MAX: Final = 63
_OWN: Final = ("key_group", "entry", "epoch")
_INTEGERS: Final = {8: "int2", 16: "int2", 32: "int4", 64: "int8"}
_ENTRY_LIST: Final = "{s}.number_at(r.name, k.at, 8)::int8"
_ENTRY_TIME: Final = (
    "to_timestamp((({s}.number_at(r.name, 1, 8) - 9223372036854775808) / 1000)::float8)"
)


def create_view(
    connection: Connection[Any],
    schema: str,
    number: int,
    operator: str,
    state_name: str,
    state: StoredState,
) -> None:
    """Make the view of a state, unless it has these types already. Within a transaction."""
    view = f"{schema}.{quote_name(view_name(operator, state_name, number))}"
    found = connection.execute("select obj_description(to_regclass(%s))", [view]).fetchone()
    if found is not None and found[0] == str(number):
        return
    connection.execute(f"drop view if exists {view}".encode())
    connection.execute(f"create view {view} as {select_state(number, state, schema)}".encode())
    connection.execute(f"comment on view {view} is '{number}'".encode())


def view_name(operator: str, state_name: str, number: int) -> str:
    name = f"{operator}.{state_name}"
    if len(name.encode()) <= _NAME_BYTES_MAX:
        return name
    ending = f"~{number}"
    return name.encode()[: _NAME_BYTES_MAX - len(ending)].decode(errors="ignore") + ending


def quote_name(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def select_state(number: int, state: StoredState, schema: str) -> str:
    """Return the query of a state's view."""
    columns = dict(_key_columns(state))
    entry = _entry(state)
    if entry is not None:
        columns["entry"] = entry
    for name, text in _value_columns(state):
        columns[name if name not in columns else f"value_{name}"] = text
    shown = ", ".join(f"{text} as {quote_name(name)}" for name, text in columns.items())
    at = 9 if state.kind == "timers" else 0
    has_entries = state.kind in ("map", "list")
    rest = " and k.at < length(r.name)" if has_entries else ""
    return (
        f"select r.grp as key_group, {shown}, r.epoch from {{s}}.visible v"
        " cross join lateral (select distinct on (name) grp, name, value, epoch from {s}.rows"
        " where rows.grp = v.grp and rows.state = v.state and rows.epoch <@ v.epochs"
        " order by name, epoch desc) r"
        f" cross join lateral {{s}}.unpack_at(r.name, {at}) k"
        f" cross join lateral (select {{s}}.unpack(r.value) as value) u"
        f" where v.state = {number} and r.value is not null{rest}"
    ).replace("{s}", schema)


def _key_columns(state: StoredState) -> Iterator[tuple[str, str]]:
    for name, text in _columns("k.value", parse_type(state.key_type), "key"):
        yield name if name not in _OWN else f"key_{name}", text


def _value_columns(state: StoredState) -> Iterator[tuple[str, str]]:
    if state.kind == "timers":
        return
    for name, text in _columns("u.value", parse_type(state.type), "value"):
        yield name if name not in _OWN else f"value_{name}", text


def _columns(json: str, type: pa.DataType, name: str) -> Iterator[tuple[str, str]]:
    if type is not OBJECT and pa.types.is_struct(type):
        for place, field in enumerate(type):
            yield field.name, to_typed(f"({json} -> {place})", field.type)
    else:
        yield name, to_typed(json, type)


def _entry(state: StoredState) -> str | None:
    if state.kind == "map":
        assert state.entry_type is not None, "a map has entries"
        json = "(select e.value from {s}.unpack_at(r.name, k.at) e)"
        return to_typed(json, parse_type(state.entry_type))
    return {"list": _ENTRY_LIST, "timers": _ENTRY_TIME}.get(state.kind)


def to_typed(json: str, type: pa.DataType) -> str:
    """Return the SQL of a value of PostgreSQL's type, from the JSON of what is stored."""
    some = f"nullif({json}, 'null')"
    text = f"({some} #>> '{{}}')"
    if type is OBJECT or pa.types.is_binary(type):
        return f"decode({text}, 'hex')"
    if pa.types.is_boolean(type):
        return f"{some}::boolean"
    if pa.types.is_integer(type):
        return f"{text}::{_INTEGERS[type.bit_width]}"
    if pa.types.is_floating(type):
        return f"{text}::{'float4' if type.bit_width == 32 else 'float8'}"
    if pa.types.is_decimal(type):
        shift = f"1e-{type.scale}::numeric"
        return f"({text}::numeric * {shift})::numeric({type.precision}, {type.scale})"
    if pa.types.is_date(type):
        return f"date '0001-01-01' + ({text}::int4 - 1)"
    if pa.types.is_timestamp(type):
        zone = "timestamp" if type.tz is None else "timestamptz"
        return f"({zone} '1970-01-01 00:00:00{'' if type.tz is None else '+00'}' + {_span(text)})"
    if pa.types.is_duration(type):
        return _span(text)
    if _is_nested(type):
        return f"case when {some} is not null then {_to_json(json, type)} end"
    return text


def _span(micros: str) -> str:
    # Whole seconds apart: an interval is multiplied as a float, which has 53 bits.
    whole = f"({micros}::int8 / 1000000) * interval '1 second'"
    return f"({whole} + ({micros}::int8 % 1000000) * interval '1 microsecond')"


def _is_nested(type: pa.DataType) -> bool:
    return bool(pa.types.is_struct(type) or pa.types.is_list(type) or pa.types.is_map(type))


def _to_json(json: str, type: pa.DataType) -> str:
    if pa.types.is_struct(type):
        parts = (
            f"'{_escape(field.name)}', {to_typed(f'({json} -> {place})', field.type)}"
            for place, field in enumerate(type)
        )
        return f"jsonb_build_object({', '.join(parts)})"
    if pa.types.is_map(type):
        pair = ", ".join(
            to_typed(f"(i.value -> {place})", part)
            for place, part in enumerate((type.key_type, type.item_type))
        )
        item = f"jsonb_build_array({pair})"
    else:
        item = f"to_jsonb({to_typed('i.value', type.value_type)})"
    items = f"jsonb_array_elements({json}) with ordinality i(value, place)"
    return f"(select coalesce(jsonb_agg({item} order by i.place), '[]') from {items})"


def _escape(text: str) -> str:
    return text.replace("'", "''")
