"""The side output "errors" in a program: its schema, its time, and who takes it."""

from __future__ import annotations

import warnings

import pytest

from cairn import Job, sinks
from cairn.driver.options import check_letters
from cairn.errors import PlanError
from cairn.plan.deploy import job_spec
from cairn.plan.graph import Port, Watermark, port_time
from cairn.protocol.letters import SCHEMA
from tests.unit.plan.programs import process, source, transform


def timed(job: Job, name: str = "s") -> object:
    mark = Watermark(1000, None)
    return process(source(job, name, "k long, event_time timestamp", "event_time", mark), "op")


@pytest.fixture
def job() -> Job:
    return Job("j")


def test_errors_need_no_schema_and_have_one(job: Job) -> None:
    made = process(source(job, "s"), "op")
    assert made.side("errors").schema == SCHEMA
    made.side("errors")
    with pytest.raises(PlanError, match="has two schemas"):
        made.side("errors", "x long")


def test_letters_tell_no_event_time_and_none_is_late(job: Job) -> None:
    made = timed(job)
    errors = made.side("errors")  # type: ignore[attr-defined]
    errors.event_time("event_time").sink_to(sinks.Noop(), uid="out")
    graph = job.graph()
    assert port_time(graph.nodes, Port("op", "errors")) is None
    assert not graph.times.has_watermark(Port("op", "errors"))
    assert graph.times.has_watermark(Port("op"))


def test_errors_of_ones_own_are_refused_only_where_there_are_letters(job: Job) -> None:
    process(source(job, "s"), "op").side("errors", "x long").sink_to(sinks.Noop(), uid="out")
    with pytest.raises(PlanError, match="for rows that the function fails on") as refused:
        check_letters(job.graph())
    for said in ("'errors' of 'op'", "found: x bigint", "next: give your own rows another tag"):
        assert said in refused.value.message


def test_letters_that_are_taken_through_a_transform_are_taken(job: Job) -> None:
    made = process(source(job, "s"), "op")
    transform(made.side("errors"), "error string").sink_to(sinks.Noop(), uid="out")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_letters(job.graph())
    assert caught == []


@pytest.mark.parametrize("declared", [True, False])
def test_letters_that_nobody_takes_are_warned_of(job: Job, declared: bool) -> None:
    made = process(source(job, "s"), "op")
    made.sink_to(sinks.Noop(), uid="out")
    if declared:
        made.side("errors")
    with pytest.warns(UserWarning, match="rows that op fail on are counted and logged"):
        check_letters(job.graph())


def test_every_operator_is_told_what_to_do_with_errors(job: Job) -> None:
    process(process(source(job, "s"), "a"), "b").sink_to(sinks.Noop(), uid="out")
    spec = job_spec(
        job.graph(), job_id="j", checkpoint="memory:", backend="heap", on_error="dead-letter"
    )
    told = [op.on_error for level in spec.levels for op in level.operators]
    assert told == ["dead-letter", "dead-letter"]
