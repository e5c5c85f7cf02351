"""Loops in the graph: which ways lead back, to whom, and which cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from cairn import Job, KeyedProcess, PlanError, Process, sinks
from cairn.plan.aggregation import partial_node
from cairn.plan.deploy import job_spec
from cairn.plan.graph import Graph, Port
from cairn.plan.loops import returns_of
from cairn.plan.nodes import Inlet, LoopNode, Node, PartialNode, ProcessNode, SourceNode
from cairn.stream import Stream
from tests.unit.operators.aggregates.support import SCHEMA, made
from tests.unit.plan.programs import ROW, process, source, transform


class Pass(Process[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        return row


class Both(KeyedProcess[Any]):
    def on_left(self, row: Any, ctx: Any) -> Any:
        return row

    def on_right(self, row: Any, ctx: Any) -> Any:
        return row


@pytest.fixture
def job() -> Job:
    return Job("j", max_parallelism=16)


def edges(graph: Graph) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Per consumer, the level it is fed in and by whom."""
    return {e.consumer: (e.level, tuple(port.node for port in e.inputs)) for e in graph.edges}


def ended(stream: Stream) -> Graph:
    stream.sink_to(sinks.Noop(), uid="out")
    return stream._job.graph()


def test_what_is_sent_back_ends_in_the_level_after_its_senders(job: Job) -> None:
    def body(loop: Stream) -> tuple[Stream, Stream]:
        first = process(loop, "first")
        second = process(first, "second")
        return second, first

    graph = ended(source(job, "s").iterate(body, uid="loop"))
    assert edges(graph) == {
        "first": (0, ("s",)),
        "second": (1, ("first",)),
        "loop:first": (2, ("second",)),
    }
    spec = job_spec(graph, job_id="", checkpoint="", backend="heap")
    (feedback,) = spec.levels[2].feedbacks
    assert (feedback.uid, feedback.operator, feedback.lane) == ("loop:first", "first", 2)
    first, second = (level.operators[0] for level in spec.levels[:2])
    assert first.is_downstream and not first.is_behind_loop
    assert second.is_behind_loop, "it gets rows as old as those that went around"
    assert spec.rounds_max == 1


def test_everybody_on_the_loop_gets_what_is_sent_back(job: Job) -> None:
    def body(loop: Stream) -> tuple[Stream, Stream]:
        first, other = (
            process(loop, "first"),
            loop.key_by("v").process(PassRows(), schema=ROW, uid="other"),
        )
        return first, other

    graph = ended(source(job, "s").iterate(body, uid="loop", max_rounds_per_epoch=7))
    assert {back.uid for back in graph.returns} == {"loop:first", "loop:other"}
    by_consumer = {edge.consumer: edge for edge in graph.edges}
    assert by_consumer["loop:other"].keys == ("v",)
    assert job_spec(graph, job_id="", checkpoint="", backend="heap").rounds_max == 7


class PassRows(KeyedProcess[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        return row


def test_transforms_on_the_way_into_an_operator_are_on_the_way_back_too(job: Job) -> None:
    def body(loop: Stream) -> tuple[Stream, Stream]:
        first = process(transform(loop), "first")
        return transform(first), first

    graph = ended(source(job, "s").iterate(body, uid="loop"))
    fed, back = graph.edges
    assert [port.node.split(":")[0] for port in fed.inputs] == ["transform"]
    (port,) = back.inputs
    assert port.node.startswith("loop:transform")
    assert graph.origins(port) == (Port("first"),)


def test_a_loop_in_a_loop_has_both_ways_back(job: Job) -> None:
    def inner(loop: Stream) -> tuple[Stream, Stream]:
        first = process(loop, "first")
        return first, first.side("out", ROW)

    def outer(loop: Stream) -> tuple[Stream, Stream]:
        out = loop.iterate(inner, uid="inner")
        last = process(out, "last")
        return last, last.side("done", ROW)

    graph = ended(source(job, "s").iterate(outer, uid="outer"))
    assert edges(graph)["inner:first"] == (1, ("first",))
    assert edges(graph)["outer:first"] == (2, ("last",))


def test_an_operator_without_keys_may_be_in_a_loop(job: Job) -> None:
    def body(loop: Stream) -> tuple[Stream, Stream]:
        passed = loop.process(Pass(), schema=ROW, uid="pass")
        return passed, passed

    graph = ended(source(job, "s").iterate(body, uid="loop"))
    spec = job_spec(graph, job_id="", checkpoint="", backend="heap")
    assert spec.feedbacks[0].key_types == {"subtask": "int"}


def test_inputs_of_a_connected_operator_have_ways_back_of_their_own(job: Job) -> None:
    def body(loop: Stream) -> tuple[Stream, Stream]:
        streams = job.connect(left=loop.key_by("k"), right=transform(loop).key_by("v"))
        both = streams.process(Both(), schema=ROW, uid="both")
        return both, both

    graph = ended(source(job, "s").iterate(body, uid="loop"))
    assert [back.uid for back in graph.returns] == ["loop:both:left", "loop:both:right"]


@pytest.mark.parametrize("rounds", [0, -1, True, 1.5, "two"])
def test_rounds_are_a_number_from_one_on(job: Job, rounds: Any) -> None:
    with pytest.raises(PlanError, match="max_rounds_per_epoch must be a number from 1 to"):
        source(job, "s").iterate(
            lambda loop: (process(loop, "a"), loop), uid="loop", max_rounds_per_epoch=rounds
        )


def test_a_body_returns_two_streams(job: Job) -> None:
    with pytest.raises(PlanError, match=r"must return \(feedback, output\), two streams"):
        source(job, "s").iterate(lambda loop: process(loop, "a"), uid="loop")  # type: ignore


def test_feedback_has_the_columns_of_the_input(job: Job) -> None:
    def body(loop: Stream) -> tuple[Stream, Stream]:
        other = loop.key_by("k").process(PassRows(), schema="k long, w long", uid="a")
        return other, other

    rows = source(job, "s")
    with pytest.raises(PlanError, match=r"feedback of loop 'loop': the streams differ in v, w"):
        rows.iterate(body, uid="loop")
    # Nothing is left of it: the names are free.
    rows.iterate(lambda loop: (process(loop, "a"), process(loop, "b")), uid="loop")


def test_a_loop_that_sends_back_what_it_gets_is_refused(job: Job) -> None:
    with pytest.raises(PlanError, match="sends back what it gets"):
        source(job, "s").iterate(lambda loop: (transform(loop), process(loop, "a")), uid="loop")


def test_what_is_no_part_of_the_loop_cannot_be_sent_back(job: Job) -> None:
    rows = source(job, "s")
    elsewhere = process(rows, "elsewhere")
    with pytest.raises(PlanError, match="'elsewhere' is not part of it"):
        rows.iterate(lambda loop: (elsewhere, process(loop, "a")), uid="loop")


def test_a_sink_on_the_loop_itself_is_refused(job: Job) -> None:
    def body(loop: Stream) -> tuple[Stream, Stream]:
        first = process(loop, "first")
        return first, loop

    with pytest.raises(PlanError, match="sink 'out' is on loop 'loop' itself"):
        ended(source(job, "s").iterate(body, uid="loop"))


def test_a_loop_is_no_broadcast(job: Job) -> None:
    rows = source(job, "s")

    class Reads(Process[Any]):
        def process(self, row: Any, ctx: Any) -> Any:
            return row

        def process_broadcast(self, row: Any, ctx: Any) -> Any:
            return None

    def body(loop: Stream) -> tuple[Stream, Stream]:
        first = process(loop, "first")
        return first, rows.broadcast(loop).process(Reads(), schema=ROW, uid="reads")

    with pytest.raises(PlanError, match="has loop 'loop' as its broadcast"):
        ended(rows.iterate(body, uid="loop"))


def test_event_time_as_text_is_refused_in_a_loop(job: Job) -> None:
    rows = source(job, "s", "k long, ts string", "ts")

    def body(loop: Stream) -> tuple[Stream, Stream]:
        first = loop.key_by("k").process(PassRows(), schema="k long, ts string", uid="first")
        return first, first

    with pytest.raises(PlanError, match="event time as text"):
        ended(rows.iterate(body, uid="loop"))


def test_an_aggregate_on_a_loop_has_a_way_back_through_its_partials() -> None:
    function, partials = made(None)
    nodes: dict[str, Node] = {
        "rows": SourceNode("rows", None, SCHEMA, None, None),
        "loop": LoopNode("loop", (Port("rows"),), SCHEMA, (Port("sum"),), 1),
        "partial:sum": partial_node("partial:sum", (Port("loop"),), "sum", partials),
        "sum": ProcessNode("sum", (Inlet((Port("partial:sum"),), ("k",)),), function, SCHEMA),
    }
    found, returns = returns_of(nodes)
    assert [(back.uid, back.ports) for back in returns] == [
        ("loop:sum", (Port("loop:partial:sum"),))
    ]
    back = found["loop:partial:sum"]
    assert isinstance(back, PartialNode) and back.inputs == (Port("sum"),)
