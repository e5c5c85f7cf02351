"""Map state in the rows of a backend, with an index for ranges of entries over all keys.

The rows are ordered by key. So that a range is not a scan of all rows, an index in memory holds the
committed entries: built at the first range after a restore, then updated with every promoted epoch.

Always true here:
- the index covers exactly the committed rows, or is None; the running epoch is scanned besides;
- entries are in their order; null is in no range, NaN only in the range without bounds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import pyarrow as pa

from cairn.backends.contract import ABSENT
from cairn.backends.overlay import MapTable, in_order
from cairn.types.codec import Datum, Key

Owner = tuple[int, Key]
"""Key group and key."""


class EntryIndex:
    """The keys of each map entry."""

    def __init__(self) -> None:
        self._owners: dict[Key, set[Owner]] = {}
        self._order: list[Datum] = []
        """Every entry that has owners, and some former ones; ascending unless `_unsorted`."""
        self._unsorted = False

    def add(self, entry: Key, owner: Owner) -> None:
        owners = self._owners.get(entry)
        if owners is None:
            owners = self._owners[entry] = set()
            if entry is not None and entry == entry:
                self._order.append(entry)
                self._unsorted = True
        owners.add(owner)

    def remove(self, entry: Key, owner: Owner) -> None:
        owners = self._owners.get(entry)
        if owners is not None:
            owners.discard(owner)
            if not owners:
                del self._owners[entry]

    def entries(self, low: Datum, high: Datum) -> Iterator[Datum]:
        """Yield entries above `low` and up to `high`, in order. Nested ones have no bounds."""
        if self._unsorted or len(self._order) > 2 * len(self._owners) + 16:
            # An entry that was removed and added again is there twice.
            self._order = in_order({entry for entry in self._order if entry in self._owners})
            self._unsorted = False
        start = 0 if low is None else bisect_right(self._order, low)
        stop = len(self._order) if high is None else bisect_right(self._order, high)
        for at in range(start, stop):
            if self._order[at] in self._owners:
                yield self._order[at]
        if low is None and high is None:
            yield from (entry for entry in self._owners if entry is not None and entry != entry)

    def owners(self, entry: Key) -> set[Owner]:
        return self._owners[entry]


class IndexedMapTable(MapTable):
    """Map state that can be read by a range of entries."""

    _index: EntryIndex | None = None

    def assign(self, groups: range) -> None:
        self._index = None
        super().assign(groups)

    def forget(self, groups: range) -> None:
        self._index = None
        super().forget(groups)

    def apply(self, batch: pa.RecordBatch) -> None:
        self._index = None
        super().apply(batch)

    def promote(self) -> None:
        index = self._index
        if index is not None:
            for group in self.groups:
                for key, changed in self.changes[group].items():
                    for entry, value in changed.items():
                        if value is ABSENT:
                            index.remove(entry, (group, key))
                        else:
                            index.add(entry, (group, key))
        super().promote()

    def between(self, low: Datum, high: Datum) -> list[tuple[Key, Key, Datum]]:
        """Return (key, entry, value) of every entry in the range, in no particular order."""
        found: list[tuple[int, Key, Key]] = []
        index = self._build_index()
        for entry in index.entries(low, high):
            for group, key in index.owners(entry):
                if entry not in self.changes[group].get(key, ()):
                    found.append((group, key, entry))
        self.backend.prefetch([group for group, _, _ in found], [key for _, key, _ in found])
        rows = [(key, entry, self.rows[group].get(key)[entry]) for group, key, entry in found]
        rows += (
            (key, entry, value)
            for key, entry, value in self._iter_changes()
            if value is not ABSENT and _is_within(entry, low, high)
        )
        return rows

    def first_above(self, low: Datum) -> Datum:
        """Return the least entry above `low`, or None."""
        index = self._build_index()
        candidates = [
            entry
            for _, entry, value in self._iter_changes()
            if value is not ABSENT and _is_within(entry, low, None)
        ]
        for entry in index.entries(low, None):
            if any(
                entry not in self.changes[group].get(key, ()) for group, key in index.owners(entry)
            ):
                candidates.append(entry)
                break
        return min(candidates, default=None)

    def _iter_changes(self) -> Iterator[tuple[Key, Datum, Datum]]:
        for group in self.groups:
            for key, changed in self.changes[group].items():
                for entry, value in changed.items():
                    yield key, entry, value

    def _build_index(self) -> EntryIndex:
        if self._index is None:
            index = EntryIndex()
            for group in self.groups:
                for key, held in self.rows[group].items():
                    owner = (group, key)
                    for entry in held:
                        index.add(entry, owner)
            self._index = index
        return self._index


def _is_within(entry: Datum, low: Datum, high: Datum) -> bool:
    if entry is None:
        return False
    return bool((low is None or entry > low) and (high is None or entry <= high))
