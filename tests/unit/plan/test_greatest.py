"""Joins of windows with their own maximum: when rows are left out before, and which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from cairn import Job, sinks, windows
from cairn.operators.greatest import KeepGreatest
from cairn.plan import frames
from cairn.plan.graph import EventTime, Graph, Port, ProcessNode, Watermark
from tests.unit.plan.programs import source

TWO = windows.tumbling("2 seconds")
TEN = windows.sliding("10 seconds", "2 seconds")


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "plan_schema", lambda *_: pa.schema([("x", pa.int64())]))
    session = SimpleNamespace(conf={"spark.sql.ansi.enabled": "true"})
    monkeypatch.setattr(Job, "_spark", lambda _: session)


def graph_of(
    how: Any = "inner",
    on: Any = "",
    best: str = "max(num)",
    first: Any = None,
    **more: Any,
) -> Graph:
    job = Job("greatest", max_parallelism=8)
    bids = source(job, "bids", "auction long, at timestamp", "at", Watermark(4000))
    counts = bids.key_by("auction").window(TEN, **(first or {}))
    counted = counts.aggregate(num="count(*)", other="count(*)", uid="counts")
    most = counted.window(TWO, **more).aggregate(num=best, uid="most")
    joined = counted.join(
        most, on=on or ["window_end", "num"], within="0 seconds", how=how, uid="best"
    )
    joined.sink_to(sinks.Noop(), uid="out")
    counted.sink_to(sinks.Noop(), uid="all")
    return job.graph()


def test_only_rows_that_can_be_the_greatest_go_to_the_join() -> None:
    graph = graph_of()
    kept = graph.nodes["greatest:best"]
    assert isinstance(kept, ProcessNode) and isinstance(kept.function, KeepGreatest)
    assert "greatest:best" in graph.chained and graph.level_of("greatest:best") == 0
    assert [edge.inputs for edge in graph.edges if edge.consumer == "best"] == [
        (Port("greatest:best"),),
        (Port("most"),),
    ]
    # The sink of all counts gets all of them, and the join has the times that it had.
    (all_counts,) = (sink for sink in graph.sinks if sink.uid == "all")
    assert graph.bare(all_counts.inputs) == (Port("counts"),)
    assert graph.times.event_time(Port("greatest:best")) == EventTime("window_end", -1)


@pytest.mark.parametrize(
    "changed",
    [
        {"how": "left"},
        {"on": {"window_end": "window_end", "other": "num"}},
        {"on": {"window_start": "window_end", "num": "num"}},
        {"on": ["num"]},
        {"best": "min(num)"},
        {"best": "max(num) FILTER (WHERE auction > 1)"},
        {"best": "max(num + 1)"},
        # A window that is emitted again, or in parts, may have been compared before.
        {"first": {"allowed_lateness": "1 second"}},
        {"first": {"early_every_rows": 5}},
        {"first": {"emit": "change"}},
        {"early_every": "1 second"},
    ],
    ids=str,
)
def test_all_rows_go_to_a_join_that_is_not_with_the_maximum(changed: dict[str, Any]) -> None:
    assert "greatest:best" not in graph_of(**changed).nodes


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [
        ([3, 5, 5, 1], [1, 2]),
        ([None, 5, -1, None], [1]),
        ([None, None, None, None], []),
        ([-(2**63), -(2**63), 2**63 - 1, 0], [2]),
    ],
)
def test_ties_stay_and_nulls_are_equal_to_nothing(numbers: list[Any], kept: list[int]) -> None:
    batch = pa.RecordBatch.from_pydict({"w": pa.array([1] * 4), "n": pa.array(numbers, pa.int64())})
    found = KeepGreatest("n", ["w"]).process(batch, None)  # type: ignore[arg-type]
    assert found.equals(batch.take(pa.array(kept, pa.int64())))


def test_groups_are_compared_on_their_own_and_null_is_a_group() -> None:
    rows = [(1, 4), (2, 1), (1, 3), (None, 0), (2, 1), (None, -1)]
    batch = pa.RecordBatch.from_pylist([{"w": w, "n": n} for w, n in rows])
    found = KeepGreatest("n", ["w"]).process(batch, None)  # type: ignore[arg-type]
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        (1, 4), (2, 1), (None, 0), (2, 1),
    ]  # fmt: skip
