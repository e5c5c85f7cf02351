"""Deduplication on a Harness, against a few lines that say what it means."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.operators.deduplicate import DUPLICATES, Distinct, DistinctWithin, choose_in_order
from cairn.testing import Harness
from tests.backends import MORE_IN_SOAK
from tests.marks import for_soak
from tests.stored_harness import StoredHarness

SCHEMA = "k double, ts long, n long"
ROWS = st.tuples(
    st.none() | st.sampled_from([0.0, -0.0, 1.0, math.nan]), st.integers(0, 60), st.integers(0, 9)
)


def harness_of(function: Any, *, timed: bool = False, **options: Any) -> Harness:
    return StoredHarness(
        function,
        SCHEMA,
        "k",
        SCHEMA,
        sides={DUPLICATES: SCHEMA},
        event_time="ts" if timed else None,
        **options,
    )


def key_of(k: float | None) -> Any:
    """Equal keys as Spark groups them: all NaN are one, and so are both zeros."""
    return "nan" if k is not None and math.isnan(k) else k


def first_apart(rows: list[Any], within: float) -> tuple[list[Any], list[Any]]:
    """What passes, and what does not, of rows in the order they come in."""
    passed: list[Any] = []
    others: list[Any] = []
    for row in rows:
        near = (p for p in passed if key_of(p[0]) == key_of(row[0]) and abs(p[1] - row[1]) < within)
        (others if any(near) else passed).append(row)
    return passed, others


def same(left: list[Any], right: list[Any]) -> bool:
    return list(map(repr, map(tuple, left))) == list(map(repr, map(tuple, right)))


@given(st.lists(st.lists(ROWS, max_size=12), max_size=5), st.data())
def test_the_first_row_of_each_key_passes_and_all_others_are_duplicates(
    epochs: list[list[Any]], data: st.DataObject
) -> None:
    with harness_of(Distinct()) as harness:
        for rows in epochs:
            harness.push(rows)
            if data.draw(st.booleans(), label="fails"):
                harness.rollback()
                harness.push(rows)
            harness.snapshot_and_restore()
        rows = [row for rows in epochs for row in rows]
        passed, others = first_apart(rows, math.inf)
        assert same(harness.outputs, passed)
        assert same(harness.side(DUPLICATES), others)


@pytest.mark.parametrize(
    ("backend", "examples"),
    [("heap", 40), ("rocksdb", 12), for_soak("postgres", 12), for_soak("redis", 12)],
)
def test_rows_in_any_order_pass_when_none_that_passed_is_near(backend: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(
        st.lists(st.tuples(st.lists(ROWS, max_size=12), st.integers(0, 10)), max_size=5),
        st.integers(1, 30),
    )
    def check(epochs: list[tuple[list[Any], int]], within: int) -> None:
        in_time, watermark = [], 0
        with harness_of(DistinctWithin(within, by_event=True), timed=True, backend=backend) as h:
            for rows, step in epochs:
                watermark += step
                h.advance_watermark(watermark)
                for row in rows:  # One by one: the rows of one push would be put in order.
                    h.push(row)
                in_time += [row for row in rows if row[1] >= watermark]
                h.snapshot_and_restore()
            passed, others = first_apart(in_time, within)
            assert same(h.outputs, passed)
            assert same(h.side(DUPLICATES), others)
            h.advance_watermark(60 + within)
            h.tick()
            held = [h.state("passed", k) for k in (None, 0.0, 1.0, math.nan)]
            assert held == [{}] * 4, "nothing is remembered that no row can be near to"

    check()


@given(st.lists(ROWS, max_size=40), st.integers(1, 30))
def test_the_rows_of_one_batch_are_compared_with_each_other(rows: list[Any], within: int) -> None:
    with harness_of(DistinctWithin(within, by_event=True), timed=True) as harness:
        harness.push(rows)
        times = [row[1] for row in (*harness.outputs, *harness.side(DUPLICATES))]
        assert len(times) == len(rows)
        in_order = sorted(harness.outputs + harness.side(DUPLICATES), key=lambda row: row[1])
        passed, _ = first_apart(in_order, within)
        assert sorted(row[1] for row in harness.outputs) == sorted(row[1] for row in passed)


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
def test_without_event_time_a_key_passes_again_when_the_clock_says_so(backend: str) -> None:
    with harness_of(DistinctWithin(60_000, by_event=False), backend=backend) as harness:
        assert len(harness.push([(1.0, None, 1), (1.0, None, 2), (None, None, 3)])) == 2
        harness.commit()
        harness.clock.advance_ms(59_999)
        assert harness.push([(1.0, None, 4)]) == []
        harness.commit()
        harness.clock.advance_ms(1)
        assert harness.push([(1.0, None, 5)]) == [(1.0, None, 5)]
        harness.commit()
        assert harness.state("passed", None) == {}, "its time is over"
        assert harness.state("passed", 1.0) == {60_000_000: True}
        assert [row[2] for row in harness.side(DUPLICATES)] == [2, 4]


def test_a_key_that_passes_many_times_in_a_batch_does_so_in_the_order_of_time() -> None:
    rows = [(1.0, ts, 0) for ts in range(5000)]
    with harness_of(DistinctWithin(10, by_event=True), timed=True) as harness:
        assert [row[1] for row in harness.push(rows)] == list(range(0, 5000, 10))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=60), st.integers(1, 30))
def test_rows_in_order_pass_by_leaps_as_they_do_one_by_one(
    pairs: list[tuple[int, int]], within: int
) -> None:
    top = 2**63 - 61  # The last times there are.
    pairs.sort()
    keys = np.array([key for key, _ in pairs], np.int64)
    times = np.array([time for _, time in pairs], np.int64)
    passed: list[int] = []
    for row, (key, time) in enumerate(pairs):
        if not any(pairs[p][0] == key and time - pairs[p][1] < within for p in passed):
            passed.append(row)
    for moved in (times, times + top):
        assert sorted(choose_in_order(keys, moved, within).tolist()) == passed


def test_a_row_behind_the_watermark_is_late_only_where_time_counts() -> None:
    for function, passes in ((Distinct(), 1), (DistinctWithin(10, by_event=True), 0)):
        with harness_of(function, timed=True) as harness:
            harness.advance_watermark(100)
            assert len(harness.push((1.0, 50, 0))) == passes
            assert len(harness.side("late")) == 1 - passes


def test_keys_of_several_columns_are_compared_as_one() -> None:
    schema = "a int, b string, n int"
    with Harness(DistinctWithin(1000, by_event=False), schema, ("a", "b"), schema) as harness:
        rows = [(1, "x", 1), (1, "y", 2), (None, "x", 3), (None, None, 4), (None, None, 5)]
        assert [row[2] for row in harness.push(rows)] == [1, 2, 3, 4]
