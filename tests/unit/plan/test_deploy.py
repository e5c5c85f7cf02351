"""What each slot is told: where rows come from and where they go."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cairn import Job, KeyedProcess, sinks
from cairn.errors import PlanError
from cairn.plan.deploy import job_spec, outgoing, taps
from cairn.plan.graph import Port
from cairn.protocol.spec import JobSpec
from tests.unit.plan.programs import process, source, transform


@pytest.fixture
def job() -> Job:
    return Job("j", max_parallelism=16)


def spec_of(job: Job) -> JobSpec:
    return job_spec(job.graph(), job_id="id", checkpoint="memory://x", backend="heap")


def outlets(spec: JobSpec) -> dict[tuple[str, str | None], tuple[Any, Any]]:
    return {
        (op.uid, outlet.tag): (outlet.sinks, outlet.lanes)
        for level in spec.levels
        for op in level.operators
        for outlet in op.outlets
    }


def test_an_output_goes_to_its_sinks_and_its_edges(job: Job) -> None:
    first = process(source(job, "s"), "a")
    first.sink_to(sinks.Noop(), uid="x")
    late = first.side("late", "k long, v long")
    process(first.union(late), "b").sink_to(sinks.Noop(), uid="y")
    late.sink_to(sinks.Noop(), uid="z")
    spec = spec_of(job)
    assert outlets(spec) == {
        ("a", None): (("x",), (1,)),
        ("a", "late"): (("z",), (1,)),
        ("b", None): (("y",), ()),
    }
    assert [list(level.outgoing.schemas) for level in spec.levels] == [[1], []]
    assert [[op.lane for op in level.operators] for level in spec.levels] == [[0], [1]]


def test_a_sink_fed_by_its_operator_has_no_lane_and_one_fed_by_spark_has(job: Job) -> None:
    rows = source(job, "s")
    process(rows, "a").sink_to(sinks.Noop(), uid="x")
    rows.sink_to(sinks.Collect(), uid="raw")
    (level,) = spec_of(job).levels
    assert {sink.uid: sink.lane for sink in level.sinks} == {"x": None, "raw": 1}


def test_an_output_that_spark_transforms_travels_in_a_lane_of_its_own(job: Job) -> None:
    first = process(source(job, "s"), "a", schema="k long, w string")
    process(transform(first), "b")
    transform(first).sink_to(sinks.Noop(), uid="x")
    graph = job.graph()
    assert taps(graph) == {Port("a"): 3}
    spec = spec_of(job)
    assert outlets(spec)["a", None] == ((), (3,))
    lanes = spec.levels[0].outgoing.schemas
    assert list(lanes) == [3]
    assert lanes[3].names == ["k", "w"]


def test_lanes_of_edges_that_pass_a_level_leave_it_again(job: Job) -> None:
    rows = source(job, "s")
    late = process(process(rows, "a"), "b")
    process(late.union(rows), "c")
    graph = job.graph()
    assert [list(outgoing(graph, level).schemas) for level in graph.levels] == [
        [1, 2],
        [2],
        [],
    ]


def test_output_with_one_way_has_the_columns_of_its_rows_and_a_place_for_the_acknowledgement(
    job: Job,
) -> None:
    process(process(source(job, "s"), "a", schema="k long, w string"), "b")
    assert spec_of(job).levels[0].outgoing.schema.names == ["c0", "c1", "ack"]


def test_the_version_of_a_function_changes_with_its_code_only(job: Job) -> None:
    process(source(job, "s"), "a")
    first, second = (spec_of(job).levels[0].operators[0] for _ in range(2))
    assert first.function_version == second.function_version

    class Other(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> Any:
            return None

    other = Job("j", max_parallelism=16)
    source(other, "s").key_by("k").process(Other(), schema="k long", uid="a")
    assert spec_of(other).levels[0].operators[0].function_version != first.function_version


def test_a_function_that_cannot_be_sent_is_refused_with_advice(job: Job) -> None:
    class Holds(KeyedProcess[Any]):
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def process(self, row: Any, ctx: Any) -> Any: ...

    source(job, "s").key_by("k").process(Holds(), schema="k long", uid="a")
    with pytest.raises(PlanError, match=r"operator 'a': its function cannot be sent.*") as caught:
        spec_of(job)
    assert "open()" in str(caught.value)


def test_a_key_of_several_columns_is_stored_as_a_struct(job: Job) -> None:
    rows = source(job, "s", "k long, v long, w string")
    rows.key_by("w", "k").process(_Pass(), schema="k long", uid="a")
    process(rows, "b")
    both, single = spec_of(job).levels[0].operators
    assert [field.name for field in both.key_type] == ["w", "k"]
    assert str(single.key_type) == "int64"


class _Pass(KeyedProcess[Any]):
    def process(self, row: Any, ctx: Any) -> Any: ...
