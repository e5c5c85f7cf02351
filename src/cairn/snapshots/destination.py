"""Write a savepoint to an empty folder: a claim, Parquet files, then savepoint.json.

Always true here:
- no other files are replaced: the destination is empty, and one of two concurrent writers is
  refused;
- savepoint.json is written last; after an error all written files are removed, and after a kill
  unfinished.json marks the rest;
- a key group is never split between files of a state.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cairn.errors import CommitUnknownError, RestoreError
from cairn.ids import content_id
from cairn.snapshots.columns import GROUP, StateColumns
from cairn.snapshots.savepoint import SavedFile, SavedStateFile, SavepointInfo, state_folder
from cairn.storage.manifest import seal
from cairn.storage.paths import SAVEPOINT_PATH, UNFINISHED_PATH
from cairn.storage.store import NotFoundError, Store, open_store

FILE_ROWS: Final = 1 << 20
FILE_BYTES: Final = 256 << 20
ROW_GROUP_ROWS: Final = 1 << 17
ROW_GROUP_BYTES: Final = 32 << 20
_COPY_BYTES: Final = 4 << 20

Put = Callable[[str, str], SavedFile]
"""Puts a local file at a path."""


def check_destination(url: str) -> None:
    """Raise if no savepoint can be written there: the folder is not empty or cannot be read."""
    try:
        store = open_store(url, create=False)
    except NotFoundError:
        return
    there = store.list()
    if there:
        raise _not_empty_error(store, [found.path for found in there])


def open_claimed(url: str) -> Store:
    """Open the folder of a savepoint that the driver is writing, in an executor."""
    try:
        store = open_store(url, create=False)
        is_there = store.exists(UNFINISHED_PATH)
    except NotFoundError:
        is_there = False
    if not is_there:
        raise RestoreError(
            f"an executor on {os.uname().nodename} cannot see the folder of the savepoint\n"
            f"  expected: {url}/{UNFINISHED_PATH}\n"
            "  next: pass a place that driver and executors share: a bucket, or a folder that is "
            "mounted at this path on all of them",
            url=url,
        )
    return store


class Destination:
    """The folder of the savepoint; remembers the files that were written, to remove them."""

    def __init__(self, store: Store, savepoint_id: str, epoch: int) -> None:
        self.store = store
        self._written: list[str] = []
        there = store.list()
        self._claim = msgspec.json.encode({"id": savepoint_id, "epoch": epoch})
        self._is_ours = True
        if there or not _claim_folder(store, self._claim):
            raise _not_empty_error(store, [found.path for found in there] or [UNFINISHED_PATH])

    def put_sources(self, sources: dict[str, bytes]) -> list[SavedFile]:
        found = []
        for name, data in sorted(sources.items()):
            path = f"sources/{name}"
            self._written.append(path)
            self.store.put(path, data)
            digest = content_id(data)
            found.append(SavedFile(path=path, bytes=len(data), digest=digest))
        return found

    def put_file(self, path: str, local_file: str) -> SavedFile:
        self._written.append(path)
        return put_file(self.store, path, local_file)

    def wrote(self, files: list[SavedStateFile]) -> list[SavedStateFile]:
        """Register files that executors have written here."""
        self._written += [file.path for file in files]
        return files

    def finish(self, info: SavepointInfo) -> None:
        """Write savepoint.json. RestoreError if somebody has removed the folder's files."""
        self._check_claim()
        self._written.append(SAVEPOINT_PATH)
        self.store.put(SAVEPOINT_PATH, seal(info))
        # The savepoint is complete, even if the claim cannot be removed.
        self._written.clear()
        with contextlib.suppress(Exception):
            self.store.delete([UNFINISHED_PATH])

    def _check_claim(self) -> None:
        try:
            self._is_ours = self.store.get(UNFINISHED_PATH) == self._claim
        except NotFoundError:
            self._is_ours = False
        if not self._is_ours:
            raise RestoreError(
                "this savepoint was removed while it was written\n"
                f"  folder: {self.store.url}\n"
                f"  expected: {UNFINISHED_PATH} of this writer\n"
                "  next: write the savepoint again, to another folder",
                url=self.store.url,
            )

    def undo(self) -> None:
        """Remove all written files, unless the folder belongs to another writer by now."""
        if not self._is_ours:
            return
        # savepoint.json first, and the claim last: a half removed savepoint must not look complete.
        with contextlib.suppress(Exception):
            for path in reversed(self._written):
                self.store.delete([path])
            # Executors may have written more files. The folder was empty, so all are ours.
            self.store.delete_folder("state")
            self.store.delete([UNFINISHED_PATH])


def put_file(store: Store, path: str, local_file: str) -> SavedFile:
    """Put a local file, and return its path, size and digest."""
    digest = hashlib.blake2b(digest_size=16)
    with open(local_file, "rb", buffering=0) as source:
        while data := source.read(_COPY_BYTES):
            digest.update(data)
    store.put_file(path, local_file)
    size = os.path.getsize(local_file)
    return SavedFile(path=path, bytes=size, digest=digest.hexdigest())


def _claim_folder(store: Store, claim: bytes) -> bool:
    try:
        return store.put_if_absent(UNFINISHED_PATH, claim)
    except CommitUnknownError:
        try:
            return store.get(UNFINISHED_PATH) == claim
        except NotFoundError:
            pass
        raise


def _not_empty_error(store: Store, there: list[str]) -> RestoreError:
    if SAVEPOINT_PATH in there:
        found = "another savepoint"
    elif UNFINISHED_PATH in there:
        found = "a savepoint that is being written, or was never finished"
    else:
        found = f"{there[0]}" + (f" and {len(there) - 1} more" if len(there) > 1 else "")
    return RestoreError(
        f"a savepoint needs an empty folder\n  folder: {store.url}\n  found: {found}\n"
        "  next: give another folder, or remove what is in this one",
        url=store.url,
    )


class StateWriter:
    """The Parquet files of one state. A key group is never split between files."""

    def __init__(
        self, put: Put, uid: str, columns: StateColumns, folder: str, *, part: str = ""
    ) -> None:
        """`folder` is for local files; `part` prefixes the names, if there are several writers."""
        self._put = put
        self._part = part
        self._folder = folder
        self._columns = columns
        self._path = state_folder(uid, columns.name)
        self._files: list[SavedStateFile] = []
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = self._pending_bytes = 0
        self._writer: Any = None
        self._begin_file()

    def _begin_file(self) -> None:
        self._rows = self._bytes = 0
        self._first_group: int | None = None
        self._last_group = -1

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows, in ascending order of key groups."""
        if not batch.num_rows:
            return
        groups = batch[GROUP]
        is_full = (
            self._rows + self._pending_rows >= FILE_ROWS
            or self._bytes + self._pending_bytes >= FILE_BYTES
        )
        if is_full:
            same = int(np.searchsorted(groups.to_numpy(), self._last_group, side="right"))
            if 0 < same < batch.num_rows:
                self.write(batch.slice(0, same))
                batch = batch.slice(same)
                groups = batch[GROUP]
            if groups[0].as_py() != self._last_group:
                self._end_file()
        if self._first_group is None:
            self._first_group = groups[0].as_py()
        self._last_group = groups[-1].as_py()
        self._pending.append(self._columns.to_parquet(batch))
        self._pending_rows += batch.num_rows
        self._pending_bytes += batch.nbytes
        if self._pending_rows >= ROW_GROUP_ROWS or self._pending_bytes >= ROW_GROUP_BYTES:
            self._end_row_group()

    def finish(self) -> list[SavedStateFile]:
        """Return the files that were written."""
        self._end_file()
        return self._files

    def path(self, number: int) -> str:
        return f"{self._path}/{self._part}{number:05d}.parquet"

    def _end_row_group(self) -> None:
        if not self._pending:
            return
        if self._writer is None:
            descriptor, self._local = tempfile.mkstemp(dir=self._folder, suffix=".parquet")
            os.close(descriptor)
            self._writer = pq.ParquetWriter(
                self._local, self._columns.parquet_schema, compression="zstd"
            )
        rows = pa.Table.from_batches(self._pending)
        self._writer.write_table(rows, row_group_size=max(1, rows.num_rows))
        self._rows += self._pending_rows
        self._bytes += self._pending_bytes
        self._pending = []
        self._pending_rows = self._pending_bytes = 0

    def _end_file(self) -> None:
        self._end_row_group()
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        saved = self._put(self.path(len(self._files)), self._local)
        os.unlink(self._local)
        assert self._first_group is not None
        self._files.append(
            SavedStateFile(
                path=saved.path,
                bytes=saved.bytes,
                digest=saved.digest,
                rows=self._rows,
                first_group=self._first_group,
                last_group=self._last_group,
            )
        )
        self._begin_file()
