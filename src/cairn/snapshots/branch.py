"""Branch a job: a second job starts from an epoch of the first, in a checkpoint of its own.

Only Spark's offsets are copied. The branch's first epoch references the files in the parent, and a
hold in the parent keeps them: `holds/branch-<job id>.json`. The branch needs fewer of them as it
writes its own bases, and its collector shrinks the hold.

    hold in the parent -> is the epoch still kept? -> job.json -> Spark's folder -> first epoch

Always true here:
- an epoch whose output may not be published yet is refused;
- only the hold is written to the parent;
- the branch exists from its first epoch on; before that no job starts in its folder;
- a failure half way leaves at most a hold, which `cairn verify` reports as stale.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from cairn.errors import CairnError, CommitUnknownError, RestoreError
from cairn.ids import new_id
from cairn.snapshots.published import check_published
from cairn.storage.holds import Hold, branch_hold_path, write_hold
from cairn.storage.log import FIRST_NUMBER, Log, new_nonce, read_job
from cairn.storage.manifest import (
    Ancestor,
    Epoch,
    EpochOperator,
    FileRef,
    JobInfo,
    SparkPosition,
    encode_record,
    state_measured,
)
from cairn.storage.paths import JOB_PATH, SPARK_FOLDER
from cairn.storage.references import files_of
from cairn.storage.removal import delete_checkpoint
from cairn.storage.spark_log import lay_out, spark_folder
from cairn.storage.store import Store, open_store, other_store


class BranchInfo(NamedTuple):
    url: str
    job_id: str
    epoch: int
    """The number of its first epoch, in its own log."""
    parent_url: str
    parent_epoch: int
    objects: int
    """The number of objects shared with the parent and with the parent's own ancestors."""
    bytes: int


def branch(
    store: Store,
    epoch: int | None,
    dest_url: str,
    *,
    spark_store: Store | None = None,
    spark_dest: Store | None = None,
) -> BranchInfo:
    """Create a checkpoint at `dest_url` that begins with an epoch of `store`; default: the newest.

    `spark_store` has Spark's folders, if they are not in the checkpoint; `spark_dest` is for those
    of the branch.
    """
    job = _job(store)
    parent = _epoch(store, epoch)
    check_published(Log(store), parent)
    dest = _empty(store, dest_url)
    spark_store, spark_dest = spark_store or store, spark_dest or dest
    _check_spark_dest(spark_dest, spark_store)
    child = JobInfo(
        name=job.name,
        job_id=new_id(),
        max_parallelism=job.max_parallelism,
        created_ms=time.time_ns() // 1_000_000,
        ancestor=Ancestor(kind="branch", id=job.job_id, url=store.url, epoch=parent.number),
    )
    shared = _shared_objects(store, files_of(parent))
    held: list[Store] = []
    try:
        for url, paths in shared.items():
            held.append(store if url == store.url else other_store(url))
            hold = Hold(paths=sorted(paths), url=dest.url)
            write_hold(held[-1], branch_hold_path(child.job_id), hold)
        # Checked after the hold is written: a collector that retires the epoch later sees the hold.
        _check_kept(Log(store), parent.number)
        _write_job(dest, child)
        folder = spark_folder(FIRST_NUMBER)
        lay_out(parent.spark, folder, source=spark_store, target=spark_dest, checkpoint=store)
        first = _write_epoch(dest, parent, store.url, folder)
    except CommitUnknownError as error:
        # The first epoch may exist: then the branch is complete and needs its holds.
        error.add_note(f"next: `cairn verify {dest.url}` shows if the branch is complete")
        raise
    except BaseException:
        _clean_up(dest, held, child)
        raise
    return BranchInfo(
        url=dest.url,
        job_id=child.job_id,
        epoch=first.number,
        parent_url=store.url,
        parent_epoch=parent.number,
        objects=sum(map(len, shared.values())),
        bytes=sum({(f.store, f.path, f.offset): f.size for f in files_of(parent)}.values()),
    )


def _write_job(dest: Store, child: JobInfo) -> None:
    if not dest.put_if_absent(JOB_PATH, encode_record(child)):
        raise _not_empty(dest, JOB_PATH)


def _write_epoch(dest: Store, parent: Epoch, parent_url: str, folder: str) -> Epoch:
    operators = {uid: _adopt(operator, parent_url) for uid, operator in parent.operators.items()}
    # This epoch follows no takeover: nobody leads the job yet.
    return Log(dest).append(
        lambda number: Epoch(
            number=number,
            parent=None,
            term=number,
            nonce=new_nonce(),
            wall_ms=time.time_ns() // 1_000_000,
            now_ms=parent.now_ms,
            watermarks=parent.watermarks,
            watermark_ms=parent.watermark_ms,
            passed_ms=parent.passed_ms,
            seen_ms=parent.seen_ms,
            timers=parent.timers,
            spark=_adopt_position(parent.spark, parent_url, folder),
            operators=operators,
            metrics=state_measured(operators),
        )
    )


def _adopt(operator: EpochOperator, parent_url: str) -> EpochOperator:
    """Return an operator as a branch lists it, with the branch's own epoch numbers."""
    ranges = [
        msgspec.structs.replace(
            part,
            files=[
                msgspec.structs.replace(
                    file,
                    store=file.store or parent_url,
                    first_epoch=FIRST_NUMBER,
                    last_epoch=FIRST_NUMBER,
                )
                for file in part.files
            ],
        )
        for part in operator.ranges
    ]
    return msgspec.structs.replace(operator, ranges=ranges)


def _adopt_position(position: SparkPosition, parent_url: str, folder: str) -> SparkPosition:
    logs = {
        index: msgspec.structs.replace(
            log,
            chunks=[
                msgspec.structs.replace(ref, store=ref.store or parent_url) for ref in log.chunks
            ],
        )
        for index, log in position.logs.items()
    }
    return msgspec.structs.replace(position, folder=folder, logs=logs)


def _shared_objects(store: Store, files: Iterable[FileRef]) -> dict[str, set[str]]:
    """Return the objects of these files, by the url of their checkpoint."""
    shared: dict[str, set[str]] = {}
    for file in files:
        shared.setdefault(file.store or store.url, set()).update((file.path, *file.objects))
    return shared


def _job(store: Store) -> JobInfo:
    job = read_job(store)
    if job is None:
        raise RestoreError(
            f"cannot branch {store.url}: it is not a checkpoint\n"
            f"  expected: {JOB_PATH}\n"
            "  next: give the checkpoint of a job",
            url=store.url,
        )
    return job


def _epoch(store: Store, number: int | None) -> Epoch:
    log = Log(store)
    epoch = log.newest_epoch() if number is None else None
    if number is not None:
        _check_kept(log, number)
        epoch = log.epoch(number)
    if epoch is None:
        raise RestoreError(
            f"cannot branch a job without a committed epoch\n"
            f"  checkpoint: {store.url}\n"
            "  next: start the new job on an empty checkpoint",
            url=store.url,
        )
    return epoch


def _check_kept(log: Log, number: int) -> None:
    oldest_kept = log.oldest_kept()
    if number < oldest_kept:
        raise RestoreError(
            f"epoch {number} is retired; its files may be gone\n"
            f"  the oldest record kept is {oldest_kept}\n"
            f"  checkpoint: {log.store.url}\n"
            "  next: branch a newer epoch; `cairn ls` shows them",
            epoch=number,
        )


def _empty(store: Store, dest_url: str) -> Store:
    dest = open_store(dest_url)
    inner, outer = sorted((f"{dest.url}/", f"{store.url}/"), key=len, reverse=True)
    if inner.startswith(outer):
        raise RestoreError(
            f"a branch cannot lie inside the checkpoint it is made of, nor around it\n"
            f"  checkpoint: {store.url}\n"
            f"  branch: {dest.url}\n"
            "  next: give it a folder of its own",
            url=dest.url,
        )
    found = dest.list()
    if found:
        raise _not_empty(dest, found[0].path)
    return dest


def _check_spark_dest(spark_dest: Store, spark_store: Store) -> None:
    """Raise if two jobs would share Spark's folder: each would continue the other's query."""
    found = spark_dest.list(SPARK_FOLDER)
    if spark_dest.url == spark_store.url or found:
        raise _not_empty(spark_dest, found[0].path if found else SPARK_FOLDER)


def _not_empty(dest: Store, path: str) -> CairnError:
    return RestoreError(
        f"a branch needs an empty folder\n"
        f"  found: {dest.url}/{path}\n"
        "  next: give another folder, or remove what is there (`cairn rm` for a checkpoint)",
        url=dest.url,
    )


def _clean_up(dest: Store, held: list[Store], child: JobInfo) -> None:
    """Remove a branch that failed, if possible; the rest is harmless, see above."""
    try:
        found = read_job(dest)
        if found is not None and found.job_id == child.job_id:
            delete_checkpoint(dest, force=True)
        for store in held:
            store.delete([branch_hold_path(child.job_id)])
    except Exception:
        pass
