"""Make a savepoint the first epoch of an empty checkpoint.

Each operator gets one base per subtask, at any parallelism, and one for state that all subtasks
share; rows go from Parquet to segments as Arrow columns, a few thousand at a time.

Always true here:
- every row of the savepoint is in exactly one base, that of the subtask that owns its group;
- bytes are checked before they are read, so a damaged savepoint is an error, never an epoch;
- nothing is published: the caller appends the epoch to the log.
"""

from __future__ import annotations

import tempfile
import time
from typing import NamedTuple

import msgspec

from cairn.errors import CorruptFileError, KeyGroupCountError, RestoreError
from cairn.ids import new_id
from cairn.key_groups import groups_of
from cairn.snapshots.savepoint import CheckedFiles, Progress, SavedOperator, Savepoint
from cairn.storage.files import SegmentWriter
from cairn.storage.log import Log, create_or_open_job
from cairn.storage.manifest import (
    EMPTY_VERSION,
    Ancestor,
    Epoch,
    EpochOperator,
    JobInfo,
    RangeState,
    SparkPosition,
    next_version,
    state_measured,
)
from cairn.storage.pack import write_segment_file
from cairn.storage.source_logs import log_of_files
from cairn.storage.store import Store


def open_job(store: Store, name: str, group_count: int, savepoint: Savepoint | None) -> JobInfo:
    """Return the job of a checkpoint; in an empty one, create it to start from `savepoint`.

    A checkpoint that was made from this savepoint continues where it is, so that a program can be
    started again unchanged; any other with epochs is refused.
    """
    if savepoint is None:
        return create_or_open_job(store, name, group_count)
    info = savepoint.info
    if info.max_parallelism != group_count:
        raise KeyGroupCountError(
            f"cannot start job {name!r} from this savepoint\n"
            f"  it has max_parallelism={info.max_parallelism}, the job declares {group_count}\n"
            f"  savepoint: {savepoint.url}\n"
            f"  next: declare max_parallelism={info.max_parallelism}, or write a savepoint with "
            f"another: SavepointWriter.of(spark, ...).max_parallelism({group_count}).write(...)",
            expected=group_count,
            found=info.max_parallelism,
        )
    ancestor = Ancestor(kind="savepoint", id=info.id, url=savepoint.url, epoch=info.epoch)
    job = create_or_open_job(store, name, group_count, ancestor=ancestor)
    came_from = None if job.ancestor is None else job.ancestor.id
    newest = Log(store).newest_epoch()
    if newest is not None and came_from != info.id:
        raise RestoreError(
            f"this checkpoint has epochs of its own; a savepoint needs an empty one\n"
            f"  checkpoint: {store.url}, newest epoch {newest.number}\n"
            f"  savepoint: {savepoint.url}\n"
            "  next: pass another checkpoint, or leave savepoint= out to continue with this one",
            epoch=newest.number,
        )
    return job


def load_savepoint(
    savepoint: Savepoint,
    store: Store,
    *,
    number: int,
    term: int,
    parallelism: int,
    spark_folder: str,
    wall_ms: int | None = None,
    scratch: str | None = None,
    progress: Progress | None = None,
) -> Epoch:
    """Write the bases of a savepoint, and return the epoch to publish under this number.

    `spark_folder` is where the caller lays out Spark's folder, from the epoch's offsets and
    from `savepoint.source_files()`. `progress` counts key groups.
    """
    info = savepoint.info
    total = info.max_parallelism * len(info.operators)
    done = 0
    operators = {}
    with CheckedFiles(savepoint.store, scratch) as files:
        loading = _Loading(savepoint, files, store, number, term, scratch)
        for uid, saved in info.operators.items():
            ranges = []
            for groups in _ranges(saved, parallelism, info.max_parallelism):
                ranges.append(loading.write_base(saved, groups))
                done += len(groups)
                if progress is not None:
                    progress(done, total)
            _check_complete(savepoint, saved, ranges)
            operators[uid] = EpochOperator(
                uid=uid,
                function_version=saved.function_version,
                key_types=saved.key_types,
                states={name: state.decl for name, state in saved.states.items()},
                parallelism=len(ranges) if saved.scope == "subtask" else parallelism,
                ranges=ranges,
                scope=saved.scope,
            )
    return Epoch(
        number=number,
        parent=None,
        term=term,
        nonce=new_id(),
        wall_ms=time.time_ns() // 1_000_000 if wall_ms is None else wall_ms,
        now_ms=info.now_ms,
        watermarks=info.watermarks,
        watermark_ms=info.watermark_ms,
        passed_ms=info.passed_ms,
        seen_ms=info.seen_ms,
        timers=info.timers,
        spark=_position(savepoint, store, term, spark_folder),
        operators=operators,
        metrics=state_measured(operators),
    )


def _position(savepoint: Savepoint, store: Store, term: int, folder: str) -> SparkPosition:
    info = savepoint.info
    position = SparkPosition(
        folder=folder, batch_id=info.batch_id, offsets=info.offsets, sources=info.sources
    )
    logs = log_of_files(savepoint.source_files(), position, checkpoint=store, term=term)
    return msgspec.structs.replace(position, logs=logs)


def _ranges(saved: SavedOperator, parallelism: int, group_count: int) -> list[range]:
    """Return the key groups of each base of an operator."""
    if saved.scope == "shared":
        parallelism = 1
    elif saved.scope == "subtask":
        # Lists stay with their subtasks; a job that runs with others redistributes them.
        parallelism = saved.parallelism
    return [groups_of(subtask, parallelism, group_count) for subtask in range(parallelism)]


class _Loading(NamedTuple):
    savepoint: Savepoint
    files: CheckedFiles
    store: Store
    number: int
    term: int
    scratch: str | None

    def write_base(self, saved: SavedOperator, groups: range) -> RangeState:
        """Write the state of an operator in these key groups as one base."""
        columns = self.savepoint.columns(saved.uid)
        with tempfile.NamedTemporaryFile(dir=self.scratch, prefix="base-") as file:
            writer = SegmentWriter(file, "base", saved.uid, first_epoch=0, last_epoch=self.number)
            for name, state in sorted(saved.states.items()):
                writer.begin_state(name, columns[name].stored_schema)
                for batch in self.savepoint.read(self.files, saved.uid, name, groups):
                    writer.write(columns[name].to_stored(batch))
                for state_file in state.files:
                    if state_file.last_group < groups.stop:
                        self.files.release(state_file)
            written = writer.finish()
            file.flush()
            refs = []
            if written.rows:
                stored = write_segment_file(self.store, written, file.name, self.term)
                refs = [stored.list_for(groups, first_epoch=self.number, last_epoch=self.number)]
        return RangeState(
            first_group=groups.start,
            group_count=len(groups),
            version=next_version(EMPTY_VERSION, written.id) if refs else EMPTY_VERSION,
            files=refs,
            state_keys=None if written.rows else 0,
            state_entries=written.rows,
            state_bytes=sum(ref.length for ref in refs),
        )


def _check_complete(savepoint: Savepoint, saved: SavedOperator, ranges: list[RangeState]) -> None:
    """Raise if rows are missing, because no subtask owns their key groups."""
    expected = sum(state.rows for state in saved.states.values())
    found = sum(part.state_entries for part in ranges)
    if found != expected:
        raise CorruptFileError(
            f"the savepoint is inconsistent: operator {saved.uid!r} has {expected} rows, "
            f"{found} of them in key groups below {savepoint.info.max_parallelism}\n"
            f"  savepoint: {savepoint.url}\n"
            "  next: use another copy of the savepoint, or take it again",
            operator=saved.uid,
        )
