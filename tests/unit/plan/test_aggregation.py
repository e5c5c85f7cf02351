"""Aggregations in the graph: what their streams know of time."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest

from cairn.plan import dataframe
from cairn.plan.aggregation import aggregation, partial_node
from cairn.plan.graph import (
    EventTime,
    Inlet,
    Node,
    Port,
    ProcessNode,
    SinkNode,
    SourceNode,
    Watermark,
    build_graph,
    port_time,
)
from cairn.sinks import Noop
from cairn.window_process import WindowPlan
from cairn.windows import Session, Tumbling, WindowSpec
from tests.unit.aggregates.support import SCHEMA, made


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


@pytest.mark.parametrize(("ansi", "is_grouped"), [("true", True), ("false", False)])
def test_sums_are_grouped_ahead_only_where_spark_checks_them(
    monkeypatch: pytest.MonkeyPatch, ansi: str, is_grouped: bool
) -> None:
    monkeypatch.setattr(dataframe, "transformed_schema", lambda *_: pa.schema([("x", pa.int64())]))
    session = SimpleNamespace(conf={"spark.sql.ansi.enabled": ansi})
    for plan in (None, WindowPlan(Tumbling(10))):
        _, partials = aggregation(
            session, nodes_of(None), (Port("rows"),), ["k"], {"total": "sum(v)"}, plan
        )
        assert (partials.grouping is not None) == is_grouped
