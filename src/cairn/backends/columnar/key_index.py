"""Positions of names, by the batch: the row of the arrays that holds a key's state.

A name is a key, or a key and an entry of its map. Each part of fixed width counts as one or two
integers (bits, for floats), and so does a short text: its bytes and its length. Any other value
gets a number when it first occurs: a longer text from an index of texts, the rest from a dict.
So a name is a row of integers, and `int_index` finds its position.

Always true here:
- a name has one position, for as long as the index lives; positions are 0, 1, 2, …;
- names are equal exactly when Spark groups them together: one NaN, no -0.0, null is a name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cairn.backends.columnar.int_index import FIRST, HALF, SECOND, IntIndex, Ints, Names
from cairn.backends.columnar.name_parts import part_of

COUNTED_MAX = 1 << 16
"""Approximate size of the sample from which keys are counted."""


class NameIndex:
    """Positions of names with parts of these types."""

    def __init__(self, types: Sequence[pa.DataType]) -> None:
        self._parts = [part_of(type) for type in types]
        width = sum(part.width for part in self._parts)
        self._index = IntIndex(width)

    def __len__(self) -> int:
        return self._index.count

    @property
    def nbytes(self) -> int:
        """Approximate bytes of all names and their places."""
        # A name has two to four slots.
        name_bytes = 8 * len(self._index.columns) + 3 * 8
        return len(self) * name_bytes + sum(part.nbytes for part in self._parts)

    def find(self, arrays: Sequence[pa.Array], likely: Ints | None = None) -> Ints:
        """Return the position of each name, -1 if it has none; `likely` may save the search."""
        names = self._names(arrays, add=False)
        return self._index.find(names) if likely is None else self._index.find_near(names, likely)

    def place(self, arrays: Sequence[pa.Array]) -> tuple[Ints, Ints]:
        """Return the position of each name, and the rows of new names, by position."""
        return self._index.place(self._names(arrays, add=True))

    def add(self, arrays: Sequence[pa.Array]) -> tuple[Ints, Ints]:
        """Do what `place` does, for names that `find` has not found."""
        return self._index.add(self._names(arrays, add=True))

    def arrays(self, positions: Ints) -> list[pa.Array]:
        """Return the names at these positions, by part."""
        names = self._index.names(positions)
        found, at, bit = [], 0, 0
        for part in self._parts:
            found.append(part.join(names, at, bit))
            at += part.width
            bit += part.bits
        return found

    def column(self, part: int) -> tuple[Ints, int]:
        """Return the integers of a one-integer part at all positions, and its null bit."""
        before = self._parts[:part]
        at = sum(part.width for part in before)
        return self._index.columns[at][: len(self)], sum(part.bits for part in before)

    def count_distinct(self, positions: Ints) -> int:
        """Count the keys (the first part) of these names; estimate from a sample if many."""
        part = self._parts[0]
        hashes = np.zeros(len(positions), np.uint64)
        for column in self._index.columns[: part.width]:
            hashes = (hashes ^ column[positions].view(np.uint64)) * FIRST
            hashes ^= hashes >> HALF
        if self._index.nulls is not None:
            bits = self._index.nulls[positions] & ((1 << part.bits) - 1)
            hashes = (hashes ^ bits.view(np.uint64)) * SECOND
        # The sample is of keys, not names: it has all names of a key or none.
        scale = 1
        while len(hashes) > 2 * COUNTED_MAX * scale:
            scale *= 2
        if scale > 1:
            hashes = hashes[((hashes >> HALF) & np.uint64(scale - 1)) == 0]
        return len(np.unique(hashes)) * scale

    def nulls(self) -> Ints | None:
        found = self._index.nulls
        return None if found is None else found[: len(self)]

    def _names(self, arrays: Sequence[pa.Array], *, add: bool) -> Names:
        columns: list[Ints] = []
        nulls: Ints | None = None
        bit = 0
        for part, array in zip(self._parts, arrays, strict=True):
            more, flags = part.split(array, add=add)
            columns += more
            if flags is not None:
                flags = flags << bit
                nulls = flags if nulls is None else nulls | flags
            bit += part.bits
        return Names(columns, nulls)
