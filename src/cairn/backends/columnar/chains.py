"""The entries of each key: a linked list of positions per key, in arrays.

Always true here:
- every position that was added is in the list of its key, for as long as the index lives.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cairn.backends.columnar.key_index import NameIndex
from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.spread import grow

FEW = 16
"""Up to this many lists are walked one by one: a numpy step takes as long as a step in each."""


class Chains:
    """The positions of each key."""

    def __init__(self, key_type: pa.DataType) -> None:
        self._keys = NameIndex([key_type])
        self._heads = np.empty(0, np.int64)
        self._next = np.empty(0, np.int64)
        self._count = 0

    def extend(self, index: NameIndex, count_max: int) -> bool:
        """Add new positions of the index, at most `count_max`; True if none is left."""
        end = min(len(index), self._count + count_max)
        new = np.arange(self._count, end)
        if not len(new):
            return True
        owners, _ = self._keys.place([index.arrays(new)[0]])
        if len(self._keys) > len(self._heads):
            size = len(self._heads)
            self._heads = grow(self._heads, max(len(self._keys), size * 3 // 2))
            self._heads[size:] = -1
        if len(index) > len(self._next):
            self._next = grow(self._next, max(len(index), len(self._next) * 3 // 2))
        # Sorted by key: each points at the one before, the first of a key at its old head.
        order = np.argsort(owners, kind="stable")
        owners, new = owners[order], new[order]
        is_first = np.ones(len(new), np.bool_)
        is_first[1:] = owners[1:] != owners[:-1]
        before = np.empty(len(new), np.int64)
        before[1:] = new[:-1]
        before[is_first] = self._heads[owners[is_first]]
        self._next[new] = before
        self._heads[owners] = new
        self._count = end
        return end == len(index)

    def positions(self, keys: pa.Array) -> tuple[Ints, Ints]:
        """Return (row of `keys`, position) of every name of these keys."""
        owners = self._keys.find([keys])
        rows = np.flatnonzero(owners >= 0)
        at = self._heads[owners[rows]]
        found_rows, found = [rows], [at]
        while len(at) > FEW:
            at = self._next[at]
            more = np.flatnonzero(at >= 0)
            rows, at = rows[more], at[more]
            found_rows.append(rows)
            found.append(at)
        follow = self._next.data
        for row, position in zip(rows.tolist(), at.tolist(), strict=True):
            walked = []
            while (position := follow[position]) >= 0:
                walked.append(position)
            found_rows.append(np.full(len(walked), row, np.int64))
            found.append(np.array(walked, np.int64))
        return np.concatenate(found_rows), np.concatenate(found)
