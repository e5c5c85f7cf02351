"""Write a savepoint of a committed epoch, whether its job runs or not.

Always true here:
- an epoch whose output may not be published yet is refused;
- the epoch is held while it is read, so a running job's collector keeps its files; a writer that
  is killed holds it for at most SAVE_MS;
- a writer that slept past the end of its hold, and whose epoch is retired, does not finish;
- after an error neither the hold nor written files are left.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable
from typing import Final

from cairn.errors import CorruptFileError, RestoreError
from cairn.snapshots.destination import Destination, StateWriter
from cairn.snapshots.holds import Reading
from cairn.snapshots.published import check_published
from cairn.snapshots.reader import EpochReader
from cairn.snapshots.savepoint import Progress, SavedOperator, SavepointInfo, make_saved_state
from cairn.storage.log import Log, read_job
from cairn.storage.manifest import EpochOperator, JobInfo
from cairn.storage.notes import SavepointNote, write_savepoint_note
from cairn.storage.source_logs import source_files
from cairn.storage.store import NotFoundError, Store, open_store

SAVE_MS: Final = 30 * 60_000
"""Lifetime of the hold of a savepoint that is being written, unless it is renewed."""


def write_savepoint(
    store: Store,
    epoch_number: int | None,
    dest_url: str,
    *,
    spark_store: Store | None = None,
    progress: Progress | None = None,
    scratch: str | None = None,
    note: bool = True,
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> SavepointInfo:
    """Write an epoch (default: the newest) to an empty folder.

    `spark_store` has Spark's folder, if it is not in the checkpoint. `progress` counts key
    groups. With `note`, the checkpoint gets a note of the savepoint.
    """
    savepoint_id = str(uuid.uuid4())
    job = read_job(store)
    if job is None:
        raise RestoreError(
            f"no job at {store.url}\n  found: no job.json\n"
            "  next: give the checkpoint= that the job was started with",
            url=store.url,
        )
    reading = Reading(store, epoch_number, SAVE_MS, now_ms=now_ms)
    try:
        info, url = _write(
            reading, store, job, savepoint_id, dest_url, spark_store, progress, scratch
        )
    except (CorruptFileError, NotFoundError):
        reading.check_kept()
        raise
    finally:
        reading.release()
    if note:
        note_written(store, info, url)
    return info


def _write(
    reading: Reading,
    store: Store,
    job: JobInfo,
    savepoint_id: str,
    dest_url: str,
    spark_store: Store | None,
    progress: Progress | None,
    scratch: str | None,
) -> tuple[SavepointInfo, str]:
    """Write the savepoint of a held epoch; return its content and url."""
    epoch = reading.epoch
    check_published(Log(store), epoch)
    dest = Destination(open_store(dest_url), savepoint_id, epoch.number)
    try:
        with tempfile.TemporaryDirectory(prefix="cairn-savepoint-", dir=scratch) as folder:
            # First of all: a running query keeps removing its old files.
            files = source_files(spark_store or store, epoch.spark, checkpoint=store)
            sources = dest.put_sources(files)
            operators = _write_operators(store, reading, dest, folder, progress)
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
        reading.renew()
        dest.finish(info)
    except BaseException:
        dest.undo()
        raise
    return info, dest.store.url


def note_written(store: Store, info: SavepointInfo, url: str) -> None:
    """Note a savepoint in the checkpoint that it was made from."""
    write_savepoint_note(
        store,
        SavepointNote(
            id=info.id, url=url, epoch=info.epoch, created_ms=info.created_ms, bytes=info.bytes
        ),
    )


def _write_operators(
    store: Store, reading: Reading, dest: Destination, folder: str, progress: Progress | None
) -> dict[str, SavedOperator]:
    operators = {}
    epoch = reading.epoch
    total = sum(_group_count(operator) for operator in epoch.operators.values())
    done = 0
    with EpochReader(store, epoch, folder) as reader:
        for uid, operator in epoch.operators.items():
            columns = reader.columns(uid)
            writers = {
                name: StateWriter(dest.put_file, uid, columns[name], folder) for name in columns
            }
            for chunk in reader.chunks(uid):
                reading.renew()
                for name, batches in chunk.rows.items():
                    for batch in batches:
                        writers[name].write(batch)
                if progress is not None:
                    progress(done + chunk.groups.stop, total)
            done += _group_count(operator)
            operators[uid] = SavedOperator(
                uid=uid,
                function_version=operator.function_version,
                key_types=operator.key_types,
                states={
                    name: make_saved_state(operator.states[name], writer.finish())
                    for name, writer in writers.items()
                },
                scope=operator.scope,
                parallelism=len(operator.ranges),
            )
    if progress is not None:
        progress(total, total)
    return operators


def _group_count(operator: EpochOperator) -> int:
    return sum(part.group_count for part in operator.ranges)
