"""Sketches of distinct values: exact while few, near enough when many, mergeable."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.operators.aggregates import hll
from tests.marks import for_soak


def hashes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 64, count, np.uint64, endpoint=False)


def sketches(*rows: np.ndarray) -> hll.Sketches:
    """A sketch of each row's hashes."""
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    values = np.concatenate([np.zeros(0, np.uint64), *rows]).view(np.int64)
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
    return hll.merge(hll.no_values(len(rows)), np.arange(len(rows)), hll.from_lists(lists))


@pytest.mark.parametrize("count", [0, 1, 255, 256])
def test_small_counts_are_exact(count: int) -> None:
    assert hll.estimate(sketches(np.repeat(hashes(count), 3))).tolist() == [count]


@pytest.mark.parametrize("count", [257, 1000, 5000, 10_000, 100_000, for_soak(1_000_000)])
def test_large_counts_are_near(count: int) -> None:
    found = hll.estimate(sketches(*(hashes(count, seed) for seed in range(3))))
    errors = found / count - 1
    assert max(map(abs, errors)) < 4 * 0.023
    assert abs(np.mean(errors)) < 2 * 0.023


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 600)), max_size=6))
def test_merging_is_like_having_seen_all_at_once(parts: list[tuple[int, int]]) -> None:
    fresh = [(row, hashes(count, seed)) for seed, (row, count) in enumerate(parts)]
    merged = hll.no_values(3)
    for row, part in fresh:
        merged = hll.merge(merged, np.array([row]), sketches(part))
    empty = np.zeros(0, np.uint64)
    whole = sketches(
        *(np.concatenate([empty, *(p for r, p in fresh if r == row)]) for row in range(3))
    )
    assert hll.to_binary(merged).equals(hll.to_binary(whole))
    assert hll.estimate(merged).tolist() == hll.estimate(whole).tolist()


def test_sketches_survive_being_stored() -> None:
    held = sketches(*(hashes(count, count) for count in (0, 3, 300, 256, 257)))
    stored = pa.concat_arrays([pa.array([None, b"junk"], pa.binary()), hll.to_binary(held)])
    found = hll.from_binary(stored.slice(2))
    assert hll.to_binary(found).equals(hll.to_binary(held))
    assert hll.estimate(hll.from_binary(pa.nulls(2, pa.binary()))).tolist() == [0, 0]


def test_a_stored_sketch_is_a_mark_and_its_hashes_or_registers() -> None:
    """State of earlier versions is read, so the format stays."""
    few, many = hashes(3), hashes(300)
    stored = hll.to_binary(sketches(few, many, few[:0])).to_pylist()
    assert stored[0] == b"\0" + np.sort(few).astype("<u8").tobytes()
    assert (stored[1][:1], len(stored[1])) == (b"\1", 1 + hll.REGISTERS)
    assert stored[2] == b"\0"


@given(st.lists(st.integers(0, 3), max_size=6))
def test_rows_are_taken_and_joined_like_those_of_an_array(rows: list[int]) -> None:
    held = sketches(*(hashes(count, count) for count in (0, 5, 300, 2)))
    taken = hll.take(held, np.array(rows, np.int64))
    expected = hll.to_binary(held).take(pa.array(rows, pa.int64()))
    assert hll.to_binary(taken).equals(expected)
    both = hll.concat(held, taken)
    assert hll.to_binary(both).equals(pa.concat_arrays([hll.to_binary(held), expected]))


def test_the_rank_of_an_empty_rest_fits() -> None:
    sparse = np.arange(hll.SPARSE_MAX + 1, dtype=np.uint64) << np.uint64(64 - hll.BITS)
    (registers,) = sketches(sparse).registers
    assert registers[: hll.SPARSE_MAX + 1].tolist() == [64 - hll.BITS + 1] * (hll.SPARSE_MAX + 1)
