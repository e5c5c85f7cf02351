"""Entries of a map, as all handles of map state find them: in the overlay, else in the rows."""

from __future__ import annotations

from typing import Any

from cairn.backends.base import ABSENT
from cairn.backends.handles.scope import Scope, name_state
from cairn.state import Map
from cairn.types.codec import Codec, ValueTypeError


class Entries(Map[Any, Any]):
    """The part of a handle that says what is stored of the key at hand."""

    _scope: Scope
    _rows: list[Any]
    _changes: list[dict[Any, Any]]
    _entries: Codec

    def _entry(self, entry: Any) -> Any:
        """A map key as it is stored."""
        if entry is None:
            raise TypeError(f"state {self.name!r}: a map key cannot be None")
        try:
            return self._entries.normalise_key(entry)
        except ValueTypeError as error:
            raise name_state(self, error) from None

    def _stored(self, entry: Any) -> Any:
        """What is stored of an entry, or ABSENT."""
        scope = self._scope
        changed = self._changes[scope.group].get(scope.key)
        if changed is not None and entry in changed:
            return changed[entry]
        held = self._rows[scope.group].get(scope.key)
        return ABSENT if held is None else held.get(entry, ABSENT)

    def _put(self, entry: Any, stored: Any) -> None:
        scope = self._scope
        changes = self._changes[scope.group]
        changed = changes.get(scope.key)
        if changed is None:
            changed = changes[scope.key] = {}
        changed[entry] = stored
