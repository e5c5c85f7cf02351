"""Descriptions of windows: which of them a time is in."""

from __future__ import annotations

import datetime as dt
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cairn import windows
from cairn.errors import PlanError
from cairn.windows import Global, Session, Sliding, Tumbling

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
MICROSECOND = dt.timedelta(microseconds=1)
HOUR_US = 3_600_000_000

times_us = st.integers(-(10**15), 4 * 10**15)
spans_ms = st.integers(1, 500)


def us(when: dt.datetime) -> int:
    return (when - EPOCH) // MICROSECOND


def at(text: str, zone: str) -> int:
    return us(dt.datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)))


def aligned(time_us: int, size_ms: int, slide_ms: int, offset_ms: int) -> list[tuple[int, int]]:
    """All windows around a time, looked at one by one."""
    size_us, slide_us, offset_us = size_ms * 1000, slide_ms * 1000, offset_ms * 1000
    near = (time_us - offset_us) // slide_us
    starts = [offset_us + n * slide_us for n in range(near - size_ms // slide_ms - 2, near + 3)]
    return [(start, start + size_us) for start in starts if start <= time_us < start + size_us]


@given(times_us, spans_ms, st.data())
def test_a_tumbling_window_is_the_one_that_holds_the_time(
    time_us: int, size_ms: int, data: st.DataObject
) -> None:
    offset_ms = data.draw(st.integers(0, size_ms - 1))
    found = Tumbling(size_ms, offset_ms).assign(time_us)
    assert found == aligned(time_us, size_ms, size_ms, offset_ms)
    assert len(found) == 1


@given(times_us, spans_ms, st.data())
def test_sliding_windows_are_all_that_hold_the_time(
    time_us: int, size_ms: int, data: st.DataObject
) -> None:
    slide_ms = data.draw(st.integers(1, size_ms))
    offset_ms = data.draw(st.integers(0, slide_ms - 1))
    found = Sliding(size_ms, slide_ms, offset_ms).assign(time_us)
    assert found == aligned(time_us, size_ms, slide_ms, offset_ms)


def test_a_time_at_the_end_is_in_the_next_window() -> None:
    spec = windows.tumbling("10 seconds")
    assert spec.assign(9_999_999) == [(0, 10_000_000)]
    assert spec.assign(10_000_000) == [(10_000_000, 20_000_000)]


def test_times_before_1970_are_in_windows_too() -> None:
    assert windows.tumbling("10 seconds").assign(-1) == [(-10_000_000, 0)]


def test_a_session_of_one_row_lasts_for_the_gap() -> None:
    assert windows.session("1 second").assign(1_234_567) == [(1_234_567, 2_234_567)]


def test_the_global_window_holds_every_time() -> None:
    ((start, end),) = windows.global_().assign(-(2**62))
    assert start <= -(2**62) and end > 2**62


def test_a_window_is_complete_at_its_end_and_a_session_beyond_it() -> None:
    assert windows.complete_ms(windows.tumbling("1 s"), 5_000_000) == 5_000
    assert windows.complete_ms(windows.session("1 s"), 5_000_000) == 5_001
    assert windows.complete_ms(windows.session("1 s"), 5_000_999) == 5_001
    assert windows.complete_ms(windows.session("1 s"), 5_001_000) == 5_002


ZONES = [
    "Europe/Berlin",
    "America/New_York",
    "America/Sao_Paulo",  # Clocks changed at midnight: some days had none.
    "America/Havana",  # Clocks go back at one: midnight comes twice.
    "Australia/Lord_Howe",  # By half an hour.
    "Pacific/Apia",  # A whole day was left out.
    "Asia/Kathmandu",
]


@given(
    st.sampled_from(ZONES),
    st.datetimes(dt.datetime(1990, 1, 1), dt.datetime(2035, 1, 1)),
    st.integers(1, 9),
    st.sampled_from([0, 1, 6 * 3_600_000, 23 * 3_600_000 + 1_800_000]),
)
@example("Europe/Berlin", dt.datetime(2026, 3, 29, 1, 0), 1, 0)
@example("America/Sao_Paulo", dt.datetime(2018, 11, 4, 3, 0), 1, 0)
@example("America/Havana", dt.datetime(2026, 11, 1, 4, 30), 1, 0)
@example("Pacific/Apia", dt.datetime(2011, 12, 30, 10, 0), 1, 0)
def test_days_by_the_calendar_are_those_between_local_midnights(
    zone: str, when: dt.datetime, days: int, offset_ms: int
) -> None:
    place = ZoneInfo(zone)

    def begins(index: int) -> int:
        local = dt.datetime(1970, 1, 1) + dt.timedelta(days=index * days, milliseconds=offset_ms)
        return us(local.replace(tzinfo=place))

    time_us = us(when.replace(tzinfo=dt.UTC))
    near = (time_us // 86_400_000_000) // days
    bounds = sorted({begins(index) for index in range(near - 3, near + 4)})
    (found,) = Tumbling(days * 86_400_000, offset_ms, zone).assign(time_us)
    assert found in pairwise(bounds)
    assert found[0] <= time_us < found[1]


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Europe/Berlin", "2026-03-29", 23),
        ("Europe/Berlin", "2026-10-25", 25),
        ("Europe/Berlin", "2026-07-01", 24),
        ("America/New_York", "2026-03-08", 23),
        ("America/New_York", "2026-11-01", 25),
    ],
)
def test_a_day_is_shorter_or_longer_when_clocks_change(zone: str, day: str, hours: int) -> None:
    spec = windows.tumbling("1 day", timezone=zone)
    start = at(f"{day}T00:00:00", zone)
    end = start + hours * HOUR_US
    assert spec.assign(start) == [(start, end)]
    assert spec.assign(end - 1) == [(start, end)]
    assert spec.assign(start - 1)[0][1] == start
    assert spec.assign(end)[0][0] == end


def test_the_offset_of_days_by_the_calendar_goes_by_its_clocks() -> None:
    spec = windows.tumbling("1 day", offset="6 hours", timezone="Europe/Berlin")
    assert spec.assign(at("2026-03-29T05:59:59", "Europe/Berlin")) == [
        (at("2026-03-28T06:00:00", "Europe/Berlin"), at("2026-03-29T06:00:00", "Europe/Berlin"))
    ]


def test_days_at_the_end_of_pythons_calendar_have_an_end() -> None:
    spec = windows.tumbling("1 day", timezone="Europe/Berlin")
    time_us = us(dt.datetime(9999, 12, 31, 12, tzinfo=dt.UTC))
    ((start, end),) = spec.assign(time_us)
    assert start <= time_us < end


def test_constructors_give_the_descriptions() -> None:
    assert windows.tumbling("1 minute") == Tumbling(60_000)
    assert windows.tumbling("1 day", offset="1 h", timezone="UTC", time="processing") == Tumbling(
        86_400_000, 3_600_000, "UTC", "processing"
    )
    assert windows.sliding("1 minute", "10 s", offset="1 s") == Sliding(60_000, 10_000, 1_000)
    assert windows.session("5 s", time="processing") == Session(5_000, "processing")
    assert windows.global_() == Global()


def test_windows_take_durations_as_timedelta() -> None:
    minute, second = dt.timedelta(minutes=1), dt.timedelta(seconds=1)
    assert windows.tumbling(minute, offset=second) == Tumbling(60_000, 1_000)
    assert windows.sliding(minute, 10 * second) == Sliding(60_000, 10_000)
    assert windows.session(5 * second) == Session(5_000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: windows.tumbling("0 seconds"), "size of tumbling windows is 0 ms"),
        (lambda: windows.tumbling("ten"), "size of tumbling windows must be a span of time"),
        (lambda: windows.tumbling("1 s", offset="1 s"), "less than their size, 1000 ms"),
        (lambda: windows.sliding("1 s", "2 s"), "a slide no longer than the size"),
        (lambda: windows.sliding("2 s", "1 s", offset="1 s"), "less than their slide, 1000 ms"),
        (lambda: windows.sliding("2 s", "0 s"), "slide of sliding windows is 0 ms"),
        (lambda: windows.session("0 s"), "gap of session windows is 0 ms"),
        (lambda: windows.tumbling("1 hour", timezone="Europe/Berlin"), "are whole days"),
        (lambda: windows.tumbling("1 day", timezone="Berlin"), "no time zone 'Berlin' is known"),
        (lambda: windows.tumbling("1 day", timezone="Europe"), "no time zone 'Europe' is known"),
        (lambda: windows.session("1 s", time="wall"), "expected: 'event' or 'processing'"),  # type: ignore[arg-type]
        (lambda: windows.global_(time="none"), "expected: 'event' or 'processing'"),  # type: ignore[arg-type]
    ],
)
def test_windows_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()
