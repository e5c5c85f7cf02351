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
from dataclasses import dataclass
from typing import Any

from cairn.storage.manifest import FileRef
from cairn.storage.store import Store

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

    def prefetch(self, groups, keys):
        pass

    def load(self, store, ref, groups, scratch):
        return False

    def begin_base(self, tables, groups):
        return Base({n: list(t.dump()) for n, t in sorted(tables.items())})


@dataclass(frozen=True)
class BaseTarget:
    store: Store
    term: int
    operator: str
    epoch: int
    scratch: str
    inline_bytes_max: int
    known: tuple[FileRef, ...]


class Base:
    def __init__(self, dumps):
        self.dumps = dumps

    def write(self, target, pace):
        import io

        from cairn.slot.protocol import Stored
        from cairn.storage.files import SegmentWriter

        out = io.BytesIO()
        w = SegmentWriter(out, "base", target.operator, first_epoch=0, last_epoch=target.epoch)
        for n, bs in self.dumps.items():
            if bs:
                w.begin_state(n, bs[0].schema)
                for b in bs:
                    w.write(b)
                    pace()
        done = w.finish()
        data = out.getvalue()
        if len(data) <= target.inline_bytes_max:
            return Stored(done.id, done.length, done.rows, data=data)
        from cairn.storage.pack import state_path

        path = state_path(target.term, f"{done.id}.base")
        target.store.put(path, data)
        return Stored(done.id, done.length, done.rows, path=path)

    def close(self):
        pass
