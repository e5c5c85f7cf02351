"""The part of the present begin message, read once for all levels of a slot."""

from __future__ import annotations

import threading

from cairn.protocol.messages import Begin, Part, PartsAt
from cairn.protocol.parts import read_part
from cairn.storage.store import Store


class Parts:
    """Remembers the part that was read last: levels of an execution begin one after another."""

    def __init__(self) -> None:
        self._last: tuple[PartsAt, int, Part] | None = None
        self._lock = threading.Lock()

    def read(self, begin: Begin, subtask: int, store: Store) -> Part:
        """Return the part of a subtask in a begin message."""
        if begin.parts_at is None:
            return read_part(begin, subtask, store)
        with self._lock:
            last = self._last
            if last is None or last[:2] != (begin.parts_at, subtask):
                last = begin.parts_at, subtask, read_part(begin, subtask, store)
                self._last = last
            return last[2]
