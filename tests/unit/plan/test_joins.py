"""Joins in the graph: the event time of what comes out, and the watermark behind them."""

from __future__ import annotations

from typing import Any

import pytest

from cairn import BatchProcess, Job, KeyedProcess, PlanError
from cairn.plan.deploy import job_spec
from cairn.plan.graph import EventTime, Port, SourceNode, Watermark, port_time
from cairn.stream import Stream
from cairn.types import parse_schema


class Pass(KeyedProcess[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        return row


def source(job: Job, name: str, ddl: str, time: str | None) -> Stream:
    schema = parse_schema(ddl)
    job._nodes[name] = SourceNode(name, None, schema, time, time and Watermark(5000))  # type: ignore[arg-type]
    return Stream(job, (Port(name),), schema)


def two(job: Job) -> tuple[Stream, Stream]:
    ddl = "k int, ts timestamp"
    return source(job, "l", ddl, "ts"), source(job, "r", ddl, "ts")


@pytest.mark.parametrize(
    ("how", "time", "delay_ms"),
    [
        ("inner", EventTime("ts"), 60_000),
        ("left", EventTime("ts"), 60_000),
        ("right", EventTime("ts_right"), 2_000),
        ("full", None, 60_000),
    ],
)
def test_a_result_tells_the_time_that_all_its_rows_have(
    how: Any, time: EventTime | None, delay_ms: int
) -> None:
    job = Job("j")
    left, right = two(job)
    joined = left.join(right, on="k", within=("-2 seconds", "1 minute"), how=how, uid="join")
    assert port_time(job._nodes, Port("join")) == time
    assert job.graph().times.delay_ms(Port("join")) == delay_ms
    assert joined.side("late.left").schema == left.schema


def test_operators_behind_joins_wait_for_all_of_them() -> None:
    job = Job("j")
    left, right = two(job)
    once = left.join(right, on="k", within="1 minute", uid="once")
    again = once.join(left, on="k", within=("0 s", "10 s"), uid="again", suffix="_2")
    again.key_by("k").process(Pass(), schema=again.schema, uid="last")
    left.key_by("k").process(Pass(), schema=left.schema, uid="beside")
    spec = job_spec(job.graph(), job_id="j", checkpoint="memory:", backend="heap")
    delays = {op.uid: op.delay_ms for level in spec.levels for op in level.operators}
    assert delays == {"once": 0, "again": 60_000, "last": 70_000, "beside": 0}


def test_a_join_needs_two_event_times_of_one_job() -> None:
    job = Job("j")
    left, _ = two(job)
    plain = source(job, "plain", "k int", None)
    with pytest.raises(PlanError, match="the right stream has no event time"):
        left.join(plain, on="k", within="1 minute", uid="j")
    with pytest.raises(PlanError, match="the left stream has no event time"):
        plain.join(left, on="k", within="1 minute", uid="j")
    with pytest.raises(PlanError, match="never meet"):
        left.join(left, on={"k": "ts"}, within="1 minute", uid="j")
    with pytest.raises(PlanError, match="two jobs"):
        left.join(two(Job("other"))[0], on="k", within="1 minute", uid="j")
    with pytest.raises(PlanError, match="expected: a stream"):
        left.join(left.key_by("k"), on="k", within="1 minute", uid="j")  # type: ignore[arg-type]


def test_a_join_without_within_needs_no_event_time_and_gives_none() -> None:
    job = Job("j")
    timed, _ = two(job)
    plain = source(job, "plain", "k int, v string", None)
    timed.join(plain, on="k", uid="all")
    timed.join(plain, on="k", ttl="1 hour", how="full", uid="hour")
    assert port_time(job._nodes, Port("all")) is port_time(job._nodes, Port("hour")) is None
    spec = job_spec(job.graph(), job_id="j", checkpoint="memory:", backend="heap")
    inlets = [inlet for level in spec.levels for op in level.operators for inlet in op.inlets]
    assert [inlet.event_time for inlet in inlets] == [None] * 4, "so no row is late"
    assert "inner join" in job.explain() and "full join, ttl 1 hour" in job.explain()


def test_ttl_of_streams_with_event_time_bounds_it() -> None:
    job = Job("j")
    left, right = two(job)
    left.join(right, on="k", ttl="1 minute", uid="j")
    assert port_time(job._nodes, Port("j")) == EventTime("ts")
    assert job.graph().times.delay_ms(Port("j")) == 60_000


def test_a_join_as_of_a_time_has_the_time_of_left_and_no_delay() -> None:
    job = Job("j")
    left, right = two(job)
    joined = left.join_as_of(right, on="k", valid_until="1 day", how="left", uid="j")
    assert joined.schema.names == ["k", "ts", "ts_right"]
    assert port_time(job._nodes, Port("j")) == EventTime("ts")
    assert job.graph().times.delay_ms(Port("j")) == 0
    assert joined.side("late.right").schema == right.schema
    assert "left join as of the time of left" in job.explain()
    plain = source(job, "plain", "k int", None)
    with pytest.raises(PlanError, match="the right stream has no event time"):
        left.join_as_of(plain, on="k", uid="k")
    with pytest.raises(PlanError, match="expected: a stream"):
        left.join_as_of(right.key_by("k"), on="k", uid="k")  # type: ignore[arg-type]


class Both(BatchProcess):
    def on_a(self, batch: Any, ctx: Any) -> Any:
        return None

    def on_b(self, batch: Any, ctx: Any) -> Any:
        return None


def test_connected_streams_run_by_the_batch() -> None:
    job = Job("j")
    left, right = two(job)
    both = job.connect(a=left.key_by("k"), b=right.key_by("k"))
    assert both.process_batch(Both(), schema="k int", uid="both").schema.names == ["k"]
    with pytest.raises(PlanError, match=r"Both has no on_c\(batch, ctx\)"):
        job.connect(a=left.key_by("k"), b=right.key_by("k"), c=left.key_by("k")).process_batch(
            Both(), schema="k int", uid="c"
        )
    with pytest.raises(PlanError, match="process_batch needs keys"):
        left.broadcast(right).process_batch(Both(), schema="k int", uid="c")
    with pytest.raises(PlanError, match="takes no broadcast"):
        both.broadcast(left).process_batch(Both(), schema="k int", uid="c")


def test_a_stream_can_be_joined_with_itself() -> None:
    job = Job("j")
    left, _ = two(job)
    joined = left.join(left, on="k", within="1 minute", uid="j")
    assert joined.schema.names == ["k", "ts", "ts_right"]
    assert len(job.graph().edges) == 2


def test_duplicates_have_the_schema_of_the_rows() -> None:
    job = Job("j")
    left, _ = two(job)
    once = left.deduplicate(on=["k", "ts"], within="1 hour", uid="once")
    assert once.schema == once.side("duplicates").schema == left.schema
    assert port_time(job._nodes, Port("once")) == EventTime("ts")
    with pytest.raises(PlanError, match="within of deduplicate must be positive"):
        left.deduplicate(on="k", within="0 seconds", uid="d")
    with pytest.raises(PlanError, match="no column 'x'"):
        left.deduplicate(on="x", uid="d")
