"""Timed rows in the rows of a backend, with an index of the panes of each key in memory.

The rows of a key are entries of a map, (pane, number). The index has, for each pane and key, the
next number and the earliest time, so that rows of a range of times are found without a scan. It is
built at its first use after a restore, then updated with every promoted epoch.

Always true here:
- `_panes` covers exactly the committed rows, or is None; `_fresh` has the running epoch's changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from cairn.backends.contract import ABSENT, Backend
from cairn.backends.overlay import MapTable
from cairn.backends.timed_rows import WAITING, TimedRows
from cairn.state import Declaration
from cairn.types.codec import Datum, Key

Owner = tuple[int, Key]
"""Key group and key."""
Place = tuple[int, int]
"""Pane and number: the name of a row of a key."""


class Pane(NamedTuple):
    """The rows of one key in one pane."""

    next_number: int
    first_time: int


class PaneTable(MapTable):
    """Timed rows of any backend."""

    declaration: TimedRows

    def __init__(
        self, declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
    ) -> None:
        super().__init__(declaration, key_type, backend, group_count)
        self._panes: dict[int, dict[Owner, Pane]] | None = None
        self._fresh: dict[tuple[int, Owner], Pane | None] = {}
        """As of the running epoch."""

    # Index

    def _index(self) -> dict[int, dict[Owner, Pane]]:
        if self._panes is None:
            index: dict[int, dict[Owner, Pane]] = {}
            for group in self.groups:
                for key, held in self.rows[group].items():
                    for pane, here in _panes_of(held.items()).items():
                        index.setdefault(pane, {})[group, key] = here
            self._panes = index
        return self._panes

    def panes(self, low: int | None, high: int) -> Iterator[tuple[int, Owner]]:
        """Yield the (pane, owner) of rows that may have times from `low` to `high`."""
        index, fresh, step = self._index(), self._fresh, self.declaration.step_us
        for pane in sorted(index):
            if pane <= high and (low is None or pane + step > low):
                for owner in index[pane]:
                    if (pane, owner) not in fresh:
                        yield pane, owner
        for (pane, owner), here in fresh.items():
            if here is not None and pane <= high and (low is None or pane + step > low):
                yield pane, owner

    def first_time(self) -> int | None:
        """Return the earliest time of a row."""
        index, fresh = self._index(), self._fresh
        times = [here.first_time for here in fresh.values() if here is not None]
        for pane in sorted(index):
            held = [here.first_time for o, here in index[pane].items() if (pane, o) not in fresh]
            if held:
                times.append(min(held))
                break
        return min(times, default=None)

    def _pane(self, pane: int, owner: Owner) -> Pane | None:
        fresh = self._fresh
        if (pane, owner) in fresh:
            return fresh[pane, owner]
        return self._index().get(pane, {}).get(owner)

    def _set_pane(self, pane: int, owner: Owner, here: Pane | None) -> None:
        if self.journal is not None:
            self.journal.keep(self._fresh, (pane, owner))  # type: ignore[arg-type]
        self._fresh[pane, owner] = here

    # Rows

    def entries_of(self, owner: Owner) -> Iterator[tuple[Place, Datum]]:
        """Yield the rows of a key with their names."""
        group, key = owner
        changed = self.changes[group].get(key, {})
        held = self.rows[group].get(key)
        if held is not None:
            for place, value in held.items():
                if place not in changed:
                    yield place, value
        for place, value in changed.items():
            if value is not ABSENT:
                yield place, value

    def add(self, owner: Owner, pane: int, time: int, value: Datum) -> None:
        here = self._pane(pane, owner)
        number, first = (0, time) if here is None else here
        self._write(owner, (pane, number), value)
        self._set_pane(pane, owner, Pane(number + 1, min(first, time)))

    def set_waiting(self, owner: Owner, place: Place, *, waits: bool) -> None:
        """Record that a row waits for a match, or has found one."""
        group, key = owner
        changed = self.changes[group].get(key, {})
        value = changed[place] if place in changed else self.rows[group].get(key)[place]
        self._write(owner, place, value._replace(waiting=WAITING if waits else None))

    def remove(self, names: Sequence[tuple[Owner, Place]]) -> None:
        for (group, key), place in names:
            held = self.rows[group].get(key)
            if held is not None and place in held:
                self._write((group, key), place, ABSENT)
                continue
            changes = self.changes[group]
            self._keep_change(changes, key, place)
            del changes[key][place]
            if not changes[key]:
                del changes[key]
        gone: dict[Owner, set[int]] = {}
        for owner, (pane, _) in names:
            gone.setdefault(owner, set()).add(pane)
        for owner, panes in gone.items():
            left = _panes_of(self.entries_of(owner))
            for pane in panes:
                self._set_pane(pane, owner, left.get(pane))

    def _write(self, owner: Owner, place: Place, value: Datum) -> None:
        group, key = owner
        changes = self.changes[group]
        self._keep_change(changes, key, place)
        changes.setdefault(key, {})[place] = value

    def _keep_change(self, changes: dict[Key, Datum], key: Key, place: Place) -> None:
        if self.journal is not None:
            self.journal.keep(changes, key)
            if key in changes:
                self.journal.keep(changes[key], place)

    # Epochs

    def assign(self, groups: range) -> None:
        self._forget_index()
        super().assign(groups)

    def forget(self, groups: range) -> None:
        self._forget_index()
        super().forget(groups)

    def apply(self, batch: pa.RecordBatch) -> None:
        self._forget_index()
        super().apply(batch)

    def _forget_index(self) -> None:
        self._panes = None
        self._fresh.clear()

    def promote(self) -> None:
        if self._panes is not None:
            for (pane, owner), here in self._fresh.items():
                owners = self._panes.setdefault(pane, {})
                if here is None:
                    owners.pop(owner, None)
                else:
                    owners[owner] = here
                if not owners:
                    del self._panes[pane]
        self._fresh.clear()
        super().promote()

    def rollback(self) -> None:
        self._fresh.clear()
        super().rollback()


def _panes_of(entries: Iterable[tuple[Place, Datum]]) -> dict[int, Pane]:
    """Return the panes of one key's rows."""
    found: dict[int, Pane] = {}
    for (pane, number), value in entries:
        here, time = found.get(pane), value[0]
        if here is None:
            found[pane] = Pane(number + 1, time)
        else:
            found[pane] = Pane(max(here.next_number, number + 1), min(here.first_time, time))
    return found
