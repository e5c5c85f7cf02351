"""The harness and time: watermark, timers, late rows, drain."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest

from cairn import KeyedProcess, state
from cairn.errors import FunctionError, PlanError
from cairn.testing import Harness


class Silence(KeyedProcess[Any]):
    """Says so when a key was silent for ten seconds after its last row."""

    last = state.Value("long")

    def process(self, row: Any, ctx: Any) -> None:
        last = self.last.get()
        if last is not None:
            ctx.timers.delete_event(last + 10_000)
        self.last.set(ctx.event_time_ms)
        ctx.timers.event(after="10 seconds")

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        self.last.clear()
        return (ctx.key, time_ms)


class Poll(KeyedProcess[Any]):
    """Emits once a minute, from the first row on."""

    def process(self, row: Any, ctx: Any) -> None:
        ctx.timers.processing(after="1 minute")

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        ctx.timers.processing(after="1 minute")
        return (ctx.key, ctx.now_ms)


def at(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


@pytest.fixture
def silence() -> Iterator[Harness]:
    with Harness(
        Silence(),
        schema="k long, at timestamp",
        key_by="k",
        out="k long, at long",
        event_time="at",
        watermark="2 seconds",
    ) as harness:
        yield harness


@pytest.fixture
def poll() -> Iterator[Harness]:
    with Harness(Poll(), schema="k long", key_by="k", out="k long, at long") as harness:
        yield harness


def test_watermark_follows_the_newest_row_with_a_delay(silence: Harness) -> None:
    assert silence.watermark_ms is None
    silence.push([(1, at(5)), (1, at(3))])
    assert silence.watermark_ms is None
    silence.commit()
    assert silence.watermark_ms == 3000
    silence.push((1, at(4)))
    silence.commit()
    assert silence.watermark_ms == 3000


def test_timers_are_called_at_the_beginning_of_the_next_epoch(silence: Harness) -> None:
    silence.push([(1, at(1)), (2, at(2)), (2, at(13))])
    assert silence.timers(1) == {"event": [11_000], "processing": []}
    silence.commit()
    assert silence.outputs == []
    assert silence.push((3, at(14))) == [(1, 11_000)]
    assert silence.timers(1) == {"event": [], "processing": []}
    assert silence.timers(2) == {"event": [23_000], "processing": []}


def test_tick_runs_an_epoch_without_rows(silence: Harness) -> None:
    silence.push([(1, at(1)), (2, at(13))])
    assert silence.tick() == [(1, 11_000)]
    assert silence.tick() == []


def test_watermark_can_be_moved_by_hand_and_never_back(silence: Harness) -> None:
    silence.push((1, at(1)))
    silence.commit()
    silence.advance_watermark(at(60))
    assert silence.tick() == [(1, 11_000)]
    with pytest.raises(ValueError, match="cannot go to 59000"):
        silence.advance_watermark(59_000)


def test_rollback_takes_timers_and_watermark_back(silence: Harness) -> None:
    silence.push((1, at(1)))
    silence.commit()
    silence.push((1, at(100)))
    silence.rollback()
    assert silence.timers(1)["event"] == [11_000]
    silence.commit()
    assert silence.watermark_ms == -1000


def test_timers_are_called_after_a_restore(silence: Harness) -> None:
    for base in (False, True):
        silence.push([(k, at(1)) for k in (1, 2)])
        silence.snapshot_and_restore(base=base)
        assert silence.timers(2)["event"] == [11_000]
    silence.advance_watermark(11_000)
    assert silence.tick() == [(1, 11_000), (2, 11_000)]
    silence.snapshot_and_restore()
    assert silence.timers(1)["event"] == []


def test_a_drain_after_a_restore_leaves_nothing(silence: Harness) -> None:
    silence.push((1, at(1)))
    silence.snapshot_and_restore()
    assert silence.drain() == [(1, 11_000)]
    assert silence.timers(1)["event"] == []
    assert silence.watermark_ms == -1000


def test_late_and_untimed_rows_are_on_the_late_side(silence: Harness) -> None:
    silence.push((1, at(20)))
    silence.commit()
    silence.push([(1, at(17)), (1, None), (1, at(18))])
    assert [(row.k, row.at) for row in silence.side("late")] == [(1, None), (1, at(17))]
    silence.rollback()
    assert silence.side("late") == []


def test_the_clock_drives_processing_timers(poll: Harness) -> None:
    poll.push((7,))
    assert poll.tick() == []
    poll.clock.advance_ms(60_000)
    assert poll.tick() == [(7, 60_000)]
    poll.clock.advance_ms(59_999)
    assert poll.tick() == []
    poll.clock.advance_ms(1)
    assert poll.tick() == [(7, 120_000)]
    assert poll.timers(7) == {"event": [], "processing": [180_000]}


def test_a_drain_of_a_function_that_sets_timers_for_ever_ends(poll: Harness) -> None:
    poll.push((7,))
    assert len(poll.drain()) == 100


def test_what_on_timer_raises_fails_the_epoch() -> None:
    class Failing(Silence):
        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            raise RuntimeError("no")

    with Harness(
        Failing(), "k long, at timestamp", "k", "k long, at long", event_time="at"
    ) as harness:
        harness.push((1, at(1)))
        harness.commit()
        harness.advance_watermark(at(60))
        with pytest.raises(FunctionError, match="timer: event at 1970-01-01T00:00:11"):
            harness.push((1, at(61)))
        assert harness.timers(1)["event"] == [11_000]


def test_a_function_without_timers_has_none() -> None:
    class Plain(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> None:
            pass

    with Harness(Plain(), "k long", "k", "k long") as harness:
        assert harness.timers(1) == {"event": [], "processing": []}
        with pytest.raises(PlanError, match="event_time"):
            harness.advance_watermark(5)


def test_a_watermark_without_event_time_is_refused() -> None:
    with pytest.raises(PlanError, match="needs event_time="):
        Harness(Silence(), "k long, at timestamp", "k", "k long", watermark="1 second")


def test_the_late_side_has_the_schema_of_the_rows() -> None:
    with pytest.raises(PlanError, match="schema of the rows"):
        Harness(
            Silence(),
            "k long, at timestamp",
            "k",
            "k long",
            sides={"late": "x string"},
            event_time="at",
        )


@pytest.mark.parametrize(
    ("type_", "early", "late", "expected"),
    [
        ("long", 86_400_000, 2 * 86_400_000, 1),
        ("int", 1000, 2000, 1),
        ("date", dt.date(1970, 1, 2), dt.date(1970, 1, 3), 1),
        ("timestamp_ntz", dt.datetime(1970, 1, 2), dt.datetime(1970, 1, 3), 1),
        ("string", "1970-01-02", "1970-01-03T00:00:00Z", 1),
        ("string", "some day", "1970-01-03 00:00", 0),
    ],
)
def test_event_time_may_be_of_any_type_that_spark_reads(
    type_: str, early: Any, late: Any, expected: int
) -> None:
    class Times(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> Any:
            return (ctx.event_time_ms,)

    with Harness(Times(), f"k long, at {type_}", "k", "at long", event_time="at") as harness:
        times = [row.at for row in harness.push([(1, late), (1, early), (1, None)])]
        assert len(times) == 1 + expected
        assert times == sorted(times)
        assert times[-1] == (2000 if type_ == "int" else 2 * 86_400_000)
        assert len(harness.side("late")) == 2 - expected


@pytest.mark.parametrize("key", [float("nan"), -0.0, None])
def test_timers_of_odd_keys_are_found_again(key: float | None) -> None:
    class Odd(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> None:
            ctx.timers.processing(5000)

        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            return (time_ms,)

    with Harness(Odd(), "k double", "k", "at long") as harness:
        harness.push([(key,), (key,)])
        harness.snapshot_and_restore()
        harness.push((key,))
        assert harness.timers(key)["processing"] == [5000]
        harness.clock.advance_ms(5000)
        assert harness.tick() == [(5000,)]
