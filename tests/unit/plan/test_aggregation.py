"""Aggregations in the graph: what their streams know of time."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest

from cairn import Job, PlanError, windows
from cairn.operators.aggregates.ahead import AggregateAhead
from cairn.operators.window_process import WindowPlan
from cairn.plan import frames
from cairn.plan.aggregation import Output, aggregation, partial_node
from cairn.plan.deploy import taps
from cairn.plan.graph import (
    EventTime,
    Inlet,
    Node,
    PartialNode,
    Port,
    ProcessNode,
    SinkNode,
    SourceNode,
    TimeNode,
    Watermark,
    port_time,
)
from cairn.plan.levels import build_graph
from cairn.sinks import Noop
from cairn.testing import Harness
from cairn.windows import Session, Tumbling, WindowSpec
from tests.unit.operators.aggregates.support import SCHEMA, made
from tests.unit.plan.programs import Pass, source

MS = dt.timedelta(milliseconds=1)


def nodes_of(plan: WindowPlan | None) -> dict[str, Node]:
    function, partials = made(plan)
    late = (("late", SCHEMA),)
    return {
        "rows": SourceNode("rows", None, SCHEMA, "at", Watermark(1000)),
        "partial:sum": partial_node("partial:sum", (Port("rows"),), "sum", partials),
        "sum": ProcessNode(
            "sum", (Inlet((Port("partial:sum"),), ("k",)),), function, function.schema, late
        ),
        "out": SinkNode("out", (Port("sum"),), Noop()),
    }


@pytest.mark.parametrize(("spec", "shift_us"), [(Tumbling(10), -1), (Session(10), 0)])
def test_results_are_about_the_time_before_their_window_ends(
    spec: WindowSpec, shift_us: int
) -> None:
    nodes = nodes_of(WindowPlan(spec))
    assert port_time(nodes, Port("sum")) == EventTime("window_end", shift_us)


def test_late_rows_keep_the_time_they_came_with() -> None:
    assert port_time(nodes_of(WindowPlan(Tumbling(10))), Port("sum", "late")) == EventTime("at")


def test_partials_need_no_order_and_carry_the_watermark() -> None:
    graph = build_graph("sums", 16, nodes_of(WindowPlan(Tumbling(10))))
    (edge,) = graph.edges
    assert (edge.event_time, edge.wants_order) == ("_time", False)
    assert graph.watermarks == {"rows": Watermark(1000)}
    assert graph.times.has_watermark(Port("partial:sum"))


def test_running_aggregates_count_rows_of_any_time() -> None:
    graph = build_graph("sums", 16, nodes_of(None))
    (edge,) = graph.edges
    assert edge.event_time is None
    assert edge.schema.field("k").type == pa.int64()


def united_nodes(plan: WindowPlan | None) -> dict[str, Node]:
    """An aggregation of a source and of what an operator makes of another one, as they come."""
    nodes = nodes_of(plan)
    inlet = Inlet((Port("others"),), ("k",))
    partial = nodes.pop("partial:sum")
    assert isinstance(partial, PartialNode)
    sums, out = nodes.pop("sum"), nodes.pop("out")
    return nodes | {
        "others": SourceNode("others", None, SCHEMA, "at", Watermark(1000)),
        "pass": ProcessNode("pass", (inlet,), Pass(), SCHEMA),
        "partial:sum": replace(partial, inputs=(Port("rows"), Port("pass"))),
        "sum": sums,
        "out": out,
    }


def test_streams_of_several_levels_are_aggregated_as_one() -> None:
    graph = build_graph("sums", 16, united_nodes(WindowPlan(Tumbling(10))))
    assert [[op.uid for op in level.operators] for level in graph.levels] == [["pass"], ["sum"]]
    assert graph.edges[1].inputs == (Port("partial:sum"), Port("partial:sum:2"))
    assert graph.origins(Port("partial:sum")) == (Port("rows"),)
    assert graph.origins(Port("partial:sum:2")) == (Port("pass"),)
    assert graph.levels[0].passing == (graph.edges[1],)
    assert taps(graph) == {Port("pass"): 2}
    time = EventTime("window_end", -1)
    assert graph.times.event_time(Port("sum")) == time
    assert graph.times.event_time(Port("sum", "late")) == EventTime("at")
    assert graph.watermarks == {"rows": Watermark(1000), "others": Watermark(1000)}


def nodes_behind_operators(*inputs: Port) -> dict[str, Node]:
    """An aggregation of what operators emit, which a slot can group."""
    nodes = united_nodes(WindowPlan(Tumbling(10)))
    partial = nodes["partial:sum"]
    assert isinstance(partial, PartialNode)
    made = partial.partials
    ahead = AggregateAhead(made.layout, made.schema, [], None, None)
    nodes["partial:sum"] = replace(partial, inputs=inputs, partials=replace(made, ahead=ahead))
    return nodes


def test_rows_of_an_operator_are_grouped_in_its_slot() -> None:
    graph = build_graph("sums", 16, nodes_behind_operators(Port("pass")))
    found = [[op.uid for op in level.operators] for level in graph.levels]
    assert found == [["pass", "partial:sum"], ["sum"]]
    assert graph.chained == {"partial:sum", "out"}
    edge = graph.edges[-1]
    assert (edge.inputs, edge.event_time) == ((Port("partial:sum"),), "_time")
    assert not taps(graph)


def test_each_of_several_operators_has_its_rows_grouped_in_its_own_slot() -> None:
    nodes = nodes_behind_operators(Port("pass"), Port("again"))
    inlet = Inlet((Port("pass"),), ("k",))
    nodes = {"again": ProcessNode("again", (inlet,), Pass(), SCHEMA)} | nodes
    order = ["rows", "others", "pass", "again", "partial:sum", "sum", "out"]
    graph = build_graph("sums", 16, {name: nodes[name] for name in order})
    found = [[op.uid for op in level.operators] for level in graph.levels]
    assert found == [["pass", "partial:sum"], ["again", "partial:sum:2"], ["sum"]]
    assert graph.edges[-1].inputs == (Port("partial:sum"), Port("partial:sum:2"))


@pytest.mark.parametrize("inputs", [(Port("rows"),), (Port("rows"), Port("pass"))])
def test_rows_in_spark_are_grouped_by_spark(inputs: tuple[Port, ...]) -> None:
    graph = build_graph("sums", 16, nodes_behind_operators(*inputs))
    assert isinstance(graph.nodes["partial:sum"], PartialNode)


def test_nothing_is_grouped_in_slots_without_chaining() -> None:
    graph = build_graph("sums", 16, nodes_behind_operators(Port("pass")), chaining=False)
    assert isinstance(graph.nodes["partial:sum"], PartialNode)


def test_a_time_given_to_streams_of_several_levels_counts_for_all_of_them() -> None:
    """And the watermarks of before no longer."""
    nodes = united_nodes(WindowPlan(Tumbling(10)))
    partial = nodes["partial:sum"]
    assert isinstance(partial, PartialNode)
    renamed = TimeNode("rows+pass:v", partial.inputs, SCHEMA, "v", None)
    order = list(nodes)
    nodes |= {renamed.name: renamed, partial.name: replace(partial, inputs=(Port(renamed.name),))}
    order.insert(order.index(partial.name), renamed.name)
    graph = build_graph("sums", 16, {name: nodes[name] for name in order})
    assert graph.origins(Port("partial:sum:2")) == (Port("pass"),)
    assert graph.times.event_time(Port("sum", "late")) == EventTime("v")
    assert graph.watermarks == {"others": Watermark(1000)}


def test_windows_without_a_key_have_one_constant_key_and_no_column_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "plan_schema", lambda *_: pa.schema([("x", pa.int64())]))
    session = SimpleNamespace(conf={"spark.sql.ansi.enabled": "true"})
    function, partials = aggregation(
        session,
        nodes_of(None),
        (Port("rows"),),
        [],
        {"high": "max(v)"},
        WindowPlan(Tumbling(10)),
        Output(),
    )
    assert function.schema.names == ["window_start", "window_end", "high"]
    assert partials.layout.keys == ("_all",) and partials.layout.is_keyless
    assert partials.grouping is not None and partials.grouping[0] == "true AS `_all`"
    with Harness(function, partials.schema, "_all", function.schema, event_time="_time") as harness:
        times = [dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + ms * MS for ms in (1, 12, 3)]
        harness.push([(True, at, 1, n) for n, at in enumerate(times)])
        harness.commit()
        assert [row.high for row in harness.drain()] == [2, 1]


def test_windows_without_a_key_have_aggregates_only() -> None:
    job = Job("all")
    windowed = source(job, "rows").window(windows.tumbling("1 s", time="processing"))
    with pytest.raises(PlanError, match="windows without a key have aggregates only"):
        windowed.reduce(lambda left, right: left, uid="a")
    assert list(job._nodes) == ["rows"]


@pytest.mark.parametrize(("ansi", "is_grouped"), [("true", True), ("false", False)])
def test_sums_are_grouped_ahead_only_where_spark_checks_them(
    monkeypatch: pytest.MonkeyPatch, ansi: str, is_grouped: bool
) -> None:
    monkeypatch.setattr(frames, "plan_schema", lambda *_: pa.schema([("x", pa.int64())]))
    session = SimpleNamespace(conf={"spark.sql.ansi.enabled": ansi})
    for plan in (None, WindowPlan(Tumbling(10))):
        _, partials = aggregation(
            session, nodes_of(None), (Port("rows"),), ["k"], {"total": "sum(v)"}, plan, Output()
        )
        assert (partials.grouping is not None) == is_grouped


def test_windows_of_a_number_of_rows_refuse_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "plan_schema", lambda *_: pa.schema([("x", pa.int64())]))
    session = SimpleNamespace(conf={"spark.sql.ansi.enabled": "true"})
    counted = WindowPlan(windows.count(3))

    def plan(output: Output) -> None:
        ports, asked = (Port("rows"),), {"total": "sum(v)"}
        aggregation(session, nodes_of(None), ports, ["k"], asked, counted, output)

    plan(Output())
    with pytest.raises(PlanError, match="neither read nor emit changes"):
        plan(Output(changes=True))
