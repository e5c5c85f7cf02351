"""Read the rows of a stored file of state, in any format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Self

import pyarrow as pa

from cairn.backends.cached.described import StoredState, visible_states
from cairn.backends.versioned.index import FORMATS, VersionedReader
from cairn.backends.versioned.index import read_index as read_versioned_index
from cairn.storage.files import open_segment
from cairn.storage.manifest import FileRef
from cairn.storage.paths import DATABASES_FOLDER, EXTERNAL_SUFFIX, STATE_FOLDER
from cairn.storage.store import Store


class RowsReader(Protocol):
    """Rows by state and key group, in the layout of `layout`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    @property
    def states(self) -> list[str]: ...

    def schema(self, state: str) -> pa.Schema: ...

    def read(self, state: str, groups: range | None = None) -> Iterable[pa.RecordBatch]: ...


def open_rows(store: Store, ref: FileRef, scratch: str) -> RowsReader:
    """Open a file of a manifest. Close it: it may keep files in `scratch`."""
    if ref.format == "rocksdb":
        # Not at the top: a slot with state in memory does not load RocksDB.
        from cairn.backends.rocksdb.files import RocksReader

        return RocksReader(store, ref, scratch)
    if ref.format in FORMATS:
        return VersionedReader(store, ref)
    return open_segment(store, ref)


def drop_external(store: Store) -> list[str]:
    """Remove state of a checkpoint's job from databases; return what could not be reached."""
    unreached: list[str] = []
    # Not at the top: most checkpoints need no client of a database.
    if any(there.path.endswith(EXTERNAL_SUFFIX) for there in store.list(STATE_FOLDER)):
        from cairn.backends.versioned.collection import drop_state

        unreached += drop_state(store)
    if any(True for _ in store.list(DATABASES_FOLDER)):
        from cairn.backends.redis.cleaning import drop_state as drop_redis_state

        unreached += drop_redis_state(store)
    return unreached


def group_counts(store: Store, ref: FileRef) -> dict[str, dict[int, int]]:
    """Return the number of rows per state and key group, from the file's index alone."""
    states: dict[str, StoredState]
    if ref.format == "rocksdb":
        from cairn.backends.rocksdb.files import read_index

        states = read_index(store, ref).states
    elif ref.format in FORMATS:
        states = read_versioned_index(store, ref).states
    else:
        with open_segment(store, ref) as segment:
            return {
                state.name: dict(zip(state.groups, state.group_rows, strict=True))
                for state in segment.index.states
            }
    return {
        name: {group: rows for group, (_, rows) in states[name].counts.items()}
        for name in visible_states(states)
    }
