"""Gathered rows come out whole, by key group, and each key's in the order they came."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cairn.slot.gather import Gather

BATCHES = st.lists(st.lists(st.tuples(st.integers(0, 32767), st.integers()), max_size=20))


def batch(rows: list[tuple[int, int]], first: int) -> tuple[Any, Any, Any]:
    groups = pa.array([group for group, _ in rows], pa.int32())
    at = pa.array(range(first, first + len(rows)), pa.int64())
    return groups, at, pa.StructArray.from_arrays([at, groups], ["at", "group"])


@given(BATCHES)
def test_rows_come_out_by_group_in_the_order_they_came(batches: list[Any]) -> None:
    gather = Gather(sort_rows_min=0)
    expected: list[tuple[int, int]] = []
    for rows in batches:
        parts = batch(rows, len(expected))
        expected += [(group, len(expected) + at) for at, (group, _) in enumerate(rows)]
        assert not gather.add(*parts)
    taken = gather.take()
    if taken is None:
        assert not batches
        return
    assert taken.times is not None
    found = list(zip(taken.groups.to_pylist(), taken.times.to_pylist(), strict=True))
    assert found == sorted(expected)
    assert [(row["group"], row["at"]) for row in taken.rows.to_pylist()] == found
    assert gather.take() is None


def test_enough_is_told_by_rows_and_by_bytes() -> None:
    groups, times, rows = batch([(1, 0)] * 10, 0)
    by_rows = Gather(rows_max=20)
    assert not by_rows.add(groups, times, rows)
    assert by_rows.add(groups, times, rows)
    by_rows.take()
    assert not by_rows.add(groups, times, rows), "counted anew"
    assert Gather(bytes_max=1).add(groups, None, rows)


def test_few_rows_keep_the_order_they_came_in() -> None:
    gather = Gather()
    gather.add(*batch([(3, 0), (1, 0)], 0))
    taken = gather.take()
    assert taken is not None and taken.groups.to_pylist() == [3, 1]


def test_wide_rows_pass_as_they_are() -> None:
    gather = Gather(bytes_max=1, sort_rows_min=0)
    groups, times, rows = batch([(3, 0), (1, 0)], 0)
    assert gather.add(groups, times, rows)
    taken = gather.take()
    assert taken is not None and taken.rows is rows and gather.take() is None


def test_rows_without_event_time_have_none() -> None:
    gather = Gather(sort_rows_min=0)
    groups, _, rows = batch([(3, 0), (1, 0)], 0)
    gather.add(groups, None, rows)
    taken = gather.take()
    assert taken is not None and taken.times is None
    assert taken.groups.to_pylist() == [1, 3]
