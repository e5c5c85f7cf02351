"""How to undo what the row at hand has changed: a journal of its writes.

A function that fails on a row leaves state as it found it. What a row writes lies in the
overlay of the running epoch, together with what rows before it wrote, so each write says first
how it is taken back. A table that has a journal (`table.journal`) is written to by handles
that keep it; all others cost nothing.

Always true here:
- taken back in reverse, the writes of a row leave the overlay as it was before the row;
- a row costs what it writes, however much its key holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

GONE: Final[Any] = object()
CALL: Final[Any] = object()

Write = tuple[Any, Any, Any]
"""(mapping, name, what was there or GONE); or (function, arguments, CALL)."""


class Journal(list[Write]):
    """The writes of the row at hand, each as what takes it back. Empty between rows."""

    __slots__ = ()

    def keep(self, mapping: dict[Any, Any], name: Any) -> None:
        """Before `mapping[name]` is set or removed."""
        self.append((mapping, name, mapping.get(name, GONE)))

    def keep_length(self, items: list[Any]) -> None:
        """Before something is added at the end of a list."""
        self.append((items, slice(len(items), None), ()))

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Whatever else is to be done to take something back."""
        self.append((function, args, CALL))

    def undo(self) -> None:
        """The row never happened."""
        while self:
            target, name, before = self.pop()
            if before is CALL:
                target(*name)
            elif before is GONE:
                target.pop(name, None)
            else:
                target[name] = before
