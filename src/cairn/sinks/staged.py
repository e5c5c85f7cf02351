"""Staged rows: kept in the checkpoint until the driver has published them.

    <checkpoint>/wal/<job>/<sink>/staged/<epoch>-<batch>-<round>-<subtask>-<index>-<digest>.parquet
    <checkpoint>/wal/<job>/<sink>/published/<epoch>-<batch>

For targets in which slots cannot prepare anything. The slots write their rows into the
checkpoint's own store. After the commit the driver reads them from there and publishes them,
in order of batch, round and subtask; then it writes a mark and deletes the files.

Always true here:
- a file is named by its place and its content, so an attempt that runs again cannot change a
  file, and a damaged file is noticed before its rows are published;
- nothing is published unless every file that the commit names exists;
- the mark is written after the rows are published, and the files are deleted after that: after
  a crash in between, rows are published again, never lost;
- the newest marks are kept, so everything older than the oldest of them was published.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cairn.crash import crash_point
from cairn.errors import CommitError, CorruptFileError
from cairn.ids import content_id
from cairn.sinks.base import Committable, Execution, Sink, SinkContext, Writer
from cairn.storage.paths import WAL_FOLDER
from cairn.storage.store import NotFoundError, Store, open_store

FILE_BYTES_TARGET: Final = 32 << 20
MARKS_KEPT: Final = 100
"""Marks that stay when old ones are removed, which happens at twice this number."""
GROUP_ROWS: Final = 65_536


class StagedFile(msgspec.Struct, frozen=True):
    """Some rows of an epoch, in the checkpoint."""

    name: str
    rows: int
    bytes: int


class PublishedEpoch(int):
    """The number of an epoch, with a key that no other publication has.

    The number is enough for a target when an epoch is published as a whole. A job that
    publishes before it commits (at-least-once, at-most-once) publishes each batch of an epoch
    by itself: they share the number and differ in `batch`. `key` combines job, sink, epoch and
    batch: it is equal if and only if the same rows come again, so a target can reject a
    repetition by it.
    """

    batch: int
    key: str

    def __new__(cls, epoch: int, batch: int, key: str) -> PublishedEpoch:
        self = super().__new__(cls, epoch)
        self.batch = batch
        self.key = key
        return self

    def __reduce__(self) -> Any:
        return PublishedEpoch, (int(self), self.batch, self.key)


class Staged(Sink):
    """A sink whose rows are staged in the checkpoint. Subclasses publish them."""

    driver_only: ClassVar[frozenset[str]] = frozenset()
    """Attributes that are not sent to the slots: functions, and those with secrets."""

    home: str
    marked: tuple[int, int]
    """The newest epoch and batch with a mark, as of the last call of `publish`."""
    _store: Store

    def open(self, context: SinkContext) -> None:
        super().open(context)
        assert context.checkpoint, "rows cannot be staged without a checkpoint"
        self._store = open_store(context.checkpoint)
        self.home = f"{WAL_FOLDER}/{context.job_id}/{context.uid}"
        self.marked = (-1, -1)

    def __getstate__(self) -> dict[str, Any]:
        handles = {"context", "_store", "home", "marked"} | self.driver_only
        return {name: value for name, value in vars(self).items() if name not in handles}

    @abstractmethod
    def publish(self, epoch: PublishedEpoch, files: Sequence[StagedFile]) -> None:
        """Make the rows of these files visible. Called again after any failure.

        Once it has returned and the mark is written it is not called again, except by a driver
        that looked for the mark earlier and has not noticed yet that another one leads.
        """

    # In a slot

    def writer(self, epoch: int, subtask: int, execution: Execution) -> Writer:
        place = f"{execution.batch:07d}-{execution.round:07d}-{subtask:05d}"
        return StagedWriter(self, f"{epoch:012d}-{place}")

    def encode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows in the form to stage; subclasses do work of `publish` here."""
        return batch

    def stage(self, name: str, data: bytes) -> None:
        self._store.put(self.staging_path(name), data)

    # In the driver

    def commit(self, epoch: int, committables: Sequence[Committable], batch: int = 0) -> None:
        files = [StagedFile(**file) for found in committables for file in found["files"]]
        if not files:
            return
        files.sort(key=lambda file: file.name)
        there = {found.path for found in self._store.list(self.home)}
        marks = sorted(path for path in there if path.startswith(self._mark_path("")))
        mark = self._mark_path(f"{epoch:012d}-{batch:05d}")
        if mark not in marks and not (len(marks) >= MARKS_KEPT and mark < marks[0]):
            for file in files:
                if self.staging_path(file.name) not in there:
                    raise self._missing_error(file)
            if marks:
                newest_epoch, _, newest_batch = marks[-1].rpartition("/")[2].partition("-")
                self.marked = int(newest_epoch), int(newest_batch)
            key = f"{self.context.job_id}/{self.context.uid}/{epoch}/{batch}"
            self.publish(PublishedEpoch(epoch, batch, key), files)
            crash_point("driver.sink.unmarked")
            self._store.put(mark, msgspec.json.encode({"rows": sum(f.rows for f in files)}))
            if len(marks) >= 2 * MARKS_KEPT:
                self._store.delete(marks[: 1 - MARKS_KEPT])
        # Also leftovers of failed attempts and abandoned publications of earlier epochs: all of
        # those are settled by now.
        older = {path for path in there if self.staging_path("") < path < self._end(epoch)}
        self._store.delete(older | {self.staging_path(file.name) for file in files})

    def newest_mark(self) -> int | None:
        marks = self._store.list(self._mark_path(""))
        return int(marks[-1].path.rpartition("/")[2].partition("-")[0]) if marks else None

    def recover(self, before_epoch: int) -> None:
        staged = self._store.list(self.staging_path(""))
        self._store.delete([found.path for found in staged if found.path < self._end(before_epoch)])

    def batches(self, file: StagedFile) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file, after checking it."""
        parquet = pq.ParquetFile(pa.BufferReader(self._read_file(file)))
        yield from parquet.iter_batches(batch_size=GROUP_ROWS)

    def staging_path(self, name: str) -> str:
        return f"{self.home}/staged/{name}"

    def _end(self, epoch: int) -> str:
        """Return a path above all files of earlier epochs: names sort by epoch."""
        return self.staging_path(f"{epoch:012d}")

    def _mark_path(self, name: str) -> str:
        return f"{self.home}/published/{name}"

    def _read_file(self, file: StagedFile) -> bytes:
        try:
            data = self._store.get(self.staging_path(file.name))
        except NotFoundError:
            raise self._missing_error(file) from None
        check_content(file.name, data, self._store.url, self.staging_path(file.name))
        return data

    def _missing_error(self, file: StagedFile) -> CommitError:
        path = f"{self._store.url}/{self.staging_path(file.name)}"
        return CommitError(
            f"sink {self.context.uid!r}: staged rows are missing, so nothing is published\n"
            f"  expected: {path}\n"
            "  next: if another driver runs this job, it has removed them and this one will stop; "
            "otherwise restore the file",
            sink=self.context.uid,
            file=path,
        )


def check_content(name: str, data: bytes, url: str, path: str) -> None:
    """Raise CorruptFileError if the content does not match the digest in the name."""
    found = content_id(data)
    expected = name.rpartition("-")[2].removesuffix(".parquet")
    if found != expected:
        raise CorruptFileError(
            f"staged rows are damaged\n  file: {url}/{path}\n"
            f"  expected: content with the digest {expected}\n  found: {found}\n"
            "  next: restore the file from a backup",
            file=f"{url}/{path}",
        )


class StagedWriter(Writer):
    """Encodes rows in memory, then stages them as whole files under their digest.

    Row groups have a fixed number of rows, whatever the size of the batches: equal rows make
    equal files. Except wide rows: when a group would exceed the size of a file, it ends with the
    batch that reaches it.
    """

    def __init__(self, sink: Staged, prefix: str) -> None:
        self._sink = sink
        self._prefix = prefix
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._buffer: Any = None
        self._writer: pq.ParquetWriter | None = None
        self._rows = 0
        self._files: list[StagedFile] = []

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        batch = self._sink.encode(batch)
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        if self._waiting_rows >= GROUP_ROWS:
            self._write_groups()
        elif self._waiting_bytes >= FILE_BYTES_TARGET:
            self._write_groups(all_rows=True)

    def prepare(self) -> Committable | None:
        self._write_groups(all_rows=True)
        if self._writer is not None:
            self._stage()
        return {"files": msgspec.to_builtins(self._files)} if self._files else None

    def abort(self) -> None:
        # Staged files stay until `recover`: equal rows have equal names, so a later attempt may
        # have staged the same file.
        self._waiting, self._files = [], []
        self._buffer = self._writer = None

    def _write_groups(self, *, all_rows: bool = False) -> None:
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting)
        while table.num_rows >= GROUP_ROWS or (all_rows and table.num_rows):
            group = table.slice(0, GROUP_ROWS).combine_chunks()
            table = table.slice(GROUP_ROWS)
            if self._writer is None:
                self._buffer = pa.BufferOutputStream()
                # Written once, read once: dictionaries cost three times more than they save, and
                # statistics an eighth of the time for writing.
                self._writer = pq.ParquetWriter(
                    self._buffer,
                    table.schema,
                    compression="lz4",
                    use_dictionary=False,
                    write_statistics=False,
                )
            self._writer.write_table(group)
            self._rows += group.num_rows
            if self._buffer.tell() >= FILE_BYTES_TARGET:
                self._stage()
        self._waiting = table.to_batches()
        self._waiting_rows, self._waiting_bytes = table.num_rows, table.nbytes

    def _stage(self) -> None:
        assert self._writer is not None
        self._writer.close()
        data = self._buffer.getvalue().to_pybytes()
        name = f"{self._prefix}-{len(self._files):05d}-{content_id(data)}.parquet"
        self._sink.stage(name, data)
        self._files.append(StagedFile(name, self._rows, len(data)))
        self._buffer, self._writer, self._rows = None, None, 0
