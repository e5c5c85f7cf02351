"""Sketches of distinct values: exact while few, near enough when many, mergeable."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.operators.aggregates import hll
from tests.marks import for_soak


def hashes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 64, count, np.uint64, endpoint=False)


@pytest.mark.parametrize("count", [0, 1, 255, 256])
def test_small_counts_are_exact(count: int) -> None:
    assert hll.estimate(hll.of_hashes(np.repeat(hashes(count), 3))) == count


@pytest.mark.parametrize("count", [257, 1000, 5000, 10_000, 100_000, for_soak(1_000_000)])
def test_large_counts_are_near(count: int) -> None:
    errors = [hll.estimate(hll.of_hashes(hashes(count, seed))) / count - 1 for seed in range(3)]
    assert max(map(abs, errors)) < 4 * 0.023
    assert abs(np.mean(errors)) < 2 * 0.023


@given(st.lists(st.integers(0, 600), max_size=6))
def test_merging_is_like_having_seen_all_at_once(counts: list[int]) -> None:
    parts = [hashes(count, seed) for seed, count in enumerate(counts)]
    merged = hll.EMPTY
    for part in parts:
        merged = hll.merge(merged, hll.of_hashes(part))
    whole = hll.of_hashes(np.concatenate([hll.EMPTY, *parts]))
    assert hll.is_sparse(merged) == hll.is_sparse(whole)
    assert np.array_equal(merged, whole)


@pytest.mark.parametrize("count", [0, 3, 300])
def test_a_sketch_survives_being_stored(count: int) -> None:
    sketch = hll.of_hashes(hashes(count))
    stored = hll.from_bytes(hll.to_bytes(sketch))
    assert stored.dtype == sketch.dtype
    assert np.array_equal(stored, sketch)


def test_the_rank_of_an_empty_rest_fits() -> None:
    sparse = np.arange(hll.SPARSE_MAX + 1, dtype=np.uint64) << np.uint64(64 - hll.BITS)
    registers = hll.of_hashes(sparse)
    assert registers[: hll.SPARSE_MAX + 1].tolist() == [64 - hll.BITS + 1] * (hll.SPARSE_MAX + 1)
