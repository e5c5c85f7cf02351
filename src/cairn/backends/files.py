"""Read the rows of a stored file of state, in any format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Self

import pyarrow as pa

from cairn.storage.files import open_segment
from cairn.storage.manifest import FileRef
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
    return open_segment(store, ref)


def group_counts(store: Store, ref: FileRef) -> dict[str, dict[int, int]]:
    """Return the number of rows per state and key group, from the file's index alone."""
    if ref.format == "rocksdb":
        from cairn.backends.rocksdb.files import read_index

        return {
            name: {group: rows for group, (_, rows) in entry.counts.items()}
            for name, entry in read_index(store, ref).states.items()
        }
    return {
        state.name: dict(zip(state.groups, state.group_rows, strict=True))
        for state in open_segment(store, ref).index.states
    }
