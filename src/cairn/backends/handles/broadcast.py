"""The handle of broadcast state: a map that every subtask has a copy of.

It is stored like value state, all in key group 0, with its map keys as keys.

Always true here:
- it is written only while a broadcast row is processed;
- the delta of an epoch does not depend on the order in which keys were written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from cairn.backends.handles.scope import name_state
from cairn.backends.overlay import ValueTable, in_order
from cairn.errors import FunctionError
from cairn.state import Broadcast
from cairn.types.codec import Datum, Key, ValueTypeError

GROUP: Final = 0


class BroadcastHandle(Broadcast[Any, Any]):
    def __init__(self, declaration: Broadcast[Any, Any], table: ValueTable) -> None:
        self.name = declaration.name
        self.is_writable = False
        self._table = table
        self._values, self._names = table.written, table.written_keys
        # Keys of these classes are stored as they are.
        self._exact = self._names.exact if self._names.exact in (int, str, bytes) else None
        self._order: list[Key] | None = None

    def forget(self) -> None:
        """Drop what is cached of the table, which something else has changed."""
        self._order = None

    def __getitem__(self, key: object) -> Any:
        value = self._get(self._key(key))
        if value is None:
            raise KeyError(key)
        return self._values.restore(value)

    def __contains__(self, key: object) -> bool:
        return self._get(self._key(key)) is not None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def __setitem__(self, key: object, value: object) -> None:
        self._check_writable()
        name = self._key(key)
        if value is None:
            raise TypeError(f"state {self.name!r}: a value cannot be None; delete the key instead")
        try:
            stored = self._values.normalise(value)
        except ValueTypeError as error:
            raise name_state(self, error) from None
        self._begin_change(name)
        self._table.changes[GROUP][name] = stored

    def __delitem__(self, key: object) -> None:
        self._check_writable()
        name = self._key(key)
        if self._get(name) is None:
            raise KeyError(key)
        self._remove(name)

    def clear(self) -> None:
        self._check_writable()
        for name in self._keys():
            self._remove(name)

    def _begin_change(self, name: Key) -> None:
        self._order = None
        journal = self._table.journal
        if journal is not None:
            journal.call(self.forget)
            journal.keep(self._table.changes[GROUP], name)

    def _remove(self, name: Key) -> None:
        self._begin_change(name)
        changes = self._table.changes[GROUP]
        if name in self._table.rows[GROUP]:
            changes[name] = None
        else:
            changes.pop(name, None)

    def _get(self, name: Key) -> Datum:
        changes = self._table.changes[GROUP]
        return changes[name] if name in changes else self._table.rows[GROUP].get(name)

    def _keys(self) -> list[Key]:
        # In order of the keys, so that functions that emit in the order of iteration agree.
        # Cached: a function may iterate for every row.
        if self._order is None:
            changes = self._table.changes[GROUP]
            held = [name for name, _ in self._table.rows[GROUP].items() if name not in changes]
            named = (name for name, value in changes.items() if value is not None)
            self._order = in_order([*held, *named])
        return self._order

    def _key(self, key: object) -> Datum:
        """Return a key in its stored form."""
        if type(key) is self._exact:
            return key
        if key is None:
            raise TypeError(f"state {self.name!r}: a map key cannot be None")
        try:
            return self._names.normalise_key(key)
        except ValueTypeError as error:
            raise name_state(self, error) from None

    def _check_writable(self) -> None:
        if not self.is_writable:
            raise FunctionError(
                f"broadcast state {self.name!r} is written where only this subtask would see it\n"
                "  expected: writes in process_broadcast() only, which runs alike in every "
                "subtask\n"
                "  next: send the change as a row of the broadcast stream, or keep it in keyed "
                "state",
                state=self.name,
            )
