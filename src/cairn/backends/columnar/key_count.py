"""The number of keys of a map, counted now and then.

Counting keys reads every entry. If there are many, it waits until an eighth of them was written;
meanwhile the entries per key are assumed to stay the same.

Always true here:
- with up to COUNTED_MAX entries the count is exact.
"""

from __future__ import annotations

from collections.abc import Callable

from cairn.backends.columnar.key_index import COUNTED_MAX
from cairn.storage.manifest import Held


class KeyCount:
    """The last count, and what was written since."""

    def __init__(self) -> None:
        self._last = Held(0, 0)
        self._written = 0

    def update(self, entries: int, written: int, count_keys: Callable[[], int]) -> Held:
        """Return keys and entries, after an epoch that has `written` some of them."""
        self._written += written
        if entries <= COUNTED_MAX or self._written * 8 >= self._last.entries:
            self._last = Held(count_keys(), entries)
            self._written = 0
        return Held(round(self._last.keys * entries / max(self._last.entries, 1)), entries)


__all__ = ["KeyCount"]
