"""The handle of operator-list state: the list of a subtask.

It is stored as a map under the number of the subtask, from an item's place (`state.PLACE`) to the
item. So appending writes only the new items, and the place alone identifies an item.

Always true here:
- it is written only while rows are processed: the delta of an epoch must not depend on how
  often a function was opened;
- items are in the order of their places, and `at` rises from item to item;
- the handle never changes committed rows;
- `set` with the present items changes nothing, and an item that was copied to every subtask
  stays that item as long as an equal one is in the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, Final

from cairn.backends.contract import ABSENT
from cairn.backends.handles.scope import name_state
from cairn.backends.overlay import MapTable
from cairn.errors import FunctionError
from cairn.state import OperatorList
from cairn.types.codec import Datum, FrozenMap, Key, ValueTypeError
from cairn.types.codec.core import Values

OWN: Final = -1
"""In place of a number: only this subtask has the item."""

Items = list[tuple[Datum, Datum]]
"""Stored values, each with its place, in order."""


class OperatorListHandle(OperatorList[Any]):
    def __init__(self, declaration: OperatorList[Any], table: MapTable) -> None:
        self.name = declaration.name
        self.redistribute = declaration.redistribute
        self.is_writable = False
        self._table = table
        self._values = table.written
        self._place = table.entries.normalise_key
        self._group = self._subtask = 0
        self._items: Items | None = None

    def begin(self, subtask: int) -> None:
        """Begin an attempt with the list of this subtask."""
        self.is_writable = False
        self._group, self._subtask = self._table.groups.start, subtask
        self.forget()

    def forget(self) -> None:
        """Drop what is cached of the table, which something else has changed."""
        self._items = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __len__(self) -> int:
        return len(self._current())

    def __getitem__(self, index: int | slice) -> Any:
        restore = self._values.restore
        if isinstance(index, slice):
            return [restore(value) for _, value in self._current()[index]]
        return restore(self._current()[index][1])

    def append(self, value: object) -> None:
        self._check_writable()
        self._add(self._normalise((value,)))

    def extend(self, values: Iterable[object]) -> None:
        self._check_writable()
        self._add(self._normalise(values))

    def set(self, values: Iterable[object]) -> None:
        self._check_writable()
        replaced = self._normalise(values)
        copies: dict[Key, list[int]] = {}
        for place, value in reversed(self._current()):
            if place.copy != OWN:
                copies.setdefault(_hashable(value), []).append(place.copy)
        found: Items = []
        for at, value in enumerate(replaced):
            known = copies.get(_hashable(value))
            found.append((self._place((at, known.pop() if known else OWN)), value))
        self._replace(found)

    def clear(self) -> None:
        self._check_writable()
        self._replace([])

    def _check_writable(self) -> None:
        if not self.is_writable:
            raise FunctionError(
                f"list {self.name!r} is written while no row is processed\n"
                "  expected: writes in process() or process_broadcast() only; open(), close() and "
                "on_epoch_committed() run once per attempt\n"
                "  next: read it in open(), and write it when a row comes",
                state=self.name,
            )

    def _current(self) -> Items:
        if self._items is None:
            changed = self._table.changes[self._group].get(self._subtask, {})
            merged = {**self._rows_held(), **changed}
            self._items = sorted(
                (item for item in merged.items() if item[1] is not ABSENT), key=itemgetter(0)
            )
        return self._items

    def _rows_held(self) -> dict[Datum, Datum]:
        return dict(self._table.rows[self._group].get(self._subtask) or {})

    def _normalise(self, values: Iterable[object]) -> Values:
        found = []
        for value in values:
            if value is None:
                raise TypeError(f"state {self.name!r}: an item of a list cannot be None")
            try:
                found.append(self._values.normalise(value))
            except ValueTypeError as error:
                raise name_state(self, error) from None
        return found

    def _add(self, added: Values) -> None:
        if not added:
            return
        items = self._current()
        at = items[-1][0].at + 1 if items else 0
        changes, journal = self._table.changes[self._group], self._table.journal
        if journal is not None and self._subtask not in changes:
            self._keep(changes, self._subtask)
        changed = changes.setdefault(self._subtask, {})
        for index, value in enumerate(added, start=at):
            place = self._place((index, OWN))
            if journal is not None:
                self._keep(changed, place)
            items.append((place, value))
            changed[place] = value

    def _keep(self, mapping: dict[Key, Datum], name: Key) -> None:
        """Record how to undo a write before it is made."""
        journal = self._table.journal
        if journal is not None:
            journal.call(self.forget)
            journal.keep(mapping, name)

    def _replace(self, items: Items) -> None:
        """Replace the list; committed items that stay need no change."""
        held, wanted = self._rows_held(), dict(items)
        changed = {place: ABSENT for place in held if place not in wanted}
        changed |= {p: v for p, v in items if p not in held or held[p] != v}
        changes = self._table.changes[self._group]
        self._keep(changes, self._subtask)
        if changed:
            changes[self._subtask] = changed
        else:
            changes.pop(self._subtask, None)
        self._items = items


def _hashable(value: Datum) -> Key:
    """Return a hashable that is equal for equal values, maps included."""
    if isinstance(value, FrozenMap):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    found: Key = tuple(map(_hashable, value)) if isinstance(value, tuple) else value
    return found
