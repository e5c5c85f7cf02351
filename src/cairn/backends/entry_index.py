"""Map state in the rows of a backend that is asked for entries in a range, over all keys.

The rows are ordered by key. So that a range need not be a scan of everything, the committed entries
are also held in memory, by entry: built at the first question after a restore, then kept up
with every epoch that comes down.

Always true here:
- the index is of committed rows, or there is none; the running epoch is looked through besides;
- entries are found in their order; null is in no range, NaN only in the one without bounds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from cairn.backends.base import ABSENT
from cairn.backends.overlay import MapTable, in_order

Owner = tuple[int, Any]
"""Key group and key."""


class EntryIndex:
    """Who has an entry."""

    def __init__(self) -> None:
        self._owners: dict[Any, set[Owner]] = {}
        self._order: list[Any] = []
        """Every entry that has owners, and some that had; ascending unless `_unsorted`."""
        self._unsorted = False

    def add(self, entry: Any, owner: Owner) -> None:
        owners = self._owners.get(entry)
        if owners is None:
            owners = self._owners[entry] = set()
            if entry is not None and entry == entry:
                self._order.append(entry)
                self._unsorted = True
        owners.add(owner)

    def remove(self, entry: Any, owner: Owner) -> None:
        owners = self._owners.get(entry)
        if owners is not None:
            owners.discard(owner)
            if not owners:
                del self._owners[entry]

    def entries(self, low: Any, high: Any) -> Iterator[Any]:
        """Entries above `low` and up to `high`, in order. Nested ones have no bounds."""
        if self._unsorted or len(self._order) > 2 * len(self._owners) + 16:
            # An entry that went and came again is there twice.
            self._order = in_order({entry for entry in self._order if entry in self._owners})
            self._unsorted = False
        start = 0 if low is None else bisect_right(self._order, low)
        stop = len(self._order) if high is None else bisect_right(self._order, high)
        for at in range(start, stop):
            if self._order[at] in self._owners:
                yield self._order[at]
        if low is None and high is None:
            yield from (entry for entry in self._owners if entry is not None and entry != entry)

    def owners(self, entry: Any) -> set[Owner]:
        return self._owners[entry]


class IndexedMapTable(MapTable):
    """Map state that can be asked for a range of entries."""

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

    def between(self, low: Any, high: Any) -> list[tuple[Any, Any, Any]]:
        """(key, entry, value) of every entry in the range, in no particular order."""
        found: list[tuple[int, Any, Any]] = []
        index = self._indexed()
        for entry in index.entries(low, high):
            for group, key in index.owners(entry):
                if entry not in self.changes[group].get(key, ()):
                    found.append((group, key, entry))
        self.backend.prefetch([group for group, _, _ in found], [key for _, key, _ in found])
        rows = [(key, entry, self.rows[group].get(key)[entry]) for group, key, entry in found]
        rows += (
            (key, entry, value)
            for key, entry, value in self._changed()
            if value is not ABSENT and _is_within(entry, low, high)
        )
        return rows

    def first_above(self, low: Any) -> Any:
        """The least entry above `low`; None: there is none."""
        index = self._indexed()
        candidates = [
            entry
            for _, entry, value in self._changed()
            if value is not ABSENT and _is_within(entry, low, None)
        ]
        for entry in index.entries(low, None):
            if any(
                entry not in self.changes[group].get(key, ()) for group, key in index.owners(entry)
            ):
                candidates.append(entry)
                break
        return min(candidates, default=None)

    def _changed(self) -> Iterator[tuple[Any, Any, Any]]:
        for group in self.groups:
            for key, changed in self.changes[group].items():
                for entry, value in changed.items():
                    yield key, entry, value

    def _indexed(self) -> EntryIndex:
        if self._index is None:
            index = EntryIndex()
            for group in self.groups:
                for key, held in self.rows[group].items():
                    owner = (group, key)
                    for entry in held:
                        index.add(entry, owner)
            self._index = index
        return self._index


def _is_within(entry: Any, low: Any, high: Any) -> bool:
    if entry is None:
        return False
    return (low is None or entry > low) and (high is None or entry <= high)
