"""Programs become levels: cut at the shuffles, with every row on its way once."""

from __future__ import annotations

from typing import Any

import pytest

from cairn import Job, KeyedProcess, Process, sinks, windows
from cairn.errors import PlanError
from cairn.functions import Hooks
from cairn.plan.deploy import job_spec
from cairn.plan.explain import explain_graph
from cairn.plan.graph import EventTime, Graph, Port, TransformNode, Watermark, port_time
from cairn.plan.levels import build_graph
from cairn.plan.measures import port_measures, source_measures
from cairn.protocol.spec import JobSpec
from cairn.report.drawing import draw_graph
from cairn.report.graph_text import graph_text
from cairn.stream import Stream
from cairn.types import parse_schema
from tests.unit.plan.programs import ROW, Pass, process, source, transform


@pytest.fixture
def job() -> Job:
    return Job("j", max_parallelism=16)


class Plain(Process[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        return row


class Twice(KeyedProcess[Any]):
    def on_x(self, row: Any, ctx: Any) -> None: ...

    def on_y(self, row: Any, ctx: Any) -> None: ...


def spec_of(graph: Graph) -> JobSpec:
    return job_spec(graph, job_id="", checkpoint="memory:", backend="heap")


def layout(graph: Graph) -> list[tuple[list[str], list[str], list[int], list[int]]]:
    """Per level: operators, sinks, edges consumed, edges passing."""
    return [
        (
            [op.uid for op in level.operators],
            [sink.uid for sink in level.sinks],
            [edge.index for edge in level.edges],
            [edge.index for edge in level.passing],
        )
        for level in graph.levels
    ]


def test_a_sink_on_an_operator_runs_in_its_level(job: Job) -> None:
    process(source(job, "s"), "a").sink_to(sinks.Noop(), uid="out")
    graph = job.graph()
    assert layout(graph) == [(["a"], ["out"], [0], [])]
    assert graph.edges[0].keys == ("k",)
    assert graph.level_of("a") == graph.level_of("out") == 0


def test_each_shuffle_is_a_level(job: Job) -> None:
    stream = source(job, "s")
    for uid in ("a", "b", "c"):
        stream = process(stream, uid)
    stream.sink_to(sinks.Noop(), uid="out")
    assert layout(job.graph()) == [
        (["a"], [], [0], []),
        (["b"], [], [1], []),
        (["c"], ["out"], [2], []),
    ]


def test_a_sink_on_a_source_has_a_level_and_an_edge_without_keys(job: Job) -> None:
    source(job, "s").sink_to(sinks.Collect(), uid="out")
    graph = job.graph()
    assert layout(graph) == [([], ["out"], [0], [])]
    assert graph.edges[0].keys == ()


def test_rows_for_a_sink_that_drops_them_are_counted_where_they_would_leave(job: Job) -> None:
    rows = source(job, "s")
    process(rows, "a").sink_to(sinks.Noop(), uid="chained")
    rows.union(transform(rows)).sink_to(sinks.Noop(), uid="dropped")
    graph = job.graph()
    assert layout(graph) == [(["a"], ["chained", "dropped"], [0], [])]
    assert [edge.consumer for edge in graph.levels[0].counted] == ["dropped"]
    assert [(m.name, m.sql) for m in source_measures(graph)] == [("dropped", "count(1)")]
    (port,) = (p for p in graph.edges[1].inputs if p.node != "s")
    assert [(m.name, m.sql) for m in port_measures(graph, port)] == [("dropped", "count(1)")]


def test_rows_behind_an_operator_go_even_to_a_sink_that_drops_them(job: Job) -> None:
    transform(process(source(job, "s"), "a")).sink_to(sinks.Noop(), uid="out")
    assert layout(job.graph()) == [(["a"], [], [0], []), ([], ["out"], [1], [])]


def test_a_fork_at_the_source_feeds_both_in_one_level(job: Job) -> None:
    rows = source(job, "s")
    process(rows, "a").sink_to(sinks.Noop(), uid="out-a")
    process(rows, "b", key="v").sink_to(sinks.Noop(), uid="out-b")
    rows.sink_to(sinks.Collect(), uid="raw")
    graph = job.graph()
    assert layout(graph) == [(["a", "b"], ["out-a", "out-b", "raw"], [0, 1, 2], [])]
    assert [edge.keys for edge in graph.edges] == [("k",), ("v",), ()]


def test_an_edge_that_skips_levels_passes_through_those_between(job: Job) -> None:
    rows = source(job, "s")
    late = process(process(rows, "a"), "b")
    process(late.union(rows), "c")
    assert layout(job.graph()) == [
        (["a"], [], [0], [2]),
        (["b"], [], [1], [2]),
        (["c"], [], [2], []),
    ]


def test_an_output_that_skips_a_level_passes_through_it(job: Job) -> None:
    first = process(source(job, "s"), "a")
    second = process(first, "b")
    process(first.union(second), "c")
    assert layout(job.graph()) == [
        (["a"], [], [0], []),
        (["b"], [], [1], [2]),
        (["c"], [], [2], []),
    ]


def test_united_streams_share_one_edge(job: Job) -> None:
    united = source(job, "s").union(source(job, "t"), source(job, "u"))
    process(united, "a")
    graph = job.graph()
    assert len(graph.edges) == 1
    assert graph.edges[0].inputs == (Port("s"), Port("t"), Port("u"))


def test_united_columns_follow_the_first_stream_and_may_be_null_if_any_may(job: Job) -> None:
    left = source(job, "s", "k long NOT NULL, v long NOT NULL")
    right = source(job, "t", "v long, k long NOT NULL")
    process(left.union(right), "a")
    assert job.graph().edges[0].schema == parse_schema("k long NOT NULL, v long")


def test_several_sinks_on_one_output_run_beside_it(job: Job) -> None:
    stream = process(source(job, "s"), "a")
    for uid in ("x", "y"):
        stream.sink_to(sinks.Noop(), uid=uid)
    stream.side("late", "k long").sink_to(sinks.Noop(), uid="z")
    assert layout(job.graph()) == [(["a"], ["x", "y", "z"], [0], [])]


def test_a_sink_on_two_outputs_of_one_operator_runs_beside_it(job: Job) -> None:
    stream = process(source(job, "s"), "a")
    stream.union(stream.side("late", "k long, v long")).sink_to(sinks.Noop(), uid="out")
    assert layout(job.graph()) == [(["a"], ["out"], [0], [])]


def test_what_operators_of_one_level_are_united_into_runs_beside_them(job: Job) -> None:
    rows = source(job, "s")
    a = process(rows, "a")
    both = a.union(process(rows, "b"), a.process(Plain(), schema=ROW, uid="of_a"))
    both.sink_to(sinks.Noop(), uid="out")
    both.process(Plain(), schema=ROW, uid="of_both")
    graph = job.graph()
    assert layout(graph) == [(["a", "b", "of_a", "of_both"], ["out"], [0, 1], [])]
    assert graph.chained == {"of_a", "of_both", "out"}
    (level,) = spec_of(graph).levels
    fed = {
        op.uid: (tuple(uid for uid, _ in op.outlets[0].operators), op.outlets[0].sinks)
        for op in level.operators
    }
    assert fed == {
        "a": (("of_a", "of_both"), ("out",)), "b": (("of_both",), ("out",)),
        "of_a": (("of_both",), ("out",)), "of_both": ((), ()),
    }  # fmt: skip
    assert level.operators[3].lane is None and level.sinks[0].lane is None


def test_what_operators_of_two_levels_are_united_into_comes_after_both(job: Job) -> None:
    a = process(source(job, "s"), "a")
    both = a.union(process(a, "b"))
    both.sink_to(sinks.Noop(), uid="out")
    both.process(Plain(), schema=ROW, uid="of_both")
    assert layout(job.graph()) == [
        (["a"], [], [0], []),
        (["b"], [], [1], [2, 3]),
        (["of_both"], ["out"], [2, 3], []),
    ]
    assert not job.graph().chained


@pytest.mark.parametrize("kind", ["operators", "chains", "transforms", "loops"])
def test_streams_that_part_and_meet_again_and_again_are_planned_at_once(
    job: Job, kind: str
) -> None:
    """There are more ways through this graph than could ever be walked."""
    stream = source(job, "s", "k long, v long, ts timestamp", "ts", Watermark(10))

    def stacked(stream: Stream) -> Stream:
        for n in range(60):
            if kind == "transforms":
                stream = transform(stream, ROW).union(transform(stream, ROW))
            elif kind == "chains":
                parts = [stream.process(Plain(), schema=ROW, uid=f"{c}{n}") for c in "xy"]
                stream = parts[0].union(parts[1])
            else:
                keyed = stream.key_by("k")
                stream = job.connect(x=keyed, y=keyed).process(Twice(), schema=ROW, uid=f"op{n}")
        return stream

    if kind == "loops":
        stream = transform(stream, ROW).iterate(lambda loop: (s := stacked(loop), s), uid="loop")
    elif kind == "chains":
        stream = stacked(process(stream, "first"))
    else:
        stream = stacked(stream)
    process(stream, "last").sink_to(sinks.Noop(), uid="out")
    graph = job.graph()
    assert len(graph.levels) == {"operators": 61, "chains": 2, "transforms": 1, "loops": 61}[kind]
    assert len(spec_of(graph).levels) == len(graph.levels)
    assert graph_text(explain_graph(graph)) and draw_graph(explain_graph(graph))


def test_a_sink_after_a_transform_comes_a_level_later(job: Job) -> None:
    transform(process(source(job, "s"), "a")).sink_to(sinks.Noop(), uid="out")
    graph = job.graph()
    assert layout(graph) == [(["a"], [], [0], []), ([], ["out"], [1], [])]
    assert graph.origins(graph.edges[1].inputs[0]) == (Port("a"),)


def test_transforms_are_looked_through_to_their_origin(job: Job) -> None:
    rows = transform(transform(source(job, "s"), "k long, v long, x string"))
    process(rows, "a")
    graph = job.graph()
    assert layout(graph) == [(["a"], [], [0], [])]
    assert graph.origins(graph.edges[0].inputs[0]) == (Port("s"),)


def test_a_time_column_with_another_name_keeps_what_is_added_to_it(job: Job) -> None:
    rows = source(job, "s", "k long, ts timestamp", event_time="ts")
    windowed = rows.key_by("k").window(windows.tumbling("1 s")).reduce(lambda a, b: a, uid="w")
    parsed = parse_schema("k long, until timestamp")
    job._nodes["t"] = TransformNode("t", windowed._ports, len, parsed, "until")
    assert port_time(job._nodes, Port("t")) == EventTime("until", -1)
    job._nodes["u"] = TransformNode("u", windowed._ports, len, parsed, None)
    assert port_time(job._nodes, Port("u")) is None


def test_a_transform_over_streams_of_different_levels_is_refused(job: Job) -> None:
    rows = source(job, "s")
    with pytest.raises(PlanError, match="rows of different stages"):
        process(transform(rows.union(process(rows, "a"))), "b")
        job.graph()


def test_edges_are_numbered_in_the_order_of_the_program(job: Job) -> None:
    rows = source(job, "s")
    process(process(rows, "deep"), "deeper")
    process(rows, "shallow")
    graph = job.graph()
    assert [(e.index, e.consumer) for e in graph.edges] == [
        (0, "deep"), (1, "deeper"), (2, "shallow"),
    ]  # fmt: skip
    assert [op.uid for op in graph.operators] == ["deep", "shallow", "deeper"]


# Event time


@pytest.mark.parametrize(
    ("out", "follows"),
    [("k long, t timestamp", "t"), ("k long, v long", None), ("k long, t string", None)],
)
def test_event_time_follows_its_column_through_operators(
    job: Job, out: str, follows: str | None
) -> None:
    rows = source(job, "s", "k long, t timestamp", event_time="t")
    process(process(rows, "a", schema=out), "b")
    graph = job.graph()
    assert [edge.event_time for edge in graph.edges] == ["t", follows]


def test_streams_with_different_event_times_have_none_together(job: Job) -> None:
    left = source(job, "s", "k long, t timestamp", event_time="t")
    right = source(job, "u", "k long, t timestamp")
    process(left.union(right), "a")
    assert job.graph().edges[0].event_time is None


TIMED = "k long, t timestamp, u timestamp"
MARK = Watermark(1_000, 60_000)


def test_results_about_time_up_to_an_end_belong_right_before_it(job: Job) -> None:
    class Windows(Hooks, Pass):
        result_time = "end"

    rows = source(job, "s", TIMED, event_time="t")
    results = rows.key_by("k").process(Windows(), schema="k long, end timestamp", uid="a")
    again = process(results, "b", schema="k long, end timestamp")
    process(transform(again, "end timestamp, k long"), "c")
    found = [(edge.event_time, edge.shift_us) for edge in job.graph().edges]
    assert found == [("t", 0), ("end", -1), ("end", -1)]


def test_another_event_time_counts_from_where_it_is_declared(job: Job) -> None:
    rows = source(job, "s", TIMED, event_time="t")
    process(rows, "before")
    process(rows.event_time("u"), "after")
    process(transform(rows.event_time("u"), TIMED), "later")
    found = {edge.consumer: edge.event_time for edge in job.graph().edges}
    assert found == {"before": "t", "after": "u", "later": "u"}


def test_declaring_a_time_moves_no_row(job: Job) -> None:
    rows = source(job, "s", TIMED)
    emitted = process(rows.event_time("t"), "a", schema=TIMED)
    emitted.event_time("u").sink_to(sinks.Noop(), uid="out")
    process(transform(rows.event_time("u"), TIMED).event_time("t"), "b")
    graph = job.graph()
    assert layout(graph) == [(["a", "b"], ["out"], [0, 1], [])]
    assert graph.edges[0].inputs == (Port("s"),)
    assert isinstance(graph.nodes[graph.edges[1].inputs[0].node], TransformNode)


def test_a_stream_cannot_be_united_with_itself_under_another_time(job: Job) -> None:
    rows = source(job, "s", TIMED, event_time="t")
    with pytest.raises(PlanError, match="with itself"):
        rows.union(rows.event_time("u"))


def test_only_the_watermark_nearest_to_a_consumer_counts(job: Job) -> None:
    a = source(job, "a", TIMED, "t", MARK)
    b = source(job, "b", TIMED, "t", MARK)
    source(job, "unused", TIMED, "t", MARK)
    process(transform(a, TIMED), "of-a")
    process(transform(b, TIMED).event_time("u", watermark="5 seconds", idle_after=None), "of-b")
    process(b.event_time("u"), "without")
    assert job.graph().watermarks == {"a": MARK, "b:u": Watermark(5_000, None)}
    process(b, "of-b-itself")
    assert set(job.graph().watermarks) == {"a", "b:u", "b"}


def test_origins_of_one_column_and_source_have_names_of_their_own(job: Job) -> None:
    rows = source(job, "s", TIMED)
    for uid in ("x", "y"):
        process(transform(rows, TIMED).event_time("t", watermark="1 second"), uid)
    assert set(job.graph().watermarks) == {"s:t", "s:t:2"}


def test_nothing_is_late_for_an_operator_that_no_watermark_is_declared_for(job: Job) -> None:
    marked = source(job, "a", TIMED, "t", MARK)
    plain = source(job, "b", TIMED, "t")
    first = process(marked, "a1", schema=TIMED)
    process(first, "a2", schema=TIMED)
    process(process(plain, "b1", schema=TIMED), "b2", schema=TIMED)
    process(marked.event_time("u"), "c1", schema=TIMED)
    process(first.event_time("u"), "d1", schema=TIMED)
    process(first.side("late"), "e1", schema=TIMED)
    process(first.side("late").event_time("u"), "e2", schema=TIMED)
    spec = spec_of(job.graph())
    found = {op.uid: op.has_watermark for level in spec.levels for op in level.operators}
    assert found == {
        "a1": True, "a2": True, "b1": False, "b2": False, "c1": False, "d1": True,
        "e1": False, "e2": False,
    }  # fmt: skip


def test_operators_follow_the_watermark_of_their_input_and_declare_none(job: Job) -> None:
    emitted = process(source(job, "s", TIMED, "t", MARK), "a", schema=TIMED)
    for stream in (emitted, transform(emitted, TIMED)):
        with pytest.raises(PlanError, match="follows the watermark of their input"):
            stream.event_time("u", watermark="1 second")
        stream.event_time("u")


def test_late_rows_have_the_columns_and_the_time_of_the_input(job: Job) -> None:
    stream = process(source(job, "s", TIMED, "t", MARK), "a")
    late = stream.side("late")
    assert late.schema == parse_schema(TIMED)
    assert stream.side("late", TIMED).schema == late.schema
    process(late, "b", schema=TIMED)
    assert job.graph().edges[1].event_time == "t"
    with pytest.raises(PlanError, match="has the rows as they came in") as caught:
        stream.side("late", "k long")
    assert "expected: k bigint, t timestamp, u timestamp" in str(caught.value)


def test_an_operator_without_event_time_has_no_late_rows(job: Job) -> None:
    stream = process(source(job, "s"), "a")
    with pytest.raises(PlanError, match="has no event time, so nothing is late"):
        stream.side("late")
    assert stream.side("late", "x long").schema.names == ["x"], "a tag like any other"
    with pytest.raises(PlanError, match="side output 'other' of 'a' needs a schema"):
        stream.side("other")


def test_only_functions_that_want_it_have_their_rows_in_order(job: Job) -> None:
    class AnyOrder(Hooks, Pass):
        wants_order = False

    rows = source(job, "s", TIMED, "t")
    rows.key_by("k").process(AnyOrder(), schema=ROW, uid="any")
    process(rows, "ordered")
    rows.sink_to(sinks.Noop(), uid="out")
    found = {edge.consumer: edge.wants_order for edge in job.graph().edges}
    assert found == {"any": False, "ordered": True, "out": False}


def trades_and_rates(job: Job, rate_key: str = "long") -> tuple[Stream, Stream]:
    rates = source(job, "rates", f"id {rate_key}, at timestamp", "at", Watermark(0))
    return source(job, "trades", TIMED, "t", Watermark(0)), rates


def test_an_operator_with_the_key_of_the_join_before_it_has_no_shuffle(job: Job) -> None:
    trades, rates = trades_and_rates(job)
    joined = trades.join_as_of(rates, on={"k": "id"}, uid="join")
    joined.top(1, by="t", per="k", uid="best")
    joined.key_by("k").latest(uid="last")
    graph = job.graph()
    assert layout(graph) == [(["join", "best", "last"], [], [0, 1], [])]
    assert graph.chained == {"best", "last"}
    outlet = spec_of(graph).levels[0].operators[0].outlets[0]
    assert (outlet.operators, outlet.lanes) == ((("best", 0), ("last", 0)), ())


def test_an_operator_with_another_key_than_the_join_has_a_shuffle(job: Job) -> None:
    trades, rates = trades_and_rates(job)
    joined = trades.join_as_of(rates, on={"k": "id"}, uid="join")
    joined.top(1, by="t", per="at", uid="other")
    joined.key_by("k", "t").latest(uid="more")
    joined.side("late.left").top(1, by="t", per="k", uid="side")
    transform(joined, TIMED).top(1, by="t", per="k", uid="transformed")
    process(joined, "ordered", TIMED)
    assert job.graph().chained == set()


def test_a_key_that_the_join_has_widened_is_in_another_group(job: Job) -> None:
    trades, rates = trades_and_rates(job, "int")
    # The result of an inner join has the key of left, here in the wider type of the two.
    trades.join_as_of(rates, on={"k": "id"}, uid="wide").top(1, by="t", per="k", uid="a")
    rates.join_as_of(trades, on={"id": "k"}, uid="narrow").top(1, by="at", per="id", uid="b")
    assert job.graph().chained == {"a"}


def test_a_join_is_in_the_level_of_a_side_with_its_key(job: Job) -> None:
    trades, rates = trades_and_rates(job)
    first = rates.deduplicate(on="id", within="10 seconds", uid="first")
    trades.join(first, on={"k": "id"}, within="10 seconds", uid="join")
    graph = job.graph()
    # The rows of the other side come by a shuffle of their own.
    assert layout(graph) == [(["first", "join"], [], [0, 1], [])]
    assert [(edge.consumer, edge.inlet) for edge in graph.edges] == [("first", 0), ("join", 0)]
    assert (graph.chained, graph.chained_inlets) == (set(), {("join", 1)})
    first_spec, join_spec = spec_of(graph).levels[0].operators
    assert first_spec.outlets[0].operators == (("join", 1),)
    assert [inlet.is_chained for inlet in join_spec.inlets] == [False, True]
    assert [inlet.event_time for inlet in join_spec.inlets] == ["t", "at"]
    assert "first ─ chained, into on_right ─>" in job.explain()


def test_a_join_is_in_a_later_level_if_rows_of_its_other_side_come_then(job: Job) -> None:
    trades, rates = trades_and_rates(job)
    other = process(trades, "late", TIMED, key="t")
    first = rates.deduplicate(on="id", within="10 seconds", uid="first")
    other.join(first, on={"k": "id"}, within="10 seconds", uid="join")
    trades.join(first, on={"t": "at"}, ttl="10 seconds", uid="other")
    graph = job.graph()
    assert graph.level_of("join") == graph.level_of("other") == 1
    assert not graph.chained_inlets


def test_a_side_of_a_join_that_runs_in_fewer_subtasks_has_a_shuffle(job: Job) -> None:
    trades, rates = trades_and_rates(job)
    first = rates.deduplicate(on="id", uid="first", parallelism=1)
    trades.join(first, on={"k": "id"}, uid="join")
    assert not job.graph().chained_inlets


def test_a_side_of_a_join_with_a_narrower_key_has_a_shuffle(job: Job) -> None:
    # Key groups are hashes of values and types: the wider type of the two is hashed.
    trades, rates = trades_and_rates(job, "int")
    first = rates.deduplicate(on="id", uid="first")
    trades.join(first, on={"k": "id"}, uid="join")
    assert not job.graph().chained_inlets


def test_without_chaining_an_operator_with_the_same_key_has_a_shuffle(job: Job) -> None:
    trades, rates = trades_and_rates(job)
    trades.join_as_of(rates, on={"k": "id"}, uid="join").top(1, by="t", per="k", uid="best")
    graph = build_graph("j", 16, job._nodes, chaining=False)
    assert (len(graph.levels), graph.chained) == (2, set())


# Refusals


@pytest.mark.parametrize("count", [0, -1, 32769])
def test_max_parallelism_outside_its_bounds_is_refused(count: int) -> None:
    job = Job("j", max_parallelism=count)
    source(job, "s").sink_to(sinks.Noop(), uid="out")
    with pytest.raises(PlanError, match="max_parallelism"):
        job.graph()


def test_a_job_without_source_or_without_end_is_refused(job: Job) -> None:
    with pytest.raises(PlanError, match="has no source"):
        build_graph("j", 16, {})
    source(job, "s")
    with pytest.raises(PlanError, match="does nothing"):
        job.graph()


def test_a_graph_does_not_follow_later_changes_of_the_job(job: Job) -> None:
    rows = source(job, "s")
    process(rows, "a")
    graph: Any = job.graph()
    process(rows, "b")
    assert [op.uid for op in graph.operators] == ["a"]
    assert "b" not in graph.nodes
