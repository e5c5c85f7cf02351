"""The keys that got a row in the running epoch, for functions that define `on_epoch_end`.

Other functions have none of this: their rows go to `process` directly.

Always true here:
- a key is there once, in the order of its first row;
- a row that was put aside has left no key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cairn.backends.journal import Journal
from cairn.types.codec import Key


class TouchedKeys:
    """Keys with their key groups."""

    def __init__(self, journal: Journal | None) -> None:
        self._groups: dict[Key, Any] = {}
        self._journal = journal

    def watch(self, process: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a function that does what `process` does, and keeps the key at hand."""
        groups, journal = self._groups, self._journal

        def process_and_keep(row: Any, context: Any) -> Any:
            key = context.key
            if key not in groups:
                if journal is not None:
                    journal.keep(groups, key)
                groups[key] = context.group
            return process(row, context)

        return process_and_keep

    def clear(self) -> None:
        self._groups.clear()

    def take(self) -> list[tuple[Any, Key]]:
        """Return (group, key) of all of them, and forget them."""
        taken = [(group, key) for key, group in self._groups.items()]
        self._groups.clear()
        return taken
