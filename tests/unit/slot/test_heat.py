"""Where rows fall: counted by key group, and the keys with most of them."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cairn.protocol.spec import InletSpec
from cairn.slot.heat import (
    HOT_KEYS_MAX,
    SAMPLE_ROWS,
    Heat,
    bucket_groups,
    bucket_rows,
    cut_zeros,
    hottest,
)
from cairn.types import parse_schema

ONE = InletSpec(0, parse_schema("k long, v long"), keys=("k",))


def rows_of(keys: Any, schema: str = "k long, v long") -> pa.StructArray:
    columns = [pa.array(keys), pa.array(np.zeros(len(keys), np.int64))]
    return pa.StructArray.from_arrays(columns, fields=list(parse_schema(schema)))


def fed(keys: Any, batch_rows: int = 1000, group_count: int = 16) -> Heat:
    heat = Heat((ONE,), group_count)
    for start in range(0, len(keys), batch_rows):
        part = np.asarray(keys[start : start + batch_rows], np.int64)
        heat.add(pa.array((part % group_count).astype(np.int32)), rows_of(part))
    return heat


def test_rows_are_counted_by_key_group() -> None:
    heat = fed([1, 1, 2, 18, 3])
    assert heat.group_rows() == [0, 2, 2, 1] + [0] * 12
    assert cut_zeros(heat.group_rows()) == (1, [2, 2, 1])
    heat.reset()
    assert heat.group_rows() == [0] * 16 and heat.hot_keys() == []
    assert cut_zeros(heat.group_rows()) == (0, [])


@pytest.mark.parametrize("count", [1, 127, 128, 129, 300, 1024, 32768])
def test_many_groups_are_counted_in_at_most_128_buckets(count: int) -> None:
    groups = np.arange(count)
    step = bucket_groups(count)
    expected = [sum(groups[first : first + step].tolist()) for first in range(0, count, step)]
    assert bucket_rows(groups) == expected and len(expected) <= 128


def test_of_a_small_epoch_keys_are_counted_exactly() -> None:
    heat = fed([7] * 30 + [8] * 20 + list(range(100, 150)))
    assert heat.hot_keys() == [("7", 30), ("8", 20)]


def test_a_key_with_one_row_is_not_hot() -> None:
    assert fed([5]).hot_keys() == [] and fed([5, 6, 7]).hot_keys() == []


def test_of_a_large_epoch_the_hot_key_is_found_and_its_rows_about_right() -> None:
    random = np.random.default_rng(1)
    keys = random.integers(1000, 1_000_000, 200_000)
    keys[random.random(len(keys)) < 0.2] = 42
    heat = fed(keys, 10_000)
    (hot, *rest) = heat.hot_keys()
    assert hot[0] == "42" and hot[1] == pytest.approx(40_000, rel=0.25)
    assert not rest, "the others have a few rows each"
    assert heat._sampled <= 2 * SAMPLE_ROWS


def test_keys_that_take_turns_are_not_hot() -> None:
    heat = fed(np.arange(200_000) % 512, 8192)
    assert heat.hot_keys() == [], "each has a five-hundredth"


def test_keys_of_several_columns_and_other_types_are_shown_as_they_are_looked_up() -> None:
    inlet = InletSpec(0, parse_schema("a string, b date"), keys=("a", "b"))
    heat = Heat((inlet,), 4)
    row = {"a": "x", "b": dt.date(2026, 1, 2)}
    rows = pa.array([row, row, row], pa.struct(list(inlet.schema)))
    heat.add(pa.array([1, 1, 1], pa.int32()), rows)
    assert heat.hot_keys() == [('["x", "2026-01-02"]', 3)]
    text = InletSpec(0, parse_schema("k string, v long"), keys=("k",))
    heat = Heat((text,), 4)
    heat.add(pa.array([1, 1], pa.int32()), rows_of(["é" * 200] * 2, "k string, v long"))
    ((key, rows_in),) = heat.hot_keys()
    assert rows_in == 2 and len(key) == 64 and "é…" in key


def test_no_key_is_told_from_the_text_null() -> None:
    text = InletSpec(0, parse_schema("k string, v long"), keys=("k",))
    heat = Heat((text,), 4)
    heat.add(pa.array([1] * 5, pa.int32()), rows_of([None] * 3 + ["null"] * 2, "k string, v long"))
    assert heat.hot_keys() == [("[null]", 3), ("null", 2)]


def test_long_keys_that_begin_alike_are_counted_apart() -> None:
    text = InletSpec(0, parse_schema("k string, v long"), keys=("k",))
    found: list[tuple[str, int]] = []
    for ending in ("a", "b"):
        heat = Heat((text,), 4)
        heat.add(pa.array([1, 1], pa.int32()), rows_of(["x" * 99 + ending] * 2, "k string, v long"))
        found += heat.hot_keys()
    assert [rows for _, rows in hottest(found)] == [2, 2]
    assert hottest(found + found)[0] == (found[0][0], 4)


def test_keys_of_connected_streams_count_together() -> None:
    left = InletSpec(0, parse_schema("k long"), keys=("k",), name="left")
    right = InletSpec(1, parse_schema("id long, v long"), keys=("id",), name="right")
    heat = Heat((left, right), 4)
    lanes = pa.array([0, 1, 1, 0], pa.int32())
    first = pa.array([{"k": 9}, None, None, {"k": 8}], pa.struct(list(left.schema)))
    second = pa.array(
        [None, {"id": 9, "v": 0}, {"id": 9, "v": 0}, None], pa.struct(list(right.schema))
    )
    rows = pa.StructArray.from_arrays([lanes, first, second], names=["lane", "l0", "l1"])
    heat.add(pa.array([1, 1, 1, 0], pa.int32()), rows)
    assert heat.hot_keys() == [("9", 3)] and heat.group_rows() == [1, 3, 0, 0]


def test_of_several_subtasks_the_hottest_are_kept() -> None:
    found = hottest([(str(n), n) for n in range(20)] + [("3", 100)])
    assert found[0] == ("3", 103) and len(found) == HOT_KEYS_MAX
