"""The positions that the running epoch has written to, and the values they had before.

Always true here:
- positions are in the order in which the epoch first touched them: a function of its input;
- the previous value of a committed position is saved once, when it is first touched.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.spread import Arrays, Columns, grow

_UNTOUCHED = -1


class Mark(NamedTuple):
    """A point of an epoch to go back to."""

    positions: int
    numbers: int
    saved: int


class Touched:
    """The positions of one epoch. Values are saved in bulk, as they are touched."""

    def __init__(self) -> None:
        self._at = np.empty(0, np.int32)
        """The number of the first touch of each position."""
        self._positions: list[Ints] = []
        self._count = 0
        self._saved: list[tuple[Ints, Arrays]] = []
        self._saved_at: list[npt.NDArray[np.int32]] = []
        """Numbers of the first touches in each of the saved pieces; made by lookups."""

    def clear(self) -> None:
        """End the epoch."""
        self._at[self.positions()] = _UNTOUCHED
        self._positions, self._count = [], 0
        self._saved, self._saved_at = [], []

    def reserve(self, size: int) -> None:
        """Make room for this number of positions."""
        at = grow(self._at, size)
        at[len(self._at) :] = _UNTOUCHED
        self._at = at

    def positions(self) -> Ints:
        if not self._positions:
            return np.empty(0, np.int64)
        if len(self._positions) > 1:
            self._positions = [np.concatenate(self._positions)]
        return self._positions[0]

    def add(self, positions: Ints, values: Columns, committed: npt.NDArray[np.bool_]) -> None:
        """Save the values of positions before the epoch first writes to them."""
        first = positions[self._at[positions] < 0]
        if not len(first):
            return
        # Backwards, so that the first touch of a name given twice stays.
        numbers = np.arange(self._count, self._count + len(first), dtype=np.int32)
        self._at[first[::-1]] = numbers[::-1]
        first = first[self._at[first] == numbers]
        self._positions.append(first)
        self._count += len(numbers)
        before = first[committed[first]]
        if len(before):
            self._saved.append((before, values.take(before)))

    def mark(self) -> Mark:
        """Return the point that `back_to` can go back to."""
        return Mark(sum(map(len, self._positions)), self._count, len(self._saved))

    def back_to(self, mark: Mark) -> None:
        """Forget touches after a mark."""
        positions = self.positions()
        self._at[positions[mark.positions :]] = _UNTOUCHED
        self._positions, self._count = [positions[: mark.positions]], mark.numbers
        del self._saved[mark.saved :]
        del self._saved_at[mark.saved :]

    def put_back(self, values: Columns) -> None:
        """Write the values from before the epoch back."""
        for positions, saved in self._saved:
            values.put(positions, saved)

    def look_back(self, positions: Ints, arrays: Arrays) -> None:
        """Replace the values of a few committed positions by those from before the epoch."""
        touched_at = self._at[positions]
        for positions_saved, _ in self._saved[len(self._saved_at) :]:
            self._saved_at.append(self._at[positions_saved])
        firsts = [int(numbers[0]) for numbers in self._saved_at]
        for at in np.flatnonzero(touched_at >= 0).tolist():
            piece = bisect_right(firsts, touched_at[at]) - 1
            row = int(np.searchsorted(self._saved_at[piece], touched_at[at]))
            for column, values in enumerate(self._saved[piece][1]):
                held = arrays[column]
                if held is None:
                    if values is None or values[row]:
                        continue
                    held = arrays[column] = np.ones(len(positions), np.bool_)
                held[at] = True if values is None else values[row]
