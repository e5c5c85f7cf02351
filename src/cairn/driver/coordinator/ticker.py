"""Decide when an idle epoch is due while Spark has no batch.

    timers      the watermark or the clock has reached a timer
    loops       records wait for the next epoch
    idleness    a silent origin becomes idle, and timers wait for the watermark

Always true here:
- it depends only on the newest manifest and the clock, so a new driver decides the same;
- unknown timers count as due once: the next epoch reports them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from cairn.driver.coordinator.rounds import is_pending
from cairn.driver.coordinator.watermarks import clocks_of
from cairn.functions import EVENT_TIMERS, PROCESSING_TIMERS
from cairn.plan.graph import Watermark
from cairn.protocol.messages import Ack
from cairn.storage.manifest import Epoch

TIMER_STATES = frozenset({EVENT_TIMERS, PROCESSING_TIMERS, "windows"})
"""States that may be due without input: timers, and aggregated windows."""
LOOK_S_MIN, LOOK_S_MAX = 0.05, 0.25
SILENCE_S = 0.5
"""The time that Spark may need after an epoch to begin the next one."""
CHANGE_S = 2.0
"""Minimum time that a change waits for the next batch."""

Timers = dict[str, tuple[int | None, int | None]]


def timers_of(acks: Sequence[Ack]) -> Timers:
    """Return per operator the earliest event timer and processing timer of its subtasks."""
    found: Timers = {}
    for ack in acks:
        for op in ack.operators:
            event_ms, processing_ms = found.get(op.uid, (None, None))
            earliest = (
                _earlier(event_ms, op.event_timer_ms),
                _earlier(processing_ms, op.processing_timer_ms),
            )
            if earliest != (None, None):
                found[op.uid] = earliest
    return found


def is_event_due(newest: Epoch | None) -> bool:
    """True if the watermark has passed a timer, which only needs an epoch to fire."""
    if newest is None:
        return False
    if newest.timers is None:
        return any(TIMER_STATES & stored.states.keys() for stored in newest.operators.values())
    event_ms, _ = _earliest(newest.timers)
    return _is_passed(event_ms, newest.watermark_ms)


def is_due(newest: Epoch | None, now_ms: int) -> bool:
    """True if an epoch without rows would have timers to fire or records to process."""
    if newest is None:
        return False
    _, processing_ms = _earliest(newest.timers or {})
    return is_event_due(newest) or _is_passed(processing_ms, now_ms) or is_pending(newest)


def is_idleness_due(
    newest: Epoch | None, origins: Mapping[str, Watermark], now_ms: int, awake_ms: int
) -> bool:
    """True if a timer is due as soon as the watermark ignores idle origins."""
    if newest is None or newest.timers is None:
        return False
    event_ms, _ = _earliest(newest.timers)
    clocks = clocks_of(newest).after({}, origins, now_ms, awake_ms=awake_ms)
    return _is_passed(event_ms, clocks.watermark_ms)


def pending(newest: Epoch | None) -> Timers:
    """Return the operators with timers, due or not."""
    return {} if newest is None or newest.timers is None else newest.timers


def _earliest(timers: Timers) -> tuple[int | None, int | None]:
    event_ms = processing_ms = None
    for each in timers.values():
        event_ms, processing_ms = _earlier(event_ms, each[0]), _earlier(processing_ms, each[1])
    return event_ms, processing_ms


def _earlier(left: int | None, right: int | None) -> int | None:
    if left is None or right is None:
        return right if left is None else left
    return min(left, right)


def _is_passed(timer_ms: int | None, clock_ms: int | None) -> bool:
    return timer_ms is not None and clock_ms is not None and timer_ms <= clock_ms


class Pace:
    """Measures how long Spark has had no batch.

    While rows flow, the next batch fires due timers, and no idle epoch is needed.
    """

    def __init__(self, interval_ms: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_ms / 1000
        self._clock_s = clock_s
        self._began_s = self._ended_s = self._asked_s = clock_s()

    def begin(self) -> None:
        """Note the begin of a batch or an idle epoch."""
        self._began_s = self._clock_s()

    def end(self) -> None:
        self._ended_s = self._clock_s()

    def ask(self) -> None:
        """Note the request of a change, which takes effect in the next epoch."""
        self._asked_s = self._clock_s()

    @property
    def is_quiet(self) -> bool:
        """True if no epoch has ended for a moment, even if one is running."""
        return self._clock_s() >= self._ended_s + SILENCE_S

    @property
    def is_silent(self) -> bool:
        next_s = self._began_s + self._interval_s
        return self._clock_s() >= max(next_s, self._ended_s + min(self._interval_s, SILENCE_S))

    @property
    def is_long_silent(self) -> bool:
        """True if two batches are missing: the first was not just late."""
        return (
            self._clock_s() >= max(self._began_s, self._ended_s) + 2 * self._interval_s + SILENCE_S
        )

    @property
    def is_change_overdue(self) -> bool:
        return self._clock_s() >= self._asked_s + max(self._interval_s, CHANGE_S)


class Ticker:
    """Calls `tick` on a thread of its own, ten times per interval, until it is stopped."""

    def __init__(self, tick: Callable[[], None], interval_ms: int, name: str) -> None:
        self._tick = tick
        self._look_s = min(max(interval_ms / 10_000, LOOK_S_MIN), LOOK_S_MAX)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"cairn-tick-{name}")
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._look_s):
            self._tick()

    def stop(self) -> None:
        """Begin no further tick; one that is running may still end."""
        self._stopped.set()
