"""What Spark sends to an aggregation: partials, row by row or aggregated already, as SQL.

    rows      a projection: sum -> v, count -> 1 or 0, stddev -> (1, v, 0), ...
    grouped   the same columns, of a groupBy over keys (and panes of windows)

The slot merges either, so the choice is free epoch by epoch.

Always true here:
- both plans give the same columns in the same order, and merge to the same results;
- in both, the partials of a group of rows are a function of the rows, not of their order; but
  sums and moments of floats, which differ in their last digits with the order in which Spark's
  groupBy comes to the rows, and first and last without event time, which go by arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pyarrow as pa

from cairn.operators.aggregates.accumulate import Aggregate
from cairn.operators.aggregates.objects import Distinct, Edge
from cairn.operators.aggregates.parse import Call
from cairn.operators.aggregates.parts import Count, Moments, Part
from cairn.types import type_ddl

_EMPTY = "cast(array() AS array<bigint>)"


@dataclass(frozen=True)
class Layout:
    """Where the columns of the partial stream are."""

    keys: tuple[str, ...]
    time: str | None
    row: str | None
    """A struct of the whole row, for those that come too late."""
    count: str
    """How many rows a partial stands for."""
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Partials:
    """SQL for both plans, each column under its name; `grouping` None: row by row only.

    `grouped` is empty then.
    """

    layout: Layout
    schema: pa.Schema
    rows: tuple[str, ...]
    grouping: tuple[str, ...] | None
    grouped: tuple[str, ...]


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
) -> Partials:
    """`order`: SQL of the event time in microseconds, for first and last. `time`: SQL of the
    timestamp partials carry, `pane` of the start of the pane it falls into. `checks_overflow`:
    Spark raises when a sum leaves its type, as the slot does.
    """
    mark = _mark(keys)
    fields = [schema.field(key) for key in keys]
    rows = [_named(_quoted(key), key) for key in keys]
    grouping = list(rows)
    grouped: list[str] = []
    if time is not None:
        fields.append(pa.field(f"{mark}time", pa.timestamp("us", "UTC")))
        rows.append(_named(time, f"{mark}time"))
        grouping.append(_named(pane or time, f"{mark}time"))
    if carries_rows:
        struct = pa.struct(list(schema))
        fields.append(pa.field(f"{mark}row", struct))
        inner = ", ".join(_quoted(name) for name in schema.names)
        rows.append(_named(f"struct({inner})", f"{mark}row"))
    fields.append(pa.field(f"{mark}count", pa.int64()))
    rows.append(_named("1L", f"{mark}count"))
    grouped.append(_named("count(1)", f"{mark}count"))
    names: list[str] = []
    for aggregate in aggregates:
        for part in aggregate.parts:
            if isinstance(part, Count) and aggregate.call.argument is None:
                names.append(f"{mark}count")
                continue
            one_row, many = _part_sql(aggregate.call, part, order)
            for type_, by_row, by_group in zip(part.partial_types, one_row, many, strict=True):
                name = f"{mark}p{len(names)}"
                names.append(name)
                fields.append(pa.field(name, type_))
                rows.append(_named(_cast(by_row, type_), name))
                grouped.append(_named(_cast(by_group, type_), name))
    may_group = (
        may_group
        and not carries_rows
        and all(_can_group(aggregate, checks_overflow) for aggregate in aggregates)
    )
    return Partials(
        Layout(
            tuple(keys),
            None if time is None else f"{mark}time",
            f"{mark}row" if carries_rows else None,
            f"{mark}count",
            tuple(names),
        ),
        pa.schema(fields),
        tuple(rows),
        tuple(grouping) if may_group else None,
        tuple(grouped) if may_group else (),
    )


def _part_sql(call: Call, part: Part, order: str | None) -> tuple[list[str], list[str]]:
    """(of one row, of a group of rows): SQL for each column of a part."""
    x = f"({call.argument})"
    if isinstance(part, Count):
        return [f"if({x} IS NULL, 0L, 1L)"], [f"count{x}"]
    if isinstance(part, Moments):
        x = f"cast({x} AS double)"
        return (
            [f"if({x} IS NULL, 0L, 1L)", f"coalesce({x}, 0D)", "0D"],
            [f"count({x})", f"coalesce(avg({x}), 0D)", f"coalesce(var_pop({x}) * count({x}), 0D)"],
        )
    if isinstance(part, Edge):
        return _edge_sql(call, part, x, order)
    if isinstance(part, Distinct):
        hashes = f"if({x} IS NULL, {_EMPTY}, array(xxhash64({x})))"
        # Never grouped; see `_can_group`.
        return [hashes], [hashes]
    if part.names == ("sum",):
        total = f"cast({x} AS {_summand(part)})"
        return [total], [f"sum({total})"]
    return [x], [f"{call.function}{x}"]


def _summand(part: Part) -> str:
    (type_,) = part.types
    return type_ddl(type_)


def _edge_sql(call: Call, part: Edge, x: str, order: str | None) -> tuple[list[str], list[str]]:
    at = order if part.is_timed and order is not None else "0L"
    seen = f"{at} IS NOT NULL" + (f" AND {x} IS NOT NULL" if call.skips_nulls else "")
    choose = {
        (True, False): "min",
        (True, True): "max",
        (False, False): "first",
        (False, True): "last",
    }[part.is_timed, part.is_last]
    chosen = f"{choose}(named_struct('at', {at}, 'x', {x})) FILTER (WHERE {seen})"
    return [f"if({seen}, {at}, null)", x], [f"({chosen}).at", f"({chosen}).x"]


def _can_group(aggregate: Aggregate, checks_overflow: bool) -> bool:
    for part in aggregate.parts:
        # The hashes of a group would be a set of any size, in one row.
        if isinstance(part, Distinct):
            return False
        # Spark and the slot may not agree on the order of nested values.
        if isinstance(part, Edge) and part.is_timed and pa.types.is_nested(part.type):
            return False
        # Spark would wrap the sum, or make it null.
        if part.names == ("sum",) and part.types != (pa.float64(),) and not checks_overflow:
            return False
    return True


def _mark(keys: Collection[str]) -> str:
    """A beginning that no key column has."""
    mark = "_"
    while any(key.startswith(mark) for key in keys):
        mark += "_"
    return mark


def _cast(sql: str, type_: pa.DataType) -> str:
    return f"cast({sql} AS {type_ddl(type_)})"


def _named(sql: str, name: str) -> str:
    return f"{sql} AS {_quoted(name)}"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
