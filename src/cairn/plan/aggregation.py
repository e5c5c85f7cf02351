"""From `.aggregate(...)` to nodes of the graph: partials from Spark, and the function that merges.

Types are Spark's own: it is asked by planning the expressions on no rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from cairn.errors import PlanError
from cairn.operators.aggregates.accumulate import Accumulators, Aggregate, make_aggregate
from cairn.operators.aggregates.assign import pane_us
from cairn.operators.aggregates.parse import Call, parse_calls
from cairn.operators.aggregates.partial import Partials, make_partials
from cairn.operators.aggregates.running import Aggregation, RunningAggregate
from cairn.operators.aggregates.windowed import WindowAggregate
from cairn.operators.window_functions import WINDOW_COLUMNS
from cairn.operators.window_process import WindowPlan
from cairn.plan.graph import (
    Node,
    PartialNode,
    Port,
    port_schema,
    unite_schemas,
    unite_times,
)
from cairn.plan.sql import quote, time_sql
from cairn.windows import Session, Sliding, Tumbling


def aggregation(
    spark: Any,
    nodes: dict[str, Node],
    ports: tuple[Port, ...],
    keys: Sequence[str],
    asked: Mapping[str, str],
    plan: WindowPlan | None,
    *,
    carries_rows: bool = False,
) -> tuple[Aggregation, Partials]:
    """The function of an aggregation and what it is fed. `plan`: of windows, None: running.

    `carries_rows`: late rows are wanted, whole.
    """
    schema = unite_schemas([port_schema(nodes, port) for port in ports])
    order = _order(nodes, ports, schema)
    taken = [*keys] if plan is None else [*keys, *WINDOW_COLUMNS]
    calls = parse_calls(asked, taken)
    found = [_find_types(spark, schema, call, is_timed=order is not None) for call in calls]
    checks_overflow = spark.conf.get("spark.sql.ansi.enabled") == "true"
    if plan is None:
        return _aggregate_all(schema, keys, found, order, checks_overflow=checks_overflow)
    return _aggregate_windows(
        schema, keys, found, order, plan, carries_rows=carries_rows, checks_overflow=checks_overflow
    )


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


def _find_types(spark: Any, schema: pa.Schema, call: Call, *, is_timed: bool) -> Aggregate:
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
    )


def _aggregate_all(
    schema: pa.Schema,
    keys: Sequence[str],
    aggregates: Sequence[Aggregate],
    order: str | None,
    *,
    checks_overflow: bool,
) -> tuple[Aggregation, Partials]:
    partials = make_partials(schema, keys, aggregates, order=order, checks_overflow=checks_overflow)
    result = pa.schema([*(schema.field(key) for key in keys), *(a.field for a in aggregates)])
    return RunningAggregate(Accumulators(aggregates), partials.layout, result), partials


def _aggregate_windows(
    schema: pa.Schema,
    keys: Sequence[str],
    aggregates: Sequence[Aggregate],
    order: str | None,
    plan: WindowPlan,
    *,
    carries_rows: bool,
    checks_overflow: bool,
) -> tuple[Aggregation, Partials]:
    spec = plan.windows
    time = pane = None
    may_group = True
    if plan.has_late_rows and order is not None:
        time = f"timestamp_micros({order})"
        may_group = not isinstance(spec, Session)
        if isinstance(spec, Tumbling | Sliding):
            length = pane_us(spec)
            may_group = length is not None
            offset = spec.offset_ms * 1000
            pane = f"timestamp_micros({order} - pmod({order} - {offset}L, {length}L))"
    partials = make_partials(
        schema,
        keys,
        aggregates,
        order=order,
        time=time,
        pane=pane,
        carries_rows=carries_rows,
        may_group=may_group,
        checks_overflow=checks_overflow,
    )
    bounds = [pa.field(name, pa.timestamp("us", "UTC")) for name in WINDOW_COLUMNS]
    fields = [*(schema.field(key) for key in keys), *bounds, *(a.field for a in aggregates)]
    made = WindowAggregate(plan, Accumulators(aggregates), partials.layout, pa.schema(fields))
    return made, partials
