"""The undo log of the current row.

A function that fails on a row leaves state as it found it. The writes of a row lie in the
overlay of the running epoch, among those of earlier rows, so each write first records how to undo
it. Only handles of a table with a journal (`table.journal`) do that; others pay nothing.

Always true here:
- undone in reverse, the writes of a row leave the overlay as it was before the row;
- a row costs what it writes, however much its key holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from cairn.types.codec import Datum, Key
from cairn.types.codec.core import Values

GONE: Final[Any] = object()
CALL: Final[Any] = object()

Write = tuple[Any, Any, Any]
"""(mapping, name, previous value or GONE); or (function, arguments, CALL)."""


class Journal(list[Write]):
    """The undo records of the current row's writes. Empty between rows."""

    __slots__ = ()

    def keep(self, mapping: dict[Key, Datum], name: Key) -> None:
        """Record `mapping[name]` before it is set or removed."""
        self.append((mapping, name, mapping.get(name, GONE)))

    def keep_length(self, items: Values) -> None:
        """Record the length of a list before something is appended."""
        self.append((items, slice(len(items), None), ()))

    def call(self, function: Callable[..., None], *args: object) -> None:
        """Record a call that undoes something else."""
        self.append((function, args, CALL))

    def undo(self) -> None:
        """Undo every write of the row."""
        while self:
            target, name, before = self.pop()
            if before is CALL:
                target(*name)
            elif before is GONE:
                target.pop(name, None)
            else:
                target[name] = before
