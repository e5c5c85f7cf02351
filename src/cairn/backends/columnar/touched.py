"""What the running epoch has written to, by position, and what lay there before.

Always true here:
- positions are told in the order in which the epoch first came to them: a function of its input;
- what a committed position held before the epoch is put aside once, when it is first touched.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.spread import Arrays, Columns, grown

_UNTOUCHED = -1


class Mark(NamedTuple):
    """How far an epoch has come."""

    positions: int
    numbers: int
    aside: int


class Touched:
    """The positions of one epoch. Values are put aside in bulk, as they are touched."""

    def __init__(self) -> None:
        self._at = np.empty(0, np.int32)
        """When in this epoch a position was first touched, as a number."""
        self._positions: list[Ints] = []
        self._count = 0
        self._aside: list[tuple[Ints, Arrays]] = []
        self._aside_at: list[npt.NDArray[np.int32]] = []
        """Of the first of these, when each position was touched: made when somebody looks up."""

    def clear(self) -> None:
        """The epoch is over."""
        self._at[self.positions()] = _UNTOUCHED
        self._positions, self._count = [], 0
        self._aside, self._aside_at = [], []

    def reserve(self, size: int) -> None:
        """There are so many positions now."""
        at = grown(self._at, size)
        at[len(self._at) :] = _UNTOUCHED
        self._at = at

    def positions(self) -> Ints:
        if not self._positions:
            return np.empty(0, np.int64)
        if len(self._positions) > 1:
            self._positions = [np.concatenate(self._positions)]
        return self._positions[0]

    def add(self, positions: Ints, values: Columns, committed: npt.NDArray[np.bool_]) -> None:
        """Before a write: put aside what lies there, the first time in an epoch."""
        first = positions[self._at[positions] < 0]
        if not len(first):
            return
        # Backwards, so that of a name given twice the first touch stays.
        numbers = np.arange(self._count, self._count + len(first), dtype=np.int32)
        self._at[first[::-1]] = numbers[::-1]
        first = first[self._at[first] == numbers]
        self._positions.append(first)
        self._count += len(numbers)
        before = first[committed[first]]
        if len(before):
            self._aside.append((before, values.take(before)))

    def mark(self) -> Mark:
        """Where to go back to."""
        return Mark(sum(map(len, self._positions)), self._count, len(self._aside))

    def back_to(self, mark: Mark) -> None:
        """What was touched since then has not been."""
        positions = self.positions()
        self._at[positions[mark.positions :]] = _UNTOUCHED
        self._positions, self._count = [positions[: mark.positions]], mark.numbers
        del self._aside[mark.aside :]
        del self._aside_at[mark.aside :]

    def put_back(self, values: Columns) -> None:
        """What was there before the epoch, into these values."""
        for positions, aside in self._aside:
            values.put(positions, aside)

    def look_back(self, positions: Ints, arrays: Arrays) -> None:
        """The same for the values of a few committed positions, beside the epoch."""
        touched_at = self._at[positions]
        for positions_aside, _ in self._aside[len(self._aside_at) :]:
            self._aside_at.append(self._at[positions_aside])
        firsts = [int(numbers[0]) for numbers in self._aside_at]
        for at in np.flatnonzero(touched_at >= 0).tolist():
            piece = bisect_right(firsts, touched_at[at]) - 1
            row = int(np.searchsorted(self._aside_at[piece], touched_at[at]))
            for column, values in enumerate(self._aside[piece][1]):
                held = arrays[column]
                if held is None:
                    if values is None or values[row]:
                        continue
                    held = arrays[column] = np.ones(len(positions), np.bool_)
                held[at] = True if values is None else values[row]
