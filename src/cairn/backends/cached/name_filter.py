"""A filter of the names that the database has, in memory: a Bloom filter of fixed size.

To ask the database for a name that it lacks takes microseconds, even with the filters of its files.
Where most keys are new, this filter answers instead.

Always true here:
- a name that was added is never denied; of the others a few per cent are not, more if the filter
  is too small for the state.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_BITS_MIN = 16
_FACTORS = [np.uint64(f) for f in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)]


_FLAGS = np.array([1 << bit for bit in range(8)], np.uint8)


class NameFilter:
    """Hashes of names, in at most `bytes_max` bytes."""

    def __init__(self, bytes_max: int) -> None:
        bits = max(_BITS_MIN, (8 * bytes_max).bit_length() - 1)
        self._shift = np.uint64(64 - bits)
        # Memory is used when a page is first written to.
        self._flags = np.zeros(1 << (bits - 3), np.uint8)

    def add(self, hashes: Hashes) -> None:
        for place, flag in self._probes(hashes):
            np.bitwise_or.at(self._flags, place, flag)

    def may_have(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Mark the names that may have been added."""
        found = np.ones(len(hashes), np.bool_)
        for place, flag in self._probes(hashes):
            found &= (self._flags[place] & flag) != 0
        return found

    def _probes(self, hashes: Hashes) -> Iterator[tuple[Hashes, npt.NDArray[np.uint8]]]:
        for factor in _FACTORS:
            bits = (hashes * factor) >> self._shift
            yield bits >> np.uint64(3), _FLAGS[bits & np.uint64(7)]
