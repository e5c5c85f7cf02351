"""From `.aggregate(...)` to nodes of the graph: partials from Spark, and the function that merges.

Types are Spark's own: it is asked by planning the expressions on no rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import pyarrow as pa

from cairn.errors import PlanError
from cairn.operators.aggregates.accumulate import (
    Accumulators,
    Aggregate,
    make_aggregate,
    net_rows,
)
from cairn.operators.aggregates.ahead import PaneTime, make_ahead
from cairn.operators.aggregates.assign import pane_us
from cairn.operators.aggregates.counted import CountAggregate
from cairn.operators.aggregates.emission import CHANGE, has_changes
from cairn.operators.aggregates.parse import Call, parse_calls
from cairn.operators.aggregates.partial import Partials, make_partials
from cairn.operators.aggregates.running import Aggregation, RunningAggregate
from cairn.operators.aggregates.windowed import WindowAggregate
from cairn.operators.window_functions import WINDOW_COLUMNS
from cairn.operators.window_process import WindowPlan
from cairn.plan.graph import (
    EventTime,
    Node,
    PartialNode,
    Port,
    port_schema,
    unite_schemas,
    unite_times,
)
from cairn.plan.sql import quote, time_sql
from cairn.windows import Count, Session, Sliding, Tumbling, WindowSpec


@dataclass(frozen=True)
class Output:
    """The form and the times of what an aggregation emits."""

    changes: bool = False
    """Pairs of the result before and the result after."""
    every_ms: int | None = None
    """For a running one: the time between two results of a key; None: one per epoch."""


def aggregation(
    spark: Any,
    nodes: dict[str, Node],
    ports: tuple[Port, ...],
    keys: Sequence[str],
    asked: Mapping[str, str],
    plan: WindowPlan | None,
    output: Output,
    *,
    carries_rows: bool = False,
) -> tuple[Aggregation, Partials]:
    """The function of an aggregation and what it is fed. `plan`: of windows, None: running.

    `carries_rows`: late rows are wanted, whole.
    """
    schema = unite_schemas([port_schema(nodes, port) for port in ports])
    order = _order(nodes, ports, schema)
    taken = [*keys] if plan is None else [*keys, *WINDOW_COLUMNS]
    calls = parse_calls(asked, [*taken, CHANGE] if output.changes else taken)
    takes_back = has_changes(schema)
    if takes_back and CHANGE in keys:
        raise PlanError(
            f"key_by({CHANGE!r}): the column marks rows that are taken back\n"
            "  next: use another key, or rename the column first to count changes"
        )
    found = [
        _find_types(spark, schema, call, is_timed=order is not None, takes_back=takes_back)
        for call in calls
    ]
    if takes_back:
        found.insert(0, net_rows())
    change = CHANGE if takes_back else None
    make = functools.partial(
        make_partials,
        schema,
        keys,
        found,
        order=order,
        checks_overflow=spark.conf.get("spark.sql.ansi.enabled") == "true",
        change=change,
    )
    results = [aggregate.field for aggregate in found][int(takes_back) :]
    columns = [schema.field(key) for key in keys]
    accumulators = Accumulators(found)
    if plan is None:
        partials = make()
        partials = replace(partials, ahead=make_ahead(schema, found, partials, None, change))
        made = pa.schema([*columns, *results])
        running = RunningAggregate(
            accumulators, partials.layout, made, changes=output.changes, every_ms=output.every_ms
        )
        return running, partials
    partials = make(carries_rows=carries_rows, **_window_columns(plan, order))
    bounds = [pa.field(name, pa.timestamp("us", "UTC")) for name in WINDOW_COLUMNS]
    made = pa.schema([*columns, *bounds, *results])
    if isinstance(plan.windows, Count):
        _check_counted(has_changes=takes_back or output.changes)
        return CountAggregate(plan.windows, accumulators, partials.layout, made), partials
    time = _pane_time(plan.windows, unite_times(nodes, ports))
    partials = replace(partials, ahead=make_ahead(schema, found, partials, time, change))
    windows = WindowAggregate(plan, accumulators, partials.layout, made, changes=output.changes)
    return windows, partials


def _check_counted(*, has_changes: bool) -> None:
    if has_changes:
        raise PlanError(
            "windows of a number of rows neither read nor emit changes: a row that is taken "
            "back has no place among those counted\n"
            "  next: use windows of time, or a running aggregate"
        )


class _WindowColumns(TypedDict):
    time: str | None
    pane: str | None
    may_group: bool


def _window_columns(plan: WindowPlan, order: str | None) -> _WindowColumns:
    """The times that partials of windows have, as SQL, and whether they can be grouped ahead."""
    spec = plan.windows
    time = None if order is None else f"timestamp_micros({order})"
    if isinstance(spec, Count):
        # Rows are counted one by one, in the order of their time.
        return {"time": time, "pane": None, "may_group": False}
    if not plan.has_late_rows or order is None:
        return {"time": None, "pane": None, "may_group": True}
    pane = None
    may_group = not isinstance(spec, Session)
    if isinstance(spec, Tumbling | Sliding):
        length = pane_us(spec)
        may_group = length is not None
        offset = spec.offset_ms * 1000
        pane = f"timestamp_micros({order} - pmod({order} - {offset}L, {length}L))"
    return {"time": time, "pane": pane, "may_group": may_group}


def _pane_time(spec: WindowSpec, time: EventTime | None) -> PaneTime | None:
    """Return the time of partials that are grouped in a slot."""
    if time is None:
        return None
    if not isinstance(spec, Tumbling | Sliding):
        return PaneTime(time.column, time.shift_us)
    return PaneTime(time.column, time.shift_us, pane_us(spec), spec.offset_ms * 1000)


def partial_node(name: str, ports: tuple[Port, ...], uid: str, partials: Partials) -> PartialNode:
    return PartialNode(
        name, ports, None, partials.schema, partials.layout.time, uid=uid, partials=partials
    )


def _order(nodes: dict[str, Node], ports: Sequence[Port], schema: pa.Schema) -> str | None:
    """SQL of the event time in microseconds, where the streams have one."""
    time = unite_times(nodes, ports)
    if time is None:
        return None
    sql = time_sql(quote(time.column), schema.field(time.column).type)
    return f"({sql} + ({time.shift_us}))" if time.shift_us else sql


def _find_types(
    spark: Any, schema: pa.Schema, call: Call, *, is_timed: bool, takes_back: bool
) -> Aggregate:
    from cairn.plan.frames import plan_schema

    argument = "1" if call.argument is None else call.argument
    arguments = [f"({argument}) AS x"]
    if call.by is not None:
        arguments.append(f"({call.by}) AS by")
    try:
        given = plan_schema(spark, schema, lambda df: df.selectExpr(*arguments))
        result = plan_schema(spark, schema, lambda df: df.selectExpr(f"{call.sql} AS x"))
    except PlanError as error:
        raise PlanError(
            f"aggregate {call.name!r}, {call.sql}: {error}", column=call.name
        ) from error
    return make_aggregate(
        call,
        given.field("x").type,
        result.field("x").type,
        is_timed=is_timed,
        by_type=None if call.by is None else given.field("by").type,
        takes_back=takes_back,
    )
