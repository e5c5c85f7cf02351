"""Partials that Spark sends to an aggregation, by row or aggregated before the shuffle, as SQL.

    rows      a projection: sum -> v, count -> 1 or 0, stddev -> (1, v, 0), ...
    grouped   the same columns, of a groupBy over keys (and panes of windows)

The slot merges either, so each epoch can use either plan.

Always true here:
- both plans have the same columns in the same order, and merge to the same results;
- in both, partials depend on the rows, not on their order, with two exceptions: the last digits of
  sums and moments of floats, and first and last without event time, which go by arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from cairn.functions import PartialProcess
from cairn.operators.aggregates.accumulate import Aggregate
from cairn.operators.aggregates.edges import Edge, ValueBy
from cairn.operators.aggregates.objects import Sketch
from cairn.operators.aggregates.parse import Call, find_column
from cairn.operators.aggregates.parts import Count, Moments, Part
from cairn.operators.aggregates.sets import SetPart
from cairn.operators.aggregates.signed import FloatSum
from cairn.types import type_ddl

_EMPTY = "cast(array() AS array<bigint>)"
_TIMESTAMP = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class Layout:
    """Names of the columns of the partial stream."""

    keys: tuple[str, ...]
    time: str | None
    row: str | None
    """A struct of the whole row, for late rows."""
    count: str
    """Number of rows that a partial stands for."""
    parts: tuple[str, ...]
    """The columns of all parts, in order. Several parts may read one."""
    conditions: tuple[str | None, ...]
    """For each of `parts`, the column that is true in rows that count; None: all rows do."""
    is_keyless: bool = False
    """The key is a constant: results are about all rows."""
    weight: str | None = None
    """Number of rows that a partial adds, less those it takes back; None: none are taken back."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """For parts that keep values of a column of the stream: that column, by the partials' own."""


@dataclass(frozen=True)
class Partials:
    """SQL of both plans, each column with its name.

    If only the plan by row is possible, `grouping` is None and `grouped` empty.
    """

    layout: Layout
    schema: pa.Schema
    rows: tuple[str, ...]
    grouping: tuple[str, ...] | None
    grouped: tuple[str, ...]
    ahead: PartialProcess | None = None
    """Makes the partials of rows that are in a slot; None if only Spark can."""


def make_partials(
    schema: pa.Schema,
    keys: Sequence[str],
    aggregates: Sequence[Aggregate],
    *,
    order: str | None,
    time: str | None = None,
    pane: str | None = None,
    carries_rows: bool = False,
    may_group: bool = True,
    checks_overflow: bool = True,
    change: str | None = None,
) -> Partials:
    """Return the SQL of both plans.

    `order` is SQL of the event time in microseconds, for first and last. `time` is SQL of the
    timestamp that partials carry, `pane` of the start of its pane. `checks_overflow`: Spark
    raises when a sum leaves its type, as the slot does. `change` is the column with -1 in rows
    that are taken back; the first of the aggregates then counts the rows that are left.
    """
    columns = _PartialColumns(_mark(keys), change)
    for key in keys:
        columns.add_grouping(schema.field(key), _quote(key), _quote(key))
    all_keys = [*keys]
    if not keys:
        all_keys = [columns.add_grouping(columns.field("all", pa.bool_()), "true", "true")]
    if time is not None:
        time = columns.add_grouping(columns.field("time", _TIMESTAMP), time, pane or time)
    # The grouped plan groups by them as well: a set of any size does not fit one row.
    kept = [
        columns.add_values(schema, aggregate.call, part)
        for aggregate in aggregates
        for part in aggregate.parts
        if isinstance(part, SetPart)
    ]
    row = None
    if carries_rows:
        inner = ", ".join(_quote(name) for name in schema.names)
        row = columns.add(columns.field("row", pa.struct(list(schema))), f"struct({inner})")
    count = columns.add(columns.field("count", pa.int64()), "1L", "count(1)")
    values = iter(kept)
    parts: list[tuple[str, str | None]] = []
    for aggregate in aggregates:
        for part in aggregate.parts:
            if isinstance(part, SetPart):
                parts.append(next(values))
            else:
                parts += columns.add_part(aggregate.call, part, order, count)
    part_names = tuple(name for name, _ in parts)
    may_group = (
        may_group
        and not carries_rows
        and all(_can_group(aggregate, checks_overflow) for aggregate in aggregates)
    )
    return Partials(
        Layout(
            tuple(all_keys),
            time,
            row,
            count,
            part_names,
            tuple(condition for _, condition in parts),
            is_keyless=not keys,
            weight=None if change is None else part_names[0],
            sources=columns.sources,
        ),
        pa.schema(columns.fields),
        tuple(columns.rows),
        tuple(columns.grouping) if may_group else None,
        tuple(columns.grouped) if may_group else (),
    )


class _PartialColumns:
    """The columns of both plans, as they are added."""

    def __init__(self, mark: str, change: str | None) -> None:
        self._mark = mark
        self._weight = None if change is None else f"cast({_quote(change)} AS bigint)"
        self.fields: list[pa.Field] = []
        self.rows: list[str] = []
        self.grouping: list[str] = []
        self.grouped: list[str] = []
        self._part_count = 0
        self._values: dict[str, str] = {}
        """The columns of kept values, by their SQL."""
        self._conditions: dict[str, str] = {}
        self.sources: dict[str, str] = {}

    def field(self, name: str, type_: pa.DataType) -> pa.Field:
        return pa.field(self._mark + name, type_)

    def add(self, field: pa.Field, by_row: str, by_group: str | None = None) -> str:
        """Add a column; without `by_group` only to the plan by row. Return its name."""
        name: str = field.name
        self.fields.append(field)
        self.rows.append(_as(by_row, name))
        if by_group is not None:
            self.grouped.append(_as(by_group, name))
        return name

    def add_grouping(self, field: pa.Field, by_row: str, by_group: str) -> str:
        """Add a column that the grouped plan groups by. Return its name."""
        self.grouping.append(_as(by_group, field.name))
        return self.add(field, by_row)

    def add_values(self, schema: pa.Schema, call: Call, part: SetPart) -> tuple[str, str | None]:
        """Add the column of the values that a part keeps, and of the condition for them.

        Parts share columns. Only a plain column is read in rows that do not count: an expression
        might fail there.
        """
        (type_,) = part.partial_types
        value, condition = call.value, None
        source = find_column(schema, call.argument)
        if source is not None:
            value = _quote(source)
            condition = None if call.where is None else self._add_condition(call.where)
        sql = _cast(f"({value})", type_)
        if sql not in self._values:
            field = self.field(f"v{len(self.grouping)}", type_)
            self._values[sql] = self.add_grouping(field, sql, sql)
        name = self._values[sql]
        if source is not None:
            self.sources[name] = source
        return name, condition

    def _add_condition(self, where: str) -> str:
        if where not in self._conditions:
            field = self.field(f"w{len(self.grouping)}", pa.bool_())
            sql = f"coalesce({where}, false)"
            self._conditions[where] = self.add_grouping(field, sql, sql)
        return self._conditions[where]

    def add_part(
        self, call: Call, part: Part, order: str | None, count: str
    ) -> list[tuple[str, str | None]]:
        """Add the columns of a part; return each with the condition for it."""
        counts_rows = isinstance(part, Count) and call.argument is None
        if self._weight is not None:
            by_rows = _sql_with_sign(call, part, self._weight)
            sql = by_rows, [f"sum({each})" for each in by_rows]
        elif counts_rows and (call.where is None or call.where in self._conditions):
            # A condition is the same in all rows of a group.
            self._part_count += 1
            return [(count, None if call.where is None else self._conditions[call.where])]
        else:
            sql = _part_sql(call, part, order)
        names: list[tuple[str, str | None]] = []
        for type_, by_row, by_group in zip(part.partial_types, *sql, strict=True):
            field = self.field(f"p{self._part_count}", type_)
            self._part_count += 1
            name = self.add(field, _cast(by_row, type_), _cast(by_group, type_))
            names.append((name, None))
        return names


def _part_sql(call: Call, part: Part, order: str | None) -> tuple[list[str], list[str]]:
    """Return the SQL of each column of a part: of one row, and of a group of rows."""
    if isinstance(part, Edge):
        return _edge_sql(call, part, f"({call.argument})", order)
    if isinstance(part, ValueBy):
        return _value_by_sql(call, part)
    x = f"({call.value})"
    if isinstance(part, Count):
        return [f"if({x} IS NULL, 0L, 1L)"], [f"count{x}"]
    if isinstance(part, Moments):
        x = f"cast({x} AS double)"
        return (
            [f"if({x} IS NULL, 0L, 1L)", f"coalesce({x}, 0D)", "0D"],
            [f"count({x})", f"coalesce(avg({x}), 0D)", f"coalesce(var_pop({x}) * count({x}), 0D)"],
        )
    if isinstance(part, Sketch):
        hashes = f"if({x} IS NULL, {_EMPTY}, array(xxhash64({x})))"
        # Never grouped; see `_can_group`.
        return [hashes], [hashes]
    if part.names == ("sum",):
        total = f"cast({x} AS {_summand(part)})"
        return [total], [f"sum({total})"]
    assert part.names in (("min",), ("max",)), f"{part.names} have no SQL"
    return [x], [f"{part.names[0]}{x}"]


def _sql_with_sign(call: Call, part: Part, weight: str) -> list[str]:
    """Return the SQL of each column of a part, of one row that adds or takes back."""
    x = f"({call.value})"
    if isinstance(part, Count):
        return [f"if({x} IS NULL, 0L, {weight})"]
    if isinstance(part, FloatSum):
        x = f"cast({x} AS double)"
        up, down = "cast('Infinity' AS double)", "cast('-Infinity' AS double)"
        is_finite = f"NOT isnan({x}) AND {x} NOT IN ({up}, {down})"
        return [
            f"if({is_finite}, {x} * {weight}, 0D)",
            f"if(isnan({x}), {weight}, 0L)",
            f"if({x} = {up}, {weight}, 0L)",
            f"if({x} = {down}, {weight}, 0L)",
        ]
    assert part.names == ("sum",), f"{part.names} have no SQL"
    total = f"cast({x} AS {_summand(part)})"
    return [f"if({weight} < 0, -{total}, {total})"]


def _summand(part: Part) -> str:
    (type_,) = part.types
    return type_ddl(type_)


def _edge_sql(call: Call, part: Edge, x: str, order: str | None) -> tuple[list[str], list[str]]:
    at = order if part.is_timed and order is not None else "0L"
    seen = f"{at} IS NOT NULL" + (f" AND {x} IS NOT NULL" if call.skips_nulls else "")
    if call.where is not None:
        seen += f" AND {call.where}"
    choose = {
        (True, False): "min",
        (True, True): "max",
        (False, False): "first",
        (False, True): "last",
    }[part.is_timed, part.is_last]
    chosen = f"{choose}(named_struct('at', {at}, 'x', {x})) FILTER (WHERE {seen})"
    return [f"if({seen}, {at}, null)", x], [f"({chosen}).at", f"({chosen}).x"]


def _value_by_sql(call: Call, part: ValueBy) -> tuple[list[str], list[str]]:
    x, by = f"({call.argument})", f"({call.by_value})"
    choose = "max" if part.is_max else "min"
    # Among rows with the same `by` the value decides, as in the slot.
    chosen = f"{choose}(named_struct('by', {by}, 'x', {x})) FILTER (WHERE {by} IS NOT NULL)"
    return [by, x], [f"({chosen}).by", f"({chosen}).x"]


def _can_group(aggregate: Aggregate, checks_overflow: bool) -> bool:
    for part in aggregate.parts:
        # The hashes of a group would be a set of any size, in one row.
        if isinstance(part, Sketch):
            return False
        # Spark has no order of maps.
        if isinstance(part, Edge) and part.is_timed and _has_map(part.type):
            return False
        if isinstance(part, ValueBy) and _has_map(part.type):
            return False
        # Spark would wrap the sum, or make it null.
        if part.names == ("sum",) and part.types != (pa.float64(),) and not checks_overflow:
            return False
    return True


def _has_map(type_: pa.DataType) -> bool:
    if pa.types.is_map(type_):
        return True
    if not pa.types.is_nested(type_):
        return False
    return any(_has_map(type_.field(at).type) for at in range(type_.num_fields))


def _mark(keys: Collection[str]) -> str:
    """Return a prefix that no key column has."""
    mark = "_"
    while any(key.startswith(mark) for key in keys):
        mark += "_"
    return mark


def _cast(sql: str, type_: pa.DataType) -> str:
    return f"cast({sql} AS {type_ddl(type_)})"


def _as(sql: str, name: str) -> str:
    return f"{sql} AS {_quote(name)}"


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
