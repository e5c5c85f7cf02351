"""Rows that ride in the epoch: kept in the checkpoint until the driver has published them.

    <checkpoint>/wal/<job>/<sink>/staged/<epoch>-<batch>-<round>-<subtask>-<index>-<digest>.parquet
    <checkpoint>/wal/<job>/<sink>/published/<epoch>-<batch>

For targets that slots cannot prepare anything in. The slots write their rows into the
checkpoint's own store. After the commit the driver reads them from there and publishes them,
in order of batch, round and subtask; then it writes a mark and removes the files.

Always true here:
- a file is named by its place and its content, so an attempt that runs again cannot change one,
  and a damaged one is noticed before its rows are published;
- nothing is published unless every file that the commit names is there;
- a mark is written after the rows are published, and the files go after that: a crash between
  leaves rows to be published again, never rows that nobody published;
- the newest marks are kept, so what is older than the oldest of them was published.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cairn.crash import crash_point
from cairn.errors import CommitError, CorruptFileError
from cairn.sinks.base import Committable, Execution, Sink, SinkContext, Writer
from cairn.storage.store import NotFoundError, Store, open_store
from cairn.storage.wal import WAL_FOLDER

FILE_BYTES_TARGET: Final = 32 << 20
MARKS_KEPT: Final = 100
"""Old marks are removed down to this many, when there are twice as many."""
GROUP_ROWS: Final = 65_536


class StagedFile(msgspec.Struct, frozen=True):
    """Some rows of an epoch, in the checkpoint."""

    name: str
    rows: int
    bytes: int


class PublishedEpoch(int):
    """The number of an epoch, with what makes its publication unlike any other.

    A number, because that is all a target needs when an epoch is published as a whole. A job
    that publishes before it commits (at-least-once, at-most-once) publishes each batch of an
    epoch by itself: they share the number and differ in `batch`. `key` has all of it in
    one string, equal when the same rows come again and never otherwise, also for other jobs
    and sinks: what a target needs to reject a repetition.
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
    """A sink whose rows ride in the epoch. Subclasses say how they are published."""

    driver_only: ClassVar[frozenset[str]] = frozenset()
    """Attributes that do not travel to the slots: functions, and what holds secrets."""

    home: str
    marked: tuple[int, int]
    """The newest epoch and batch with a mark, as of the last call of `publish`."""
    _store: Store

    def open(self, context: SinkContext) -> None:
        super().open(context)
        assert context.checkpoint, "rows cannot ride in an epoch without a checkpoint"
        self._store = open_store(context.checkpoint)
        self.home = f"{WAL_FOLDER}/{context.job_id}/{context.uid}"
        self.marked = (-1, -1)

    def __getstate__(self) -> dict[str, Any]:
        handles = {"context", "_store", "home", "marked"} | self.driver_only
        return {name: value for name, value in vars(self).items() if name not in handles}

    @abstractmethod
    def publish(self, epoch: PublishedEpoch, files: Sequence[StagedFile]) -> None:
        """Make the rows of these files visible. Called again after any failure.

        Once it has returned and the mark is written it is not called again, but by a driver
        that looked for the mark before and has not noticed yet that another one leads.
        """

    # In a slot

    def writer(self, epoch: int, subtask: int, execution: Execution) -> Writer:
        place = f"{execution.batch:07d}-{execution.round:07d}-{subtask:05d}"
        return StagedWriter(self, f"{epoch:012d}-{place}")

    def encoded(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows as they are to be kept; unlike those of the stream where that saves work."""
        return batch

    def stage(self, name: str, data: bytes) -> None:
        self._store.put(self.staged_path(name), data)

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
                if self.staged_path(file.name) not in there:
                    raise self._gone(file)
            if marks:
                newest_epoch, _, newest_batch = marks[-1].rpartition("/")[2].partition("-")
                self.marked = int(newest_epoch), int(newest_batch)
            key = f"{self.context.job_id}/{self.context.uid}/{epoch}/{batch}"
            self.publish(PublishedEpoch(epoch, batch, key), files)
            crash_point("driver.sink.unmarked")
            self._store.put(mark, msgspec.json.encode({"rows": sum(f.rows for f in files)}))
            if len(marks) >= 2 * MARKS_KEPT:
                self._store.delete(marks[: 1 - MARKS_KEPT])
        # And of earlier epochs, what a failed attempt or an abandoned publication has left: nobody
        # comes to an epoch before those in front of it are settled.
        older = {path for path in there if self.staged_path("") < path < self._end(epoch)}
        self._store.delete(older | {self.staged_path(file.name) for file in files})

    def newest_mark(self) -> int | None:
        marks = self._store.list(self._mark_path(""))
        return int(marks[-1].path.rpartition("/")[2].partition("-")[0]) if marks else None

    def recover(self, before_epoch: int) -> None:
        staged = self._store.list(self.staged_path(""))
        self._store.delete([found.path for found in staged if found.path < self._end(before_epoch)])

    def batches(self, file: StagedFile) -> Iterator[pa.RecordBatch]:
        """The rows of a file, checked first."""
        parquet = pq.ParquetFile(pa.BufferReader(self._checked(file)))
        yield from parquet.iter_batches(batch_size=GROUP_ROWS)

    def staged_path(self, name: str) -> str:
        return f"{self.home}/staged/{name}"

    def _end(self, epoch: int) -> str:
        """Names sort by epoch: those of earlier ones compare lower than this."""
        return self.staged_path(f"{epoch:012d}")

    def _mark_path(self, name: str) -> str:
        return f"{self.home}/published/{name}"

    def _checked(self, file: StagedFile) -> bytes:
        try:
            data = self._store.get(self.staged_path(file.name))
        except NotFoundError:
            raise self._gone(file) from None
        check_content(file.name, data, self._store.url, self.staged_path(file.name))
        return data

    def _gone(self, file: StagedFile) -> CommitError:
        path = f"{self._store.url}/{self.staged_path(file.name)}"
        return CommitError(
            f"sink {self.context.uid!r}: rows to be published are gone, so nothing is published\n"
            f"  expected: {path}\n"
            "  next: if another driver runs this job, it has removed them and this one will stop; "
            "otherwise put the file back",
            sink=self.context.uid,
            file=path,
        )


def check_content(name: str, data: bytes, url: str, path: str) -> None:
    """CorruptFileError unless the content is that of the name."""
    found = _digest(data)
    expected = name.rpartition("-")[2].removesuffix(".parquet")
    if found != expected:
        raise CorruptFileError(
            f"rows to be published are damaged\n  file: {url}/{path}\n"
            f"  expected: content with the digest {expected}\n  found: {found}\n"
            "  next: put the file back as it was",
            file=f"{url}/{path}",
        )


class StagedWriter(Writer):
    """Encodes rows in memory, then stages them as whole files under their digest.

    Row groups are cut by number, not where batches end: equal rows make equal files. But for wide
    rows, of which a group would take more memory than a file has: those are cut where the
    batch ends that reaches it.
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
        batch = self._sink.encoded(batch)
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
        # What is staged stays until `recover`: equal files have equal names, so by now it may
        # be the work of the attempt that came after this one.
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
                # Written once, read once: dictionaries cost three times what they save.
                self._writer = pq.ParquetWriter(
                    self._buffer, table.schema, compression="lz4", use_dictionary=False
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
        name = f"{self._prefix}-{len(self._files):05d}-{_digest(data)}.parquet"
        self._sink.stage(name, data)
        self._files.append(StagedFile(name, self._rows, len(data)))
        self._buffer, self._writer, self._rows = None, None, 0


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
