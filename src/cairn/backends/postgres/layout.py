"""The tables of a job in PostgreSQL: one schema per job.

    rows       a version of a row: key group, state, name, the epoch it is of, value (null: deleted)
    states     the states, with their types
    ranges     per operator and key group: the newest term that wrote, the epoch it applied, and
               the newest epoch that it claimed to write rows of
    visible    per state and key group: the epochs whose rows make up the newest applied state
    state      a view of the newest applied state, as JSON
    "…"        a view with typed columns per state (`postgres.views`)

A name is the packed key; of an entry of a map the packed key and the packed entry, of an item of a
list the packed key and its index (8 bytes, big endian). Maps and lists also have a row with the
name of the key alone: their size. The name of a timer is the packed time (an unsigned integer of 8
bytes, 2^63 more than the milliseconds since 1970) and the packed key. A state named "….times" is
the time index of another one, with such names; no view shows it. Packed is msgpack; `unpack`
makes JSON of it.

Always true here:
- a row of an epoch has the value that the epoch left, so the newest visible row is right;
- a state with other types is another state, with another number.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from cairn.backends.cached.described import StoredState
from cairn.backends.cached.numbers import state_number
from cairn.backends.cached.timer_names import is_index
from cairn.backends.postgres.views import create_view
from cairn.errors import RestoreError

if TYPE_CHECKING:
    from psycopg import Connection

_LAYOUT_LOCK: Final = 0x6361_6972
_SCHEMA: Final = re.compile(r"cairn_[0-9a-z_]+")

_TABLES: Final = """
create schema if not exists {s};
create table if not exists {s}.rows (
    grp int2 not null, state int4 not null, name bytea not null, epoch int8 not null, value bytea);
create unique index if not exists rows_by_name on {s}.rows (grp, state, name, epoch desc);
create index if not exists rows_by_epoch on {s}.rows using brin (epoch);
create table if not exists {s}.states (
    state int4 primary key, operator text not null, name text not null, kind text not null,
    key_type text not null, entry_type text, type text not null);
create table if not exists {s}.ranges (
    operator text not null, grp int2 not null, term int8 not null, applied int8 not null,
    collected int8 not null default -1, claimed int8 not null default -1,
    primary key (operator, grp));
-- Tables of earlier versions have no such column.
alter table {s}.ranges add column if not exists claimed int8 not null default -1;
create table if not exists {s}.visible (
    state int4 not null, grp int2 not null, epochs int8multirange not null,
    primary key (state, grp));

create or replace function {s}.number_at(data bytea, at int, bytes int) returns numeric
language plpgsql immutable as $$
declare found numeric := 0;
begin
    for i in 0..bytes - 1 loop found := found * 256 + get_byte(data, at + i); end loop;
    return found;
end $$;

create or replace function {s}.float_at(data bytea, at int, wide boolean) returns jsonb
language plpgsql immutable as $$
declare
    bits int := case when wide then 52 else 23 end;
    most int := case when wide then 2047 else 255 end;
    raw numeric := {s}.number_at(data, at, case when wide then 8 else 4 end);
    sign int := case when div(raw, (2::numeric) ^ (bits + case when wide then 11 else 8 end)) > 0
        then -1 else 1 end;
    exponent int := mod(div(raw, (2::numeric) ^ bits), most + 1)::int;
    fraction float8 := mod(raw, (2::numeric) ^ bits)::float8 / (2::float8 ^ bits);
begin
    if exponent = most then
        return to_jsonb(case when fraction > 0 then 'NaN'
            when sign > 0 then 'Infinity' else '-Infinity' end);
    end if;
    if exponent = 0 then return to_jsonb(sign * fraction * 2::float8 ^ (1 - most / 2)); end if;
    return to_jsonb(sign * (1 + fraction) * 2::float8 ^ (exponent - most / 2));
end $$;

create or replace function {s}.unpack_at(data bytea, inout at int, out value jsonb)
language plpgsql immutable as $$
declare
    tag int := get_byte(data, at);
    size int;
    item jsonb;
    other jsonb;
begin
    at := at + 1;
    if tag < 128 then value := to_jsonb(tag); return; end if;
    if tag >= 224 then value := to_jsonb(tag - 256); return; end if;
    if tag = 192 then value := 'null'; return; end if;
    if tag in (194, 195) then value := to_jsonb(tag = 195); return; end if;
    if tag in (202, 203) then
        value := {s}.float_at(data, at, tag = 203);
        at := at + case when tag = 203 then 8 else 4 end;
        return;
    end if;
    if tag between 204 and 211 then
        size := 1 << ((tag - 204) % 4);
        value := to_jsonb({s}.number_at(data, at, size)
            - case when tag >= 208 and get_byte(data, at) >= 128
                then (2::numeric) ^ (8 * size) else 0 end);
        value := to_jsonb(trunc(value::text::numeric));
        at := at + size;
        return;
    end if;
    if tag < 144 then size := tag - 128;
    elsif tag < 160 then size := tag - 144;
    elsif tag < 192 then size := tag - 160;
    else
        size := case when tag in (196, 217) then 1 when tag in (197, 218, 220, 222) then 2
            else 4 end;
        at := at + size;
        size := {s}.number_at(data, at - size, size)::int;
    end if;
    if tag < 144 or tag in (222, 223) then
        value := '[]';
        for i in 1..size loop
            select u.at, u.value into at, item from {s}.unpack_at(data, at) u;
            select u.at, u.value into at, other from {s}.unpack_at(data, at) u;
            value := value || jsonb_build_array(jsonb_build_array(item, other));
        end loop;
    elsif tag < 160 or tag in (220, 221) then
        value := '[]';
        for i in 1..size loop
            select u.at, u.value into at, item from {s}.unpack_at(data, at) u;
            value := value || jsonb_build_array(item);
        end loop;
    elsif tag in (196, 197, 198) then
        value := to_jsonb(encode(substring(data from at + 1 for size), 'hex'));
        at := at + size;
    else
        begin
            value := to_jsonb(convert_from(substring(data from at + 1 for size), 'UTF8'));
        exception when others then
            -- PostgreSQL's text has no NUL.
            value := to_jsonb(encode(substring(data from at + 1 for size), 'hex'));
        end;
        at := at + size;
    end if;
end $$;

create or replace function {s}.unpack(data bytea) returns jsonb language sql immutable as $$
    select value from {s}.unpack_at(data, 0) $$;

create or replace view {s}.state as
select s.operator, s.name as state, r.grp as key_group, k.value as key,
    case when s.kind = 'map' then (select e.value from {s}.unpack_at(r.name, k.at) e)
         when s.kind = 'timers' then to_jsonb({s}.number_at(r.name, 1, 8) - 9223372036854775808)
         when s.kind = 'list' then to_jsonb({s}.number_at(r.name, k.at, 8)) end as entry,
    {s}.unpack(r.value) as value, r.epoch
from {s}.visible v
join {s}.states s using (state)
cross join lateral (
    select distinct on (name) grp, name, value, epoch from {s}.rows
    where rows.grp = v.grp and rows.state = v.state and rows.epoch <@ v.epochs
    order by name, epoch desc) r
cross join lateral {s}.unpack_at(r.name, case when s.kind = 'timers' then 9 else 0 end) k
where r.value is not null and (s.kind not in ('map', 'list') or k.at < length(r.name));
"""


def check_schema(schema: str) -> None:
    """The name goes into statements as it is."""
    assert _SCHEMA.fullmatch(schema) and len(schema) < 64, f"schema {schema!r}"


def create_tables(connection: Connection[Any], schema: str) -> None:
    found = connection.execute(
        "select 1 from pg_attribute where attrelid = to_regclass(%s) and attname = 'claimed'"
        " and to_regclass(%s) is not null",
        [f"{schema}.ranges", f"{schema}.state"],
    ).fetchone()
    if found is not None:
        return
    with connection.transaction():
        connection.execute("select pg_advisory_xact_lock(%s)", [_LAYOUT_LOCK])
        connection.execute(_TABLES.replace("{s}", schema).encode())


def register_states(
    connection: Connection[Any], schema: str, operator: str, states: dict[str, StoredState]
) -> None:
    """Write down what the numbers of states mean, and make their views."""
    for name, state in states.items():
        number = state_number(operator, name, state)
        row = (number, operator, name, state.kind, state.key_type, state.entry_type, state.type)
        connection.execute(
            f"insert into {schema}.states values (%s, %s, %s, %s, %s, %s, %s)"
            " on conflict do nothing",
            row,
        )
        found = connection.execute(
            f"select * from {schema}.states where state = %s", [number]
        ).fetchone()
        if found != row:
            raise RestoreError(
                f"operator {operator!r}: states {name!r} and {found[2] if found else None!r} have "
                f"the same number, {number}\n  next: rename one of the two states"
            )
        if is_index(name):
            continue
        with connection.transaction():
            connection.execute("select pg_advisory_xact_lock(%s)", [_LAYOUT_LOCK])
            create_view(connection, schema, number, operator, name, state)


def drop_tables(connection: Connection[Any], schema: str) -> None:
    connection.execute(f"drop schema if exists {schema} cascade".encode())
