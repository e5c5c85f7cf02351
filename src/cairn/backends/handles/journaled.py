"""Handles of tables that have a journal: each write first records how to undo it.

Always true here:
- nothing is changed before the journal has its undo record.
"""

from __future__ import annotations

from typing import Any

from cairn.backends.contract import Change
from cairn.backends.handles.expiring import (
    ExpiringListHandle,
    ExpiringMapHandle,
    ExpiringValueHandle,
)
from cairn.backends.handles.keyed import (
    ListHandle,
    MapHandle,
    PickledValueHandle,
    ValueHandle,
    make_handle,
)
from cairn.backends.handles.scope import Scope, name_state
from cairn.backends.journal import GONE, Journal
from cairn.backends.overlay import Table
from cairn.state import Declaration
from cairn.types.codec import Datum, Key, ValueTypeError
from cairn.types.codec.core import Values


class _Journaled:
    _scope: Scope
    _changes: list[dict[Key, Change]]
    _journal: Journal

    def __init__(self, table: Table, scope: Scope) -> None:
        super().__init__(table, scope)  # type: ignore[call-arg]
        assert table.journal is not None
        self._journal = table.journal

    def _keep(self) -> None:
        """Record the change of the current key before it is replaced."""
        scope = self._scope
        self._journal.keep(self._changes[scope.group], scope.key)


class _Cell(_Journaled):
    def set(self, value: object) -> None:
        self._keep()
        super().set(value)  # type: ignore[misc]

    def clear(self) -> None:
        self._keep()
        super().clear()  # type: ignore[misc]


class JournaledValueHandle(_Cell, ValueHandle):
    def set(self, value: object) -> None:
        # A copy of ValueHandle.set without further calls: most rows come here.
        if type(value) is not self._exact:
            if value is None:
                self.clear()
                return
            try:
                value = self._normalise(value)
            except ValueTypeError as error:
                raise name_state(self, error) from None
        scope = self._scope
        key = scope.key
        changes = self._changes[scope.group]
        self._journal.append((changes, key, changes.get(key, GONE)))
        changes[key] = value


class JournaledPickledValueHandle(_Cell, PickledValueHandle):
    pass


class JournaledExpiringValueHandle(_Cell, ExpiringValueHandle):
    def get(self, default: Any = None) -> Any:
        if self._refreshes:
            self._keep()
        return super().get(default)


class _Entries(_Journaled):
    def _put(self, entry: Key, stored: Datum) -> None:
        scope = self._scope
        key = scope.key
        changes = self._changes[scope.group]
        changed = changes.get(key)
        if changed is None:
            self._journal.append((changes, key, GONE))
            changes[key] = {entry: stored}
        else:
            # Only this entry: a map may be large.
            self._journal.append((changed, entry, changed.get(entry, GONE)))
            changed[entry] = stored


class JournaledMapHandle(_Entries, MapHandle):
    pass


class JournaledExpiringMapHandle(_Entries, ExpiringMapHandle):
    pass


class _Items(_Journaled):
    def _add(self, added: Values) -> None:
        scope = self._scope
        changed = self._changes[scope.group].get(scope.key)
        if changed is None:
            self._keep()
        else:
            self._journal.keep_length(changed[1])
        super()._add(added)  # type: ignore[misc]

    def clear(self) -> None:
        self._keep()
        super().clear()  # type: ignore[misc]


class JournaledListHandle(_Items, ListHandle):
    pass


class JournaledExpiringListHandle(_Items, ExpiringListHandle):
    def _replace(self, pairs: Values) -> None:
        self._keep()
        super()._replace(pairs)


_KINDS: dict[type[Declaration], type[Any]] = {
    ValueHandle: JournaledValueHandle,
    PickledValueHandle: JournaledPickledValueHandle,
    ExpiringValueHandle: JournaledExpiringValueHandle,
    MapHandle: JournaledMapHandle,
    ExpiringMapHandle: JournaledExpiringMapHandle,
    ListHandle: JournaledListHandle,
    ExpiringListHandle: JournaledExpiringListHandle,
}


def make_journaled_handle(table: Table, scope: Scope) -> Declaration:
    return make_handle(table, scope, _KINDS)
