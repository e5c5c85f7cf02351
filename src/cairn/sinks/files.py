"""Files: Parquet in a folder, staged by the slots, published by the driver.

    <folder>/part-<epoch>-<subtask>-<digest>.parquet     published
    <folder>/_cairn/<job>/<sink>/staged/                 durable, invisible (Spark skips `_` names)
    <folder>/_cairn/<job>/<sink>/epochs/<epoch>.json     the list of an epoch's files

Publishing moves the staged files into the folder and then writes the epoch's list.
A plain reader of the folder sees only published files; one who reads by the lists sees
whole epochs only.

Always true here:
- a file is named by its sink, its place and its content, so an attempt that runs again
  cannot change one, and no file takes the place of another;
- the list of an epoch is written once all its files are in place, and proves the commit.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cairn.crash import crash_point
from cairn.errors import PlanError
from cairn.ids import digest
from cairn.sinks.base import Committable, Sink, SinkContext, Writer, round_of
from cairn.storage.store import Store, open_store


class Files(Sink):
    """Parquet files in a local folder or an object store, each row exactly once."""

    def __init__(
        self,
        path: str,
        *,
        compression: str = "snappy",
        file_bytes_target: int = 128 * 1024 * 1024,
    ) -> None:
        self.path = str(path) if "://" in str(path) else os.path.abspath(path)
        if compression not in ("snappy", "zstd", "gzip", "lz4", "none"):
            raise PlanError(f"unknown compression {compression!r}")
        self.compression = compression
        self.file_bytes_target = file_bytes_target

    def open(self, context: SinkContext) -> None:
        super().open(context)
        self._store = open_store(self.path)
        self.home = f"_cairn/{context.job_id}/{context.uid}"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("context", "_store", "home")}

    def staged(self, name: str) -> str:
        return f"{self.home}/staged/{name}"

    def _list_path(self, epoch: int) -> str:
        return f"{self.home}/epochs/{epoch:012d}.json"

    def writer(self, epoch: int, subtask: int, attempt: int) -> Writer:
        return FilesWriter(self, self._store, f"part-{epoch:012d}-{subtask:05d}", round_of(attempt))

    def commit(self, epoch: int, committables: Sequence[Committable], part: int = 0) -> None:
        files = [file for committable in committables for file in committable["files"]]
        if not files or self._store.exists(self._list_path(epoch)):
            return
        for file in files:
            self._store.move(self.staged(file["name"]), file["name"])
            crash_point("driver.sink.piece")
        crash_point("driver.sink.unmarked")
        self._store.put(self._list_path(epoch), msgspec.json.encode({"files": files}))

    def recover(self, before_epoch: int) -> None:
        # Names sort by epoch, so those of earlier ones compare lower.
        end = self.staged(f"part-{before_epoch:012d}")
        staged = self._store.list(f"{self.home}/staged/")
        self._store.delete(found.path for found in staged if found.path < end)


class FilesWriter(Writer):
    """Writes to local scratch, then stages whole files under their digest."""

    def __init__(self, sink: Files, store: Store, prefix: str, round_index: int) -> None:
        self._sink = sink
        self._store = store
        self._prefix = prefix
        self._round_index = round_index
        self._local: str | None = None
        self._writer: pq.ParquetWriter | None = None
        self._rows = 0
        self._files: list[dict[str, Any]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        if self._writer is None:
            handle, self._local = tempfile.mkstemp(dir=self._sink.context.scratch, prefix="out-")
            os.close(handle)
            self._writer = pq.ParquetWriter(
                self._local, batch.schema, compression=self._sink.compression
            )
        self._writer.write_batch(batch)
        self._rows += batch.num_rows
        assert self._local is not None
        if os.path.getsize(self._local) >= self._sink.file_bytes_target:
            self._stage()

    def _stage(self) -> None:
        assert self._writer is not None and self._local is not None
        self._writer.close()
        with open(self._local, "rb") as file:
            content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        # Equal rows of another sink into this folder, in the next file, or in the next round
        # of a loop, are other rows.
        place = f"{self._sink.home}/{self._round_index}/{len(self._files)}".encode()
        name = f"{self._prefix}-{digest(place, content.digest())}.parquet"
        self._store.put_file(self._sink.staged(name), self._local)
        size = os.path.getsize(self._local)
        self._files.append({"name": name, "rows": self._rows, "bytes": size})
        self._forget_local()

    def _forget_local(self) -> None:
        if self._local is not None:
            os.unlink(self._local)
        self._local, self._writer, self._rows = None, None, 0

    def prepare(self) -> Committable | None:
        if self._writer is not None:
            self._stage()
        return {"files": self._files} if self._files else None

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._forget_local()
        # What is staged stays until `recover`: equal rows have equal names, so by now it may
        # be the work of the attempt that came after this one.
        self._files = []
