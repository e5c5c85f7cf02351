"""Windows of whole columns are those of each time alone; sessions those of brute force."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.operators.aggregates import assign
from cairn.operators.aggregates.grouping import first_rows, number_pairs, number_values
from cairn.operators.aggregates.sessions import Spans, mark_touching, unite
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


@given(SPANS)
def test_spans_that_overlap_or_touch_become_one(spans: list[tuple[int, int, int]]) -> None:
    columns = Spans(
        np.array([k for k, _, _ in spans], np.int64),
        np.array([s for _, s, _ in spans], np.int64),
        np.array([s + length for _, s, length in spans], np.int64),
    )
    numbers, unions = unite(columns)
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
    assert mark_touching(asked, known).tolist() == [True, False, True, False]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.none() | st.sampled_from("abc")), max_size=40),
    st.integers(1, 1000),
)
def test_pairs_are_numbered_in_the_order_of_their_first_row(
    pairs: list[tuple[int, str | None]], spread: int
) -> None:
    left = number_values(pa.array([a for a, _ in pairs], pa.int64()))
    right = number_values(pa.array([b for _, b in pairs], pa.string()))
    # With and without room for a place each.
    spread = spread if left[1] > 1 and right[1] > 1 else 1
    numbers, count = number_pairs(left[0] * spread, left[1] * spread, *right)
    expected: dict[tuple[int, str | None], int] = {}
    for pair in pairs:
        expected.setdefault(pair, len(expected))
    assert (numbers.tolist(), count) == ([expected[pair] for pair in pairs], len(expected))
    first = [pairs.index(pair) for pair in expected]
    assert first_rows(numbers, count).tolist() == first


def test_keys_that_spark_takes_for_equal_are_one() -> None:
    floats = pa.array([0.0, -0.0, float("nan"), -float("nan"), None, 1.0])
    assert number_values(floats)[0].tolist() == [0, 0, 1, 1, 2, 3]
    struct = pa.array([{"a": 1, "b": "x"}, None, {"a": 1, "b": "x"}, {"a": None, "b": None}])
    assert number_values(struct)[0].tolist() == [0, 1, 0, 2]
    lists = pa.array([[1], [2], [1], None])
    assert number_values(lists)[0].tolist() == [0, 1, 0, 2]
    floats_in_lists = pa.array([[0.0], [-0.0], [float("nan")], [-float("nan")], [None], None, []])
    assert number_values(floats_in_lists)[0].tolist() == [0, 0, 1, 1, 2, 3, 4]
    in_struct = pa.StructArray.from_arrays([floats_in_lists], ["a"])
    assert number_values(in_struct)[0].tolist() == [0, 0, 1, 1, 2, 3, 4]
