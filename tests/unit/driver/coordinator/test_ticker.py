"""Which epochs are due although there is no batch: told by the manifest and the clock."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from cairn.driver.coordinator.ticker import (
    Pace,
    Ticker,
    is_due,
    is_event_due,
    is_idleness_due,
    pending,
    timers_of,
)
from cairn.plan.graph import Watermark
from cairn.protocol.messages import Ack, OperatorAck
from cairn.storage.manifest import Epoch, StateDecl
from tests.unit.driver.coordinator.manifests import entry
from tests.unit.driver.coordinator.manifests import epoch as plain_epoch


def ack(subtask: int, *timers: tuple[str, int | None, int | None]) -> Ack:
    operators = [
        OperatorAck(uid, 0, 0, 0, 0, None, event_timer_ms=event, processing_timer_ms=processing)
        for uid, event, processing in timers
    ]
    return Ack(0, subtask, operators, {})


def epoch(**facts: Any) -> Epoch:
    return msgspec.structs.replace(plain_epoch(), **{"timers": {}, **facts})


def test_the_earliest_timers_are_taken_over_all_subtasks_of_an_operator() -> None:
    acks = [ack(0, ("a", 5, None), ("b", None, None)), ack(1, ("a", 3, 9), ("c", None, 1))]
    assert timers_of(acks) == {"a": (3, 9), "c": (None, 1)}


@pytest.mark.parametrize(
    ("facts", "now_ms", "due"),
    [
        ({}, 10**15, False),
        ({"timers": {"a": (50, None)}}, 10**15, False),
        ({"timers": {"a": (50, None)}, "watermark_ms": 49}, 10**15, False),
        ({"timers": {"a": (50, None)}, "watermark_ms": 50}, 0, True),
        ({"timers": {"a": (None, 70)}, "watermark_ms": 10**15}, 69, False),
        ({"timers": {"a": (None, 70)}}, 70, True),
        ({"timers": {"a": (90, None), "b": (None, 70)}}, 70, True),
    ],
)
def test_a_timer_is_due_when_its_own_clock_has_come_to_it(
    facts: dict[str, Any], now_ms: int, due: bool
) -> None:
    assert is_due(epoch(**facts), now_ms) == due


def test_a_silent_origin_makes_an_epoch_due_only_when_a_timer_waits_for_it() -> None:
    origins = {"a": Watermark(0, 1_000), "b": Watermark(0, 1_000)}
    silent = {
        "watermarks": {"a": 500, "b": 100},
        "seen_ms": {"a": 5_000, "b": 4_500},
        "watermark_ms": 100,
    }
    waiting = epoch(**silent, timers={"x": (500, None)})
    assert not is_idleness_due(waiting, origins, 5_499, 0)
    assert is_idleness_due(waiting, origins, 5_500, 0)
    assert not is_idleness_due(waiting, origins, 5_500, 4_501), "the run began later"
    assert not is_due(waiting, 5_500), "the watermark itself is not there yet"
    assert not is_idleness_due(epoch(**silent, timers={"x": (501, None)}), origins, 5_500, 0)
    assert not is_idleness_due(epoch(**silent), origins, 5_500, 0)


def test_before_the_first_epoch_nothing_is_due() -> None:
    assert not is_due(None, 10**15) and not is_idleness_due(None, {}, 10**15, 0)
    assert not is_event_due(None) and not pending(None)


def test_timers_of_which_nothing_is_known_are_due_where_there_may_be_any() -> None:
    plain = entry(states={"n": StateDecl(kind="value", type="bigint")})
    timed = entry(states={"timers.event": StateDecl(kind="map", type="boolean")})
    assert not is_due(epoch(timers=None, operators={"op": plain}), 0)
    assert is_due(epoch(timers=None, operators={"op": timed}), 0)
    assert is_event_due(epoch(timers=None, operators={"op": timed}))
    assert not is_due(epoch(timers={}, operators={"op": timed}), 0)


class Seconds:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def at(self, now: float) -> float:
        self.now = now
        return now


def test_spark_is_silent_when_it_could_have_brought_a_batch_and_did_not() -> None:
    clock = Seconds()
    pace = Pace(1_000, clock)
    pace.begin()
    clock.at(100.3)
    pace.end()
    assert clock.at(100.9) and not pace.is_silent, "the next batch begins at 101"
    assert clock.at(101.0) and pace.is_silent
    # One that takes longer than the interval is followed by the next at once, if there is one.
    pace.begin()
    clock.at(104.0)
    pace.end()
    assert clock.at(104.4) and not pace.is_silent
    assert clock.at(104.5) and pace.is_silent
    assert clock.at(106.4) and not pace.is_long_silent
    assert clock.at(106.5) and pace.is_long_silent, "another one is missing"


def test_a_short_interval_needs_no_long_silence_and_a_change_waits_for_rows() -> None:
    clock = Seconds()
    pace = Pace(50, clock)
    pace.ask()
    assert clock.at(100.06) and pace.is_silent and not pace.is_change_overdue
    assert clock.at(102.0) and pace.is_change_overdue
    slow = Pace(10_000, clock)
    slow.ask()
    assert clock.at(111.0) and not slow.is_change_overdue and not slow.is_silent
    assert clock.at(112.0) and slow.is_change_overdue and slow.is_silent


def test_a_ticker_ticks_until_it_is_stopped() -> None:
    ticks, enough = [], threading.Event()

    def tick() -> None:
        ticks.append(threading.current_thread())
        if len(ticks) == 3:
            ticker.stop()
            enough.set()

    ticker = Ticker(tick, 1, "t")
    assert enough.wait(30)
    ticks[0].join(30)
    assert len(ticks) == 3
