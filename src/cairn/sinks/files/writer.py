"""Write one subtask's rows of one attempt into files, split by folder and size.

A file is written to local scratch and stored whole, under a name made of its place and its
content. Rows are collected in memory first, so that a Parquet file has few row groups whatever
the size of the batches. With partitions, an epoch has one file per folder; if the rows do not
fit into memory, some folders get more files.

Always true here:
- equal rows in equal batches give equal names, in equal order, in every attempt; in other
  batches too, while GROUP_ROWS of them (with partitions: all) fit into memory;
- at most OPEN_MAX files are open, and about BUFFER_BYTES_MAX of rows are in memory;
- nothing local is left behind after `prepare` or `abort`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import pyarrow as pa

from cairn.ids import digest
from cairn.sinks.base import Committable, Writer
from cairn.sinks.files.formats import FileWriter, Format
from cairn.sinks.files.partitions import Partitions
from cairn.storage.store import Store

OPEN_MAX: Final = 32
BUFFER_BYTES_MAX: Final = 64 << 20
GROUP_ROWS: Final = 65_536
GROUP_BYTES: Final = 32 << 20
STORE_THREADS: Final = 8


class Target(NamedTuple):
    """The destination and the form of a writer's files."""

    store: Store
    stored_as: Callable[[str], str]
    """Return the path of a file until it is published."""
    format: Format
    partitions: Partitions
    file_bytes_target: int
    scratch: str | None


class _Open:
    """A local file that is being written."""

    def __init__(self, target: Target, schema: pa.Schema) -> None:
        handle, self.path = tempfile.mkstemp(dir=target.scratch, prefix="out-")
        os.close(handle)
        self.rows = 0
        try:
            self._writer: FileWriter = target.format.open(self.path, schema)
        except BaseException:
            os.unlink(self.path)
            raise

    def write(self, batch: pa.RecordBatch) -> int:
        """Write rows and return the size of the file so far."""
        self._writer.write(batch)
        self.rows += batch.num_rows
        return os.path.getsize(self.path)

    def close(self) -> None:
        self._writer.close()


class FilesWriter(Writer):
    def __init__(self, target: Target, prefix: str, place: str) -> None:
        """`prefix` begins the names; `place` separates equal rows of different places."""
        self._target = target
        self._prefix = prefix
        self._place = place
        self._is_partitioned = bool(target.partitions.columns)
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._buffers: dict[str, list[pa.RecordBatch]] = {}
        self._buffer_bytes: dict[str, int] = {}
        self._gathered_rows = 0
        self._closed = 0
        self._locals: set[str] = set()
        self._stored: list[dict[str, Any] | Future[dict[str, Any]]] = []
        self._pool: ThreadPoolExecutor | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        if not self._is_partitioned:
            self._gather(batch)
            return
        for folder, rows in self._target.partitions.split(batch):
            self._buffer(folder, rows)
        if sum(self._buffer_bytes.values()) > BUFFER_BYTES_MAX:
            self._drain(BUFFER_BYTES_MAX // 2)

    def _gather(self, batch: pa.RecordBatch) -> None:
        """Write groups of rows that do not depend on the size of the batches."""
        bytes_max = min(GROUP_BYTES, self._target.file_bytes_target)
        start = 0
        while start < batch.num_rows:
            rows = batch.slice(start, GROUP_ROWS - self._gathered_rows)
            start += rows.num_rows
            self._gathered_rows += rows.num_rows
            self._buffer("", rows)
            if self._gathered_rows == GROUP_ROWS or self._buffer_bytes[""] >= bytes_max:
                self._gathered_rows = 0
                self._flush("")

    def _buffer(self, folder: str, rows: pa.RecordBatch) -> None:
        self._buffers.setdefault(folder, []).append(rows)
        self._buffer_bytes[folder] = self._buffer_bytes.get(folder, 0) + rows.nbytes

    def prepare(self) -> Committable | None:
        for folder in sorted(self._buffers):
            self._flush(folder)
        for folder in sorted(self._open):
            self._close(folder)
        files = [file.result() if isinstance(file, Future) else file for file in self._stored]
        self._end()
        return {"files": files} if files else None

    def abort(self) -> None:
        for open_file in self._open.values():
            # Closing fails on a full disk; the file is deleted anyway.
            with contextlib.suppress(Exception):
                open_file.close()
        self._end()

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        for path in self._locals:
            if os.path.exists(path):
                os.unlink(path)
        self._locals.clear()
        self._open.clear()
        self._buffers.clear()
        self._buffer_bytes.clear()
        # Stored files stay until `recover`: equal rows have equal names, so a later attempt may
        # have stored the same file.
        self._stored = []

    def _drain(self, down_to_bytes: int) -> None:
        """Write the largest buffers out: few files get many rows."""
        largest = sorted(self._buffers, key=lambda f: (-self._buffer_bytes[f], f))
        rest = sum(self._buffer_bytes.values())
        for folder in largest:
            if rest <= down_to_bytes:
                break
            rest -= self._buffer_bytes[folder]
            self._flush(folder)
        # The remaining rows are slices of written batches: a copy frees those.
        for folder, batches in self._buffers.items():
            self._buffers[folder] = [pa.concat_batches(batches)]

    def _flush(self, folder: str) -> None:
        batches = self._buffers.pop(folder)
        del self._buffer_bytes[folder]
        self._write(folder, batches[0] if len(batches) == 1 else pa.concat_batches(batches))

    def _write(self, folder: str, rows: pa.RecordBatch) -> None:
        file = self._open.get(folder)
        if file is None:
            if len(self._open) >= OPEN_MAX:
                self._close(next(iter(self._open)))
            file = self._open[folder] = _Open(self._target, rows.schema)
            self._locals.add(file.path)
        self._open.move_to_end(folder)
        if file.write(rows) >= self._target.file_bytes_target:
            self._close(folder)

    def _close(self, folder: str) -> None:
        file = self._open[folder]
        file.close()
        del self._open[folder]
        index, self._closed = self._closed, self._closed + 1
        if not self._is_partitioned:
            self._stored.append(self._store(file, folder, index))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="cairn-files")
        self._stored.append(self._pool.submit(self._store, file, folder, index))

    def _store(self, file: _Open, folder: str, index: int) -> dict[str, Any]:
        with open(file.path, "rb") as content:
            found = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16))
        place = f"{self._place}/{folder}/{index}".encode()
        name = f"{self._prefix}-{digest(place, found.digest())}{self._target.format.extension}"
        name = f"{folder}/{name}" if folder else name
        self._target.store.put_file(self._target.stored_as(name), file.path)
        size = os.path.getsize(file.path)
        os.unlink(file.path)
        return {"name": name, "rows": file.rows, "bytes": size}
