"""A filter of names never denies a name that it has."""

from __future__ import annotations

import numpy as np

from cairn.backends.cached.name_filter import NameFilter


def hashes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 64, count, np.uint64)


def test_names_that_were_added_are_never_denied() -> None:
    names = NameFilter(1)
    for seed in range(5):
        names.add(hashes(20_000, seed))
    assert all(names.may_have(hashes(20_000, seed)).all() for seed in range(5))


def test_most_other_names_are_denied() -> None:
    names = NameFilter(1 << 16)
    names.add(hashes(20_000, 0))
    assert names.may_have(hashes(20_000, 1)).mean() < 0.05
    assert not NameFilter(1 << 16).may_have(hashes(100, 0)).any()
