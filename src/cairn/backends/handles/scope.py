"""The scope of state handles: the key and the time of the current row."""

from __future__ import annotations

from typing import Any, Protocol

from cairn.backends.contract import ABSENT, Change, Content
from cairn.state import Declaration, Map
from cairn.types.codec import Codec, Datum, Key, ValueTypeError


class Scope(Protocol):
    """The current key and its time."""

    key: Key
    group: int
    at: int
    """The place of the current row in the frame, if one is open."""
    now_ms: int
    event_time_ms: int | None
    floor_ms: int
    """No event of the epoch counts as earlier than this."""


def name_state(handle: Declaration, error: ValueTypeError) -> TypeError:
    """Return the error of a value that does not fit, with the name of its state."""
    where = f".{error.path}" if error.path else ""
    return TypeError(f"state {handle.name!r}{where}: {error.reason}")


class Entries(Map[Any, Any]):
    """Map entries of the current key: in the overlay, else in the rows."""

    _scope: Scope
    _rows: list[Content]
    _changes: list[dict[Key, Change]]
    _entries: Codec

    def _entry(self, entry: object) -> Datum:
        """Return a map key in its stored form."""
        if entry is None:
            raise TypeError(f"state {self.name!r}: a map key cannot be None")
        try:
            return self._entries.normalise_key(entry)
        except ValueTypeError as error:
            raise name_state(self, error) from None

    def _get(self, entry: Key) -> Datum:
        """Return the stored value of an entry, or ABSENT."""
        scope = self._scope
        changed = self._changes[scope.group].get(scope.key)
        if changed is not None and entry in changed:
            return changed[entry]
        held = self._rows[scope.group].get(scope.key)
        return ABSENT if held is None else held.get(entry, ABSENT)

    def _put(self, entry: Key, stored: Datum) -> None:
        scope = self._scope
        changes = self._changes[scope.group]
        changed = changes.get(scope.key)
        if changed is None:
            changed = changes[scope.key] = {}
        changed[entry] = stored
