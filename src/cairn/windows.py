"""Windows: which stretches of time a row belongs to.

    stream.key_by("user").window(windows.tumbling("10 seconds")).reduce(longest, uid="longest")
    stream.key_by("shop").window(windows.tumbling("1 day", timezone="Europe/Berlin"))...
    stream.key_by("user").window(windows.session("30 minutes"), allowed_lateness="1 hour")...

Windows of a number of rows have no times: `windows.count(100)` is full after 100 rows of a key.

A window has a start, which belongs to it, and an end, which does not. By event time it is
complete when the watermark has reached its end; by processing time when the clock has. Only
a session waits until its end has passed: a row at its very end still goes on with it.

Always true here:
- a description of windows is immutable and knows nothing of rows and keys;
- bounds are whole milliseconds, except those of sessions, which follow their rows to the
  microsecond; `assign` works in microseconds throughout.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal
from zoneinfo import ZoneInfo

from cairn.errors import PlanError
from cairn.types.durations import MAX_MS, Duration, duration_ms

TimeKind = Literal["event", "processing"]
Bounds = tuple[int, int]
"""Start and end in microseconds since 1970, the end not included."""

DAY_MS = 86_400_000
FOREVER: Bounds = (-(2**63), 2**63 - 1)
"""The bounds of the global window."""


@dataclass(frozen=True)
class Tumbling:
    """Windows of one size, side by side."""

    size_ms: int
    offset_ms: int = 0
    timezone: str | None = None
    """Days by the calendar of this place: 23 or 25 hours long when its clocks change."""
    time: TimeKind = "event"

    def __post_init__(self) -> None:
        _check_time(self.time, "tumbling")
        _check_span(self.size_ms, "size of tumbling windows")
        _check_offset(self.offset_ms, self.size_ms, "size")
        if self.timezone is not None:
            _check_zone(self.timezone)
            if self.size_ms % DAY_MS:
                raise PlanError(
                    f"tumbling windows by the calendar of {self.timezone} are whole days, found "
                    f"{self.size_ms} ms\n  next: leave timezone out, or take a size in days"
                )

    def assign(self, time_us: int) -> list[Bounds]:
        """The window that a time is in."""
        if self.timezone is not None:
            return [self._days(time_us, self.timezone)]
        size_us = self.size_ms * 1000
        start = time_us - (time_us - self.offset_ms * 1000) % size_us
        return [(start, start + size_us)]

    def _days(self, time_us: int, timezone: str) -> Bounds:
        count = self.size_ms // DAY_MS
        # Near enough by the clock of UTC. Only the bounds themselves tell which window it is:
        # where clocks are put back, local times repeat.
        index = (time_us // 1000 - self.offset_ms) // self.size_ms
        while time_us < _local_us(timezone, index * count, self.offset_ms):
            index -= 1
        while time_us >= (end := _local_us(timezone, (index + 1) * count, self.offset_ms)):
            index += 1
        return _local_us(timezone, index * count, self.offset_ms), end


@dataclass(frozen=True)
class Sliding:
    """Windows of one size that overlap: one begins every `slide_ms`."""

    size_ms: int
    slide_ms: int
    offset_ms: int = 0
    time: TimeKind = "event"

    def __post_init__(self) -> None:
        _check_time(self.time, "sliding")
        _check_span(self.size_ms, "size of sliding windows")
        _check_span(self.slide_ms, "slide of sliding windows")
        if self.slide_ms > self.size_ms:
            raise PlanError(
                f"sliding windows that begin every {self.slide_ms} ms and are {self.size_ms} ms "
                "long would leave rows out\n  expected: a slide no longer than the size"
            )
        _check_offset(self.offset_ms, self.slide_ms, "slide")

    def assign(self, time_us: int) -> list[Bounds]:
        """The windows that a time is in, earliest first."""
        size_us, slide_us = self.size_ms * 1000, self.slide_ms * 1000
        last = time_us - (time_us - self.offset_ms * 1000) % slide_us
        # The earliest start after time - size, in steps of the slide.
        first = last - (last + size_us - time_us - 1) // slide_us * slide_us
        return [(start, start + size_us) for start in range(first, last + 1, slide_us)]


@dataclass(frozen=True)
class Session:
    """Windows that end after a pause: rows of a key no further apart than the gap share one."""

    gap_ms: int
    time: TimeKind = "event"

    def __post_init__(self) -> None:
        _check_time(self.time, "session")
        _check_span(self.gap_ms, "gap of session windows")

    def assign(self, time_us: int) -> list[Bounds]:
        """The session of one row alone; sessions of a key that overlap or touch are merged."""
        return [(time_us, time_us + self.gap_ms * 1000)]


@dataclass(frozen=True)
class Global:
    """One window that never ends."""

    time: TimeKind = "event"

    def __post_init__(self) -> None:
        _check_time(self.time, "global")

    def assign(self, time_us: int) -> list[Bounds]:
        return [FOREVER]


@dataclass(frozen=True)
class Count:
    """Windows of `size` rows of a key; one begins every `every` rows."""

    size: int
    every: int
    time: ClassVar[TimeKind] = "processing"
    """No row is too late for them."""

    def __post_init__(self) -> None:
        for name, number in (("size", self.size), ("every", self.every)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise PlanError(
                    f"{name} of count windows is {number!r}\n  expected: a positive number of rows"
                )

    def assign(self, number: int) -> list[Bounds]:
        """The windows of a row by its number among the rows of its key, from 0; bounds too."""
        last = number - number % self.every
        first = max(0, last - (last + self.size - number - 1) // self.every * self.every)
        starts = range(first, last + 1, self.every)
        return [(start, start + self.size) for start in starts if number < start + self.size]


WindowSpec = Tumbling | Sliding | Session | Global | Count


def complete_ms(spec: WindowSpec, end_us: int) -> int:
    """The first millisecond of watermark or clock with which a window of this end is complete."""
    at_ms = end_us // 1000 + 1 if isinstance(spec, Session) else -(-end_us // 1000)
    return max(-MAX_MS, min(at_ms, MAX_MS))


def tumbling(
    size: Duration,
    *,
    offset: Duration = "0 seconds",
    timezone: str | None = None,
    time: TimeKind = "event",
) -> Tumbling:
    """Windows of one size, side by side, counted from 1970 in UTC, moved by the offset.

    With a time zone, whole days by the calendar of that place; the offset then goes by its
    clocks too: `offset="6 hours"` makes days from six to six.
    """
    return Tumbling(
        duration_ms(size, "size of tumbling windows"),
        duration_ms(offset, "offset of tumbling windows"),
        timezone,
        time,
    )


def sliding(
    size: Duration, slide: Duration, *, offset: Duration = "0 seconds", time: TimeKind = "event"
) -> Sliding:
    """Windows of `size`, one beginning every `slide`: a row is in several of them."""
    return Sliding(
        duration_ms(size, "size of sliding windows"),
        duration_ms(slide, "slide of sliding windows"),
        duration_ms(offset, "offset of sliding windows"),
        time,
    )


def session(gap: Duration, *, time: TimeKind = "event") -> Session:
    """Windows per key that end when no row has come for `gap`.

    A session ends `gap` after its last row. A row that falls between two makes them one.
    """
    return Session(duration_ms(gap, "gap of session windows"), time)


def count(size: int, *, every: int | None = None) -> Count:
    """Windows of `size` rows of each key: start and end of their results are null.

    With `every`, one begins after each `every` rows of the key: they overlap if that is less than
    `size`, and leave rows out if it is more. Rows of a key are counted in the order of their event
    time within an epoch, else as they come. A window that is never full emits nothing.
    """
    return Count(size, size if every is None else every)


def global_(*, time: TimeKind = "event") -> Global:
    """One window per key that never ends: its start and end are null.

    Its results come from an early trigger, and from draining a bounded run; without either
    there are none.
    """
    return Global(time)


@lru_cache(maxsize=4096)
def _local_us(timezone: str, day: int, offset_ms: int) -> int:
    """Return when a day since 1970, moved by the offset, begins by the clocks of a place.

    Where clocks show that time twice, it is the first; where they skip it, as if they did not.
    """
    try:
        local = dt.datetime(1970, 1, 1) + dt.timedelta(days=day, milliseconds=offset_ms)
        away = local.replace(tzinfo=ZoneInfo(timezone)).utcoffset()
    except OverflowError:  # Years that Python's calendar does not have.
        return (day * DAY_MS + offset_ms) * 1000
    assert away is not None, "a zone has an offset at every time"
    since_1970 = local - dt.datetime(1970, 1, 1) - away
    return since_1970 // dt.timedelta(microseconds=1)


def _check_time(time: str, kind: str) -> None:
    if time not in ("event", "processing"):
        raise PlanError(
            f"time of {kind} windows is {time!r}\n  expected: 'event' or 'processing'", time=time
        )


def _check_span(span_ms: int, what: str) -> None:
    if span_ms <= 0:
        raise PlanError(f"{what} is {span_ms} ms\n  expected: at least 1 ms")


def _check_offset(offset_ms: int, period_ms: int, what: str) -> None:
    if not 0 <= offset_ms < period_ms:
        raise PlanError(
            f"offset of windows is {offset_ms} ms\n  expected: less than their {what}, "
            f"{period_ms} ms"
        )


def _check_zone(timezone: str) -> None:
    try:
        ZoneInfo(timezone)
    # Unknown names are a KeyError, those of folders an OSError, paths a ValueError.
    except (KeyError, OSError, ValueError, TypeError):
        raise PlanError(
            f"no time zone {timezone!r} is known\n  next: name one as 'Europe/Berlin' is"
        ) from None
