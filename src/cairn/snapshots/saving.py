"""Write a savepoint of a committed epoch, whether its job runs or not.

Always true here:
- the epoch is held while it is read, so a running job's collector keeps what is needed;
- nobody else's files are replaced: the destination is empty, and of two who start to write
  there one is refused;
- after an error nothing is left behind, neither the hold nor what was written; after a kill
  the unfinished savepoint says that it is one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
import uuid
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cairn.errors import CommitUnknownError, RestoreError
from cairn.snapshots.columns import GROUP, StateColumns
from cairn.snapshots.holds import held
from cairn.snapshots.reader import EpochReader
from cairn.snapshots.savepoint import (
    SAVEPOINT_PATH,
    UNFINISHED_PATH,
    Progress,
    SavedFile,
    SavedOperator,
    SavedState,
    SavepointInfo,
    StateFile,
    state_folder,
)
from cairn.storage.log import read_job
from cairn.storage.manifest import Epoch, OperatorEntry, seal
from cairn.storage.saved import note_savepoint
from cairn.storage.spark_log import source_files
from cairn.storage.store import NotFoundError, Store, open_store

FILE_ROWS: Final = 1 << 20
FILE_BYTES: Final = 256 << 20
ROW_GROUP_ROWS: Final = 1 << 17
ROW_GROUP_BYTES: Final = 32 << 20
_COPY_BYTES: Final = 4 << 20


def write_savepoint(
    store: Store,
    epoch_number: int | None,
    dest_url: str,
    *,
    spark_store: Store | None = None,
    progress: Progress | None = None,
    scratch: str | None = None,
) -> SavepointInfo:
    """Write the epoch (default: the newest) to an empty folder. Counts key groups.

    `spark_store` has Spark's folder, where that is not the checkpoint.
    """
    savepoint_id = str(uuid.uuid4())
    job = read_job(store)
    if job is None:
        raise RestoreError(
            f"there is no job at {store.url}\n  found: no job.json\n"
            "  next: give the checkpoint= that the job was started with",
            url=store.url,
        )
    with held(store, epoch_number, f"savepoint-{savepoint_id}") as epoch:
        dest = _Destination(open_store(dest_url), savepoint_id, epoch.number)
        try:
            with tempfile.TemporaryDirectory(prefix="cairn-savepoint-", dir=scratch) as folder:
                # First of all: a running query goes on cleaning up behind itself.
                sources = dest.put_sources(source_files(spark_store or store, epoch.spark))
                operators = _write_operators(store, epoch, dest, folder, progress)
            info = SavepointInfo(
                id=savepoint_id,
                job=job.name,
                job_id=job.job_id,
                max_parallelism=job.max_parallelism,
                epoch=epoch.number,
                created_ms=time.time_ns() // 1_000_000,
                now_ms=epoch.now_ms,
                watermarks=epoch.watermarks,
                watermark_ms=epoch.watermark_ms,
                passed_ms=epoch.passed_ms,
                seen_ms=epoch.seen_ms,
                timers=epoch.timers,
                operators=operators,
                batch_id=epoch.spark.batch_id,
                offsets=epoch.spark.offsets,
                sources=epoch.spark.sources,
                source_files=sources,
            )
            dest.finish(info)
        except BaseException:
            dest.undo()
            raise
    note_savepoint(
        store,
        id=info.id,
        url=dest.store.url,
        epoch=info.epoch,
        created_ms=info.created_ms,
        bytes=info.bytes,
    )
    return info


class _Destination:
    """Where the savepoint goes; remembers what was written, to take it back."""

    def __init__(self, store: Store, savepoint_id: str, epoch: int) -> None:
        self.store = store
        self._written: list[str] = []
        there = store.list()
        claim = msgspec.json.encode({"id": savepoint_id, "epoch": epoch})
        if there or not _claimed(store, claim):
            raise _refused(store, [found.path for found in there] or [UNFINISHED_PATH])

    def put_sources(self, sources: dict[str, bytes]) -> list[SavedFile]:
        found = []
        for name, data in sorted(sources.items()):
            path = f"sources/{name}"
            self._written.append(path)
            self.store.put(path, data)
            digest = hashlib.blake2b(data, digest_size=16).hexdigest()
            found.append(SavedFile(path=path, bytes=len(data), digest=digest))
        return found

    def put_file(self, path: str, local_file: str) -> SavedFile:
        digest = hashlib.blake2b(digest_size=16)
        with open(local_file, "rb", buffering=0) as source:
            while data := source.read(_COPY_BYTES):
                digest.update(data)
        self._written.append(path)
        self.store.put_file(path, local_file)
        size = os.path.getsize(local_file)
        return SavedFile(path=path, bytes=size, digest=digest.hexdigest())

    def finish(self, info: SavepointInfo) -> None:
        self._written.append(SAVEPOINT_PATH)
        self.store.put(SAVEPOINT_PATH, seal(info))
        # From here on it stands, whatever happens to the claim.
        self._written.clear()
        with contextlib.suppress(Exception):
            self.store.delete([UNFINISHED_PATH])

    def undo(self) -> None:
        # savepoint.json first, and the claim last: what is half removed must not look whole.
        with contextlib.suppress(Exception):
            for path in reversed(self._written):
                self.store.delete([path])
            self.store.delete([UNFINISHED_PATH])


def _claimed(store: Store, claim: bytes) -> bool:
    try:
        return store.put_if_absent(UNFINISHED_PATH, claim)
    except CommitUnknownError:
        try:
            return store.get(UNFINISHED_PATH) == claim
        except NotFoundError:
            pass
        raise


def _refused(store: Store, there: list[str]) -> RestoreError:
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


def _write_operators(
    store: Store, epoch: Epoch, dest: _Destination, folder: str, progress: Progress | None
) -> dict[str, SavedOperator]:
    operators = {}
    total = sum(_group_count(entry) for entry in epoch.operators.values())
    done = 0
    with EpochReader(store, epoch, folder) as reader:
        for uid, entry in epoch.operators.items():
            columns = reader.columns(uid)
            writers = {name: _StateWriter(dest, uid, columns[name], folder) for name in columns}
            for chunk in reader.chunks(uid):
                for name, batches in chunk.rows.items():
                    for batch in batches:
                        writers[name].write(batch)
                if progress is not None:
                    progress(done + chunk.groups.stop, total)
            done += _group_count(entry)
            operators[uid] = SavedOperator(
                uid=uid,
                function_version=entry.function_version,
                key_types=entry.key_types,
                states={name: writer.finish() for name, writer in writers.items()},
                scope=entry.scope,
                parallelism=len(entry.ranges),
            )
    if progress is not None:
        progress(total, total)
    return operators


def _group_count(entry: OperatorEntry) -> int:
    return sum(part.group_count for part in entry.ranges)


class _StateWriter:
    """The Parquet files of one state. A key group is never split between files."""

    def __init__(self, dest: _Destination, uid: str, columns: StateColumns, folder: str) -> None:
        self._dest = dest
        self._folder = folder
        self._columns = columns
        self._path = state_folder(uid, columns.name)
        self._files: list[StateFile] = []
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = self._pending_bytes = 0
        self._writer: Any = None
        self._begin_file()

    def _begin_file(self) -> None:
        self._rows = self._bytes = 0
        self._first_group: int | None = None
        self._last_group = -1

    def write(self, batch: pa.RecordBatch) -> None:
        groups = batch[GROUP]
        is_full = (
            self._rows + self._pending_rows >= FILE_ROWS
            or self._bytes + self._pending_bytes >= FILE_BYTES
        )
        if is_full and groups[0].as_py() != self._last_group:
            self._end_file()
        if self._first_group is None:
            self._first_group = groups[0].as_py()
        self._last_group = groups[-1].as_py()
        self._pending.append(self._columns.to_parquet(batch))
        self._pending_rows += batch.num_rows
        self._pending_bytes += batch.nbytes
        if self._pending_rows >= ROW_GROUP_ROWS or self._pending_bytes >= ROW_GROUP_BYTES:
            self._end_row_group()

    def finish(self) -> SavedState:
        self._end_file()
        decl = self._columns.decl
        return SavedState(
            kind=decl.kind,
            type=decl.type,
            entry_type=decl.entry_type,
            rows=sum(file.rows for file in self._files),
            files=self._files,
            ttl=decl.ttl,
        )

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
        path = f"{self._path}/{len(self._files):05d}.parquet"
        saved = self._dest.put_file(path, self._local)
        os.unlink(self._local)
        assert self._first_group is not None
        self._files.append(
            StateFile(
                path=saved.path,
                bytes=saved.bytes,
                digest=saved.digest,
                rows=self._rows,
                first_group=self._first_group,
                last_group=self._last_group,
            )
        )
        self._begin_file()
