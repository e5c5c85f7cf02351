"""Windows of whole columns are those of each time alone; sessions those of brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.aggregates import assign
from cairn.aggregates.sessions import Spans, touching, united
from cairn.windows import Global, Sliding, Tumbling, WindowSpec

DAY = 86_400_000
SPECS: list[WindowSpec] = [
    Tumbling(10_000),
    Tumbling(7, offset_ms=3),
    Tumbling(DAY, timezone="Europe/Berlin"),
    Tumbling(2 * DAY, offset_ms=6 * 3_600_000, timezone="America/New_York"),
    Sliding(10_000, 5_000),
    Sliding(10_000, 3_000, offset_ms=1_000),
    Sliding(7, 7),
    Global(),
]
TIMES = st.lists(st.integers(-(10**15), 2 * 10**15), max_size=20)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@settings(deadline=None, max_examples=60)
@given(times=TIMES)
def test_windows_of_a_column_are_those_of_each_time(spec: WindowSpec, times: list[int]) -> None:
    column = np.array(times, np.int64)
    panes = assign.panes(spec, column)
    rows, starts, ends = assign.windows(spec, panes)
    found: list[list[tuple[int, int]]] = [[] for _ in times]
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        found[row].append((start, end))
    expected = [spec.assign(time) for time in times]
    assert [sorted(windows) for windows in found] == expected
    last = [windows[-1][1] for windows in expected]
    assert assign.last_ends(spec, panes).tolist() == last


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
def test_days_follow_the_clocks_of_a_place_through_a_year(zone: str) -> None:
    spec = Tumbling(DAY, timezone=zone)
    times = np.arange(1_767_225_600_000_000, 1_798_761_600_000_000, 1_799_999_999, np.int64)
    starts, ends = assign.panes(spec, times), assign.last_ends(spec, assign.panes(spec, times))
    expected = [spec.assign(time)[0] for time in times.tolist()]
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == expected


SPANS = st.lists(st.tuples(st.integers(0, 3), st.integers(-30, 30), st.integers(1, 8)), max_size=25)


@settings(deadline=None, max_examples=60)
@given(SPANS)
def test_spans_that_overlap_or_touch_become_one(spans: list[tuple[int, int, int]]) -> None:
    columns = Spans(
        np.array([k for k, _, _ in spans], np.int64),
        np.array([s for _, s, _ in spans], np.int64),
        np.array([s + length for _, s, length in spans], np.int64),
    )
    numbers, unions = united(columns)
    expected: list[tuple[int, int, int]] = []
    for key, start, length in sorted(spans):
        end = start + length
        if expected and expected[-1][0] == key and start <= expected[-1][2]:
            expected[-1] = (key, expected[-1][1], max(end, expected[-1][2]))
        else:
            expected.append((key, start, end))
    assert list(zip(*(c.tolist() for c in unions), strict=True)) == expected
    for (key, start, length), number in zip(spans, numbers.tolist(), strict=True):
        union = expected[number]
        assert union[0] == key and union[1] <= start and start + length <= union[2]


def test_touching_counts_and_other_keys_do_not() -> None:
    known = Spans(np.array([0, 1]), np.array([10, 10]), np.array([20, 20]))
    asked = Spans(np.array([0, 0, 0, 2]), np.array([20, 21, 5, 12]), np.array([25, 25, 10, 14]))
    assert touching(asked, known).tolist() == [True, False, True, False]
