"""Positions of rows of integers: a hash table in numpy, in which many rows are found at once.

Always true here:
- a row has one position, for as long as the index lives; positions are 0, 1, 2, …;
- the table is at most half full.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cairn.backends.columnar.spread import grow

Ints = npt.NDArray[np.int64]

_SLOTS_MIN_BITS = 10
FIRST = np.uint64(0x9E3779B97F4A7C15)
SECOND = np.uint64(0xD6E8FEB86659FD93)
HALF = np.uint64(32)
_FREE = -1
_MARK_SHIFT = 32
_MARKS = np.uint64((1 << 31) - 1)
_POSITION = (1 << 32) - 1


class Names(NamedTuple):
    """Names as rows of integers."""

    columns: list[Ints]
    nulls: Ints | None
    """A bit per part that is null; None if no part of any name is."""


class IntIndex:
    """Open addressing, linear probing, over rows of `width` integers.

    A slot holds a position and, above it, 31 bits of the name's hash, so that hardly any other
    name has to be compared.
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self.columns: list[Ints] = [np.empty(0, np.int64) for _ in range(width)]
        self.nulls: Ints | None = None
        self._bits = _SLOTS_MIN_BITS
        self._slots = np.full(1 << self._bits, _FREE, np.int64)

    def names(self, positions: Ints) -> Names:
        nulls = None if self.nulls is None else self.nulls[positions]
        return Names([column[positions] for column in self.columns], nulls)

    def find(self, names: Names) -> Ints:
        found = np.full(len(names.columns[0]), -1, np.int64)
        if not self.count:
            return found
        slots, mask = self._slots, (1 << self._bits) - 1
        at, marks = self._homes(names)
        looking: Ints | None = None
        while True:
            held = slots[at]
            hits = np.flatnonzero((held >> _MARK_SHIFT) == marks)
            positions = held[hits] & _POSITION
            rows = hits if looking is None else looking[hits]
            is_same = self._same(positions, names, rows)
            if not is_same.all():
                rows, hits, positions = rows[is_same], hits[is_same], positions[is_same]
            found[rows] = positions
            goes_on = held >= 0
            goes_on[hits] = False
            rest = np.flatnonzero(goes_on)
            if not len(rest):
                return found
            looking = rest if looking is None else looking[rest]
            at = (at[rest] + 1) & mask
            marks = marks[rest]

    def find_near(self, names: Names, likely: Ints) -> Ints:
        """Return what `find` returns, for half the cost where the likely positions are right."""
        if not self.count:
            return self.find(names)
        is_right = (likely >= 0) & (likely < self.count)
        is_right &= self._same(np.where(is_right, likely, 0), names, np.arange(len(likely)))
        wrong = np.flatnonzero(~is_right)
        if not len(wrong):
            return likely
        found = likely.copy()
        found[wrong] = self.find(_rows(names, wrong))
        return found

    def place(self, names: Names) -> tuple[Ints, Ints]:
        """Return positions, and the rows of new names in the order of their positions."""
        positions = self.find(names)
        missing = np.flatnonzero(positions < 0)
        if not len(missing):
            return positions, missing
        fresh = names if len(missing) == len(positions) else _rows(names, missing)
        placed, firsts = self.add(fresh)
        positions[missing] = placed
        return positions, missing[firsts]

    def add(self, names: Names) -> tuple[Ints, Ints]:
        """Do what `place` does, for names known to be new. One may be given twice."""
        self.reserve(self.count + len(names.columns[0]))
        if names.nulls is not None and self.nulls is None:
            self.nulls = np.zeros(len(self.columns[0]), np.int64)
        slots, mask = self._slots, (1 << self._bits) - 1
        found = np.empty(len(names.columns[0]), np.int64)
        looking: Ints = np.arange(len(found))
        at, marks = self._homes(names)
        firsts: list[Ints] = []
        while len(looking):
            held = slots[at]
            free = np.flatnonzero(held < 0)
            if len(free):
                # Each row writes its claim to its slot; the one that is read back wins.
                wanted = at[free]
                claims = -2 - free
                slots[wanted] = claims
                won = slots[wanted] == claims
                winners, taken = (free, wanted) if won.all() else (free[won], wanted[won])
                new = np.arange(self.count, self.count + len(winners))
                rows = looking[winners]
                self._store(new, names, rows)
                slots[taken] = (marks[winners] << _MARK_SHIFT) | new
                found[rows] = new
                firsts.append(rows)
                self.count += len(winners)
                held[winners] = _FREE
                losers = free[~won]
                held[losers] = slots[at[losers]]
                goes_on = np.ones(len(looking), np.bool_)
                goes_on[winners] = False
            else:
                goes_on = np.ones(len(looking), np.bool_)
            hits = np.flatnonzero((held >> _MARK_SHIFT) == marks)
            if len(hits):
                positions = held[hits] & _POSITION
                is_same = self._same(positions, names, looking[hits])
                hits, positions = hits[is_same], positions[is_same]
                found[looking[hits]] = positions
                goes_on[hits] = False
            rest = np.flatnonzero(goes_on)
            looking = looking[rest]
            at = (at[rest] + 1) & mask
            marks = marks[rest]
        return found, np.concatenate(firsts) if firsts else looking

    def reserve(self, count: int) -> None:
        """Make room for this number of names."""
        if count > len(self.columns[0]):
            size = max(1024, count, len(self.columns[0]) * 3 // 2)
            self.columns = [grow(column, size) for column in self.columns]
            if self.nulls is not None:
                self.nulls = grow(self.nulls, size)
        bits = self._bits
        while count * 2 > 1 << bits:
            bits += 1
        if bits != self._bits:
            self._bits = bits
            self._slots = np.full(1 << bits, _FREE, np.int64)
            self._link()

    def _link(self) -> None:
        """Put every name into the empty slots. Names differ, so none is compared."""
        slots, mask = self._slots, (1 << self._bits) - 1
        nulls = None if self.nulls is None else self.nulls[: self.count]
        at, marks = self._homes(Names([column[: self.count] for column in self.columns], nulls))
        linked = (marks << _MARK_SHIFT) | np.arange(self.count)
        while len(linked):
            free = np.flatnonzero(slots[at] < 0)
            slots[at[free]] = linked[free]
            rest = np.flatnonzero(slots[at] != linked)
            linked = linked[rest]
            at = (at[rest] + 1) & mask

    def _store(self, positions: Ints, names: Names, rows: Ints) -> None:
        first, last = positions[0], positions[-1] + 1
        for column, values in zip(self.columns, names.columns, strict=True):
            column[first:last] = values[rows]
        if self.nulls is not None:
            self.nulls[first:last] = 0 if names.nulls is None else names.nulls[rows]

    def _same(self, positions: Ints, names: Names, rows: Ints) -> npt.NDArray[np.bool_]:
        """Compare the names at these positions with those of the rows."""
        is_all = len(rows) == len(names.columns[0])  # Rows ascend, so these are all of them.
        is_same = np.ones(len(rows), np.bool_)
        for column, values in zip(self.columns, names.columns, strict=True):
            is_same &= column[positions] == (values if is_all else values[rows])
        if self.nulls is not None:
            is_same &= self.nulls[positions] == (0 if names.nulls is None else names.nulls[rows])
        elif names.nulls is not None:
            is_same &= names.nulls[rows] == 0
        return is_same

    def _homes(self, names: Names) -> tuple[Ints, Ints]:
        """Return the first slot to search for each name, and the mark it has there."""
        hashed = mix(names.columns[0].view(np.uint64))
        for column in names.columns[1:]:
            hashed += column.view(np.uint64)
            hashed = mix(hashed)
        if names.nulls is not None:
            hashed += names.nulls.view(np.uint64) * FIRST
        hashed *= FIRST
        marks = (hashed & _MARKS).view(np.int64)
        hashed >>= np.uint64(64 - self._bits)
        return hashed.view(np.int64), marks


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a new array in which low bits depend on high ones."""
    mixed = values >> HALF
    mixed ^= values
    mixed *= SECOND
    mixed ^= mixed >> HALF
    return mixed


def _rows(names: Names, rows: Ints) -> Names:
    nulls = None if names.nulls is None else names.nulls[rows]
    return Names([column[rows] for column in names.columns], nulls)
