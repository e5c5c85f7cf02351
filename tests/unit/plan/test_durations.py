"""Every duration of the public API is text or a timedelta."""

from __future__ import annotations

import datetime as dt
import inspect
import typing
from typing import Any

import pytest

import cairn
from cairn import Duration, Job, KeyedProcess, sinks, state, windows
from cairn.errors import PlanError
from cairn.functions import Timers
from cairn.job import _interval_text
from cairn.keyed import KeyedStream
from cairn.plan.check import check_watermark
from cairn.plan.graph import Watermark
from cairn.stream import Stream
from cairn.testing import Harness
from tests.unit.plan.programs import source

SECOND, MINUTE = dt.timedelta(seconds=1), dt.timedelta(minutes=1)
TIMED = "k long, t timestamp"

TAKE_DURATIONS = [
    (Job.source, "watermark", "idle_after"),
    (Job.start, "trigger", "retained_for", "commit_timeout"),
    (Stream.event_time, "watermark", "idle_after"),
    (Stream.deduplicate, "within"),
    (Stream.join, "within"),
    (KeyedStream.window, "allowed_lateness", "early_every"),
    (Timers.event, "after"),
    (Timers.processing, "after"),
    (windows.tumbling, "size", "offset"),
    (windows.sliding, "size", "slide", "offset"),
    (windows.session, "gap"),
    (Harness.__init__, "watermark"),
    (cairn.read_state, "hold"),
    (cairn.diff_state, "hold"),
    (sinks.Redis.__init__, "ttl"),
]


@pytest.mark.parametrize("signature", TAKE_DURATIONS, ids=lambda each: each[0].__qualname__)
def test_signatures_take_text_and_timedelta(signature: tuple[Any, ...]) -> None:
    called, *names = signature
    parameters = inspect.signature(called).parameters
    for name in names:
        assert "Duration" in str(parameters[name].annotation), name


def test_a_duration_is_text_or_a_timedelta() -> None:
    assert set(typing.get_args(Duration)) == {str, dt.timedelta}


def test_streams_take_durations_as_timedelta() -> None:
    job = Job("j")
    rows = source(job, "s", TIMED, event_time="t")
    late = rows.key_by("k").window(
        windows.tumbling(MINUTE), allowed_lateness=SECOND, early_every=2 * SECOND
    )
    assert (late.allowed_lateness_ms, late.early_ms) == (1_000, 2_000)
    rows.deduplicate(on="k", within=MINUTE, uid="once")
    rows.join(rows.event_time("t"), on="k", within=(-SECOND, MINUTE), uid="pairs")
    assert check_watermark(SECOND, MINUTE, "t", "source 's'") == Watermark(1_000, 60_000)


def test_a_ttl_is_text_or_a_timedelta() -> None:
    for ttl in ("1 hour", dt.timedelta(hours=1), state.TTL(dt.timedelta(hours=1))):
        found = state.Value("long", ttl=ttl).ttl
        assert found is not None and found.text == "3600000 ms, processing, write"


def test_a_timer_is_set_after_a_timedelta() -> None:
    class Timed(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> None:
            ctx.timers.event(after=MINUTE)
            ctx.timers.processing(after=2 * SECOND)

        def on_timer(self, time_ms: int, ctx: Any) -> None: ...

    with Harness(Timed(), TIMED, "k", "k long", event_time="t", watermark=SECOND) as harness:
        harness.push((1, dt.datetime(1970, 1, 1, tzinfo=dt.UTC)))
        assert harness.timers(1) == {"event": [60_000], "processing": [2_000]}


def test_a_trigger_as_timedelta_is_an_interval_of_spark() -> None:
    assert _interval_text(SECOND) == "1 second"
    assert _interval_text(dt.timedelta(milliseconds=1500)) == "1500 milliseconds"
    assert _interval_text(dt.timedelta(0)) == "0 milliseconds", "as soon as there are rows"
    with pytest.raises(PlanError, match="trigger must not be negative"):
        _interval_text(-SECOND)
