"""Transforms that slots can run: where they do, and what they know of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from cairn import Job, sinks
from cairn.operators.select import Column, Condition, Constant, Selection
from cairn.plan.graph import EventTime, Port, SelectNode, TransformNode, Watermark
from cairn.plan.select_plan import SelectPlan
from cairn.plan.selects import Selects
from cairn.stream import Stream
from cairn.types import parse_schema
from tests.unit.plan.programs import process, source, transform

TIMED = "k long, at timestamp"
INT = pa.int64()


def select(stream: Stream, schema: str = "k long", at: int = 0) -> Stream:
    """Its rows with k = 1, with fewer columns: as a transform that has been translated."""
    found = transform(stream, schema)
    (port,) = found._ports
    node = stream._job._nodes[port.node]
    assert isinstance(node, TransformNode)
    columns = [stream.schema.names.index(name) for name in found.schema.names]
    types = [stream.schema.field(index).type for index in columns]
    selection = Selection(
        tuple(Column((index,), type_) for index, type_ in zip(columns, types, strict=True)),
        (Condition("EqualTo", (Column((at,), INT), Constant(1, INT))),),
    )
    plan = SelectPlan(selection, len, None, stream.schema, None)
    stream._job._nodes[port.node] = replace(node, select=plan)
    return found


def built(chaining: bool = True) -> Job:
    job = Job("selects", max_parallelism=8, chaining=chaining)
    rows = source(job, "rows", TIMED, "at", Watermark(1000))
    first = process(rows, "first", TIMED)
    chosen = select(select(first, TIMED), "k long")
    chosen.sink_to(sinks.Noop(), uid="out")
    process(chosen, "second", "k long")
    return job


def test_a_transform_of_operators_rows_is_chained_to_them() -> None:
    graph = built().graph()
    assert [[op.uid for op in level.operators] for level in graph.levels] == [
        ["first", "transform:2", "transform:3"],
        ["second"],
    ]
    assert {"transform:2", "transform:3", "out"} <= graph.chained
    assert [(edge.consumer, edge.inputs) for edge in graph.edges] == [
        ("first", (Port("rows"),)),
        ("second", (Port("transform:3"),)),
    ]


def test_the_event_time_goes_with_its_column() -> None:
    graph = built().graph()
    assert graph.times.event_time(Port("transform:2")) == EventTime("at")
    assert graph.times.event_time(Port("transform:3")) is None
    assert graph.times.has_watermark(Port("transform:3"))


def test_without_chaining_spark_runs_it() -> None:
    graph = built(chaining=False).graph()
    assert not any(isinstance(node, SelectNode) for node in graph.nodes.values())
    assert len(graph.levels) == 2 and graph.level_of("out") == 1


def test_a_transform_of_a_loops_beginning_stays_in_spark() -> None:
    """What comes back goes through it too, and comes from another place."""
    job = Job("loop", max_parallelism=8)

    def body(loop: Stream) -> tuple[Stream, Stream]:
        back = process(select(loop), "step", "k long")
        return back, back

    first = process(source(job, "rows", "k long"), "first", "k long")
    first.iterate(body, uid="loop").sink_to(sinks.Noop(), uid="out")
    nodes = job.graph().nodes.values()
    assert not any(isinstance(node, SelectNode) for node in nodes)


class Again(SelectPlan):
    """Plans another constant each time."""

    def again(self) -> Selection:
        (condition,) = self.selection.conditions
        assert isinstance(condition, Condition)
        column, _ = condition.arguments
        value = next(self.function)  # type: ignore[call-overload]
        changed = replace(condition, arguments=(column, Constant(value, INT)))
        return replace(self.selection, conditions=(changed,))


def test_only_functions_with_other_constants_are_sent_again() -> None:
    job = Job("again", max_parallelism=8)
    first = process(source(job, "rows", "k long"), "first", "k long")
    found = select(first)
    (port,) = found._ports
    node = job._nodes[port.node]
    assert isinstance(node, TransformNode) and node.select is not None
    plan = node.select
    again: Any = iter([1, 1, 2, 2, 1])
    made = Again(plan.selection, again, None, plan.schema, None)
    job._nodes[port.node] = replace(node, select=made)
    found.sink_to(sinks.Noop(), uid="out")
    selects = Selects(job.graph().operators)
    assert [(selects.plan(), list(selects.functions())) for _ in range(5)] == [
        (False, []),
        (False, []),
        (True, [port.node]),
        (False, [port.node]),
        (True, []),
    ]


def test_rows_are_kept_where_the_condition_is_true_and_not_where_it_is_null() -> None:
    schema = parse_schema("k long, o struct<n: long>")
    n = Column((1, 0), INT)
    is_two = Condition("EqualTo", (n, Constant(2, INT)))
    other = Condition("Or", (is_two, Condition("EqualTo", (Column((0,), INT), Constant(9, INT)))))
    rows = [(1, {"n": 2}), (2, {"n": 3}), (3, None), (9, {"n": None}), (9, None)]
    batch = pa.RecordBatch.from_pylist([{"k": k, "o": o} for k, o in rows], schema=schema)
    result = pa.schema([("k", INT), ("n", INT)])

    def kept(*conditions: Condition) -> list[tuple[Any, ...]]:
        found = Selection((Column((0,), INT), n), conditions).of(batch, result)
        return [tuple(row.values()) for row in found.to_pylist()]

    assert kept(is_two) == [(1, 2)]
    assert kept(Condition("Not", (is_two,))) == [(2, 3)]
    assert kept(other) == [(1, 2), (9, None), (9, None)]
    assert kept(other, Condition("IsNotNull", (n,))) == [(1, 2)]
    assert len(kept()) == 5
