"""The contract of a state backend: rows by key group, nothing more.

A backend gives, for each state and key group, a mutable mapping from key to
stored value (for map state: from key to a mutable mapping of entries). It knows
nothing of epochs: what the running epoch changes is kept above it, in `overlay`,
the same for every backend, and comes down only when the epoch is committed.

Always true of a backend:
- the mappings of different states and groups are disjoint; dropping a group is cheap;
- values that went in come out equal;
- everything in it is committed;
- it lives and dies with its slot: durability is the snapshot's work, not the backend's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from typing import Any

Rows = MutableMapping[Any, Any]


class Backend(ABC):
    """Holds the state of one operator in one slot."""

    @abstractmethod
    def rows(self, state: str, group_index: int) -> Rows:
        """The rows of a state in a key group, empty at first. The same object every time."""

    @abstractmethod
    def drop(self, state: str, group_index: int) -> None:
        """Forget the rows of a state in a key group; the next `rows` starts empty."""

    def close(self) -> None:
        """Give back memory and files."""
