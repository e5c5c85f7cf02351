"""What a function sees of the list of its subtask.

Stored as a map under the number of the subtask: from an item's place, `state.PLACE`, to the
item. So appending writes what is appended, and an item is told from another by its place alone.

Always true here:
- it is written while rows are processed, and at no other time: what the epoch stores must not
  depend on how often a function was opened;
- items are in the order of their places, and `at` rises from item to item;
- committed rows are never changed from here;
- `set` of what is there already changes nothing, and an item that was handed to every
  subtask stays that item as long as an equal one is in the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, Final

from cairn.backends.base import ABSENT
from cairn.backends.handles.scope import name_state
from cairn.backends.overlay import MapTable
from cairn.errors import FunctionError
from cairn.state import OperatorList
from cairn.types.codec import FrozenMap, ValueTypeError

OWN: Final = -1
"""In place of a number: the item is of this subtask alone."""

Items = list[tuple[Any, Any]]
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
        """An attempt begins: whose list it is."""
        self.is_writable = False
        self._group, self._subtask = self._table.groups.start, subtask
        self.forget()

    def forget(self) -> None:
        """The table was changed by somebody else."""
        self._items = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __len__(self) -> int:
        return len(self._held())

    def __getitem__(self, index: int | slice) -> Any:
        restore = self._values.restore
        if isinstance(index, slice):
            return [restore(value) for _, value in self._held()[index]]
        return restore(self._held()[index][1])

    def append(self, value: Any) -> None:
        self._check_writable()
        self._add(self._normalised((value,)))

    def extend(self, values: Iterable[Any]) -> None:
        self._check_writable()
        self._add(self._normalised(values))

    def set(self, values: Iterable[Any]) -> None:
        self._check_writable()
        replaced = self._normalised(values)
        copies: dict[Any, list[int]] = {}
        for place, value in reversed(self._held()):
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
                f"list {self.name!r} is written where no row is processed\n"
                "  expected: that in process() or process_broadcast() only; open(), close() and "
                "on_epoch_committed() run as often as an epoch is tried\n"
                "  next: read it in open(), and write it when a row comes",
                state=self.name,
            )

    def _held(self) -> Items:
        if self._items is None:
            changed = self._table.changes[self._group].get(self._subtask, {})
            merged = {**self._committed(), **changed}
            self._items = sorted(
                (item for item in merged.items() if item[1] is not ABSENT), key=itemgetter(0)
            )
        return self._items

    def _committed(self) -> dict[Any, Any]:
        return dict(self._table.rows[self._group].get(self._subtask) or {})

    def _normalised(self, values: Iterable[Any]) -> list[Any]:
        found = []
        for value in values:
            if value is None:
                raise TypeError(f"state {self.name!r}: an item of a list cannot be None")
            try:
                found.append(self._values.normalise(value))
            except ValueTypeError as error:
                raise name_state(self, error) from None
        return found

    def _add(self, added: list[Any]) -> None:
        if not added:
            return
        items = self._held()
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

    def _keep(self, mapping: dict[Any, Any], name: Any) -> None:
        """Before something is set: say how to take it back."""
        journal = self._table.journal
        if journal is not None:
            journal.call(self.forget)
            journal.keep(mapping, name)

    def _replace(self, items: Items) -> None:
        """Be these items; what is committed and stays needs no change."""
        held, wanted = self._committed(), dict(items)
        changed = {place: ABSENT for place in held if place not in wanted}
        changed |= {p: v for p, v in items if p not in held or held[p] != v}
        changes = self._table.changes[self._group]
        self._keep(changes, self._subtask)
        if changed:
            changes[self._subtask] = changed
        else:
            changes.pop(self._subtask, None)
        self._items = items


def _hashable(value: Any) -> Any:
    """Something equal values have in common: a map cannot be looked up."""
    if isinstance(value, FrozenMap):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, tuple) else value
