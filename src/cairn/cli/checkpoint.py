"""Open a checkpoint without Spark, and check its files.

Field names of a report are stable: fields are added, never renamed.

Always true here:
- nothing is written, and no folder is made;
- a checkpoint can be read while a job writes to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from cairn.errors import CairnError
from cairn.storage.manifest import JobInfo
from cairn.storage.paths import DATABASES_FOLDER, LOG_FOLDER, SAVEPOINT_PATH
from cairn.storage.removal import is_being_removed
from cairn.storage.store import NotFoundError, Store, open_store
from cairn.storage.verify import Damage, verify


class NoCheckpointError(CairnError):
    """The command names a place without a checkpoint."""


def split_epoch(text: str) -> tuple[str, int | None]:
    """Split CHECKPOINT[@EPOCH]: digits after the last '@' are an epoch."""
    match = re.fullmatch(r"(.+)@([0-9]+)", text, re.DOTALL)
    return (match[1], int(match[2])) if match else (text, None)


def open_folder(url: str) -> Store:
    """Return the store at a URL, if it exists; local folders are not made."""
    try:
        return open_store(url, create=False)
    except NotFoundError:
        raise _no_checkpoint(url, "the folder does not exist") from None
    except ValueError as error:
        raise NoCheckpointError(str(error)) from None


def open_checkpoint(url: str) -> Store:
    """Return the store of an existing checkpoint."""
    store = open_folder(url)
    if is_being_removed(store):
        raise NoCheckpointError(
            f"the removal of {url} was interrupted; the rest is not a checkpoint\n"
            f"  next: `cairn rm {url}` continues it",
            url=url,
        )
    if not store.exists("job.json") and not store.list(LOG_FOLDER):
        if store.exists(SAVEPOINT_PATH):
            readers = f"`cairn state {url}` and `cairn verify {url}` read it"
            raise _no_checkpoint(url, "a savepoint", readers)
        raise _no_checkpoint(url, "neither job.json nor epochs/")
    return store


def _no_checkpoint(
    url: str, found: str, next: str = "use the checkpoint= of the job"
) -> NoCheckpointError:
    return NoCheckpointError(f"no checkpoint at {url}\n  found: {found}\n  next: {next}", url=url)


class Finding(msgspec.Struct, frozen=True):
    """A file that is damaged, or that is not needed any more."""

    path: str
    what: str


class OrphanFile(msgspec.Struct, frozen=True):
    """A file that no epoch lists."""

    path: str
    bytes: int
    modified_ms: int


class SavedJob(msgspec.Struct, frozen=True):
    """The job of a savepoint."""

    name: str
    max_parallelism: int


class CheckReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of checking a checkpoint or a savepoint."""

    checkpoint: str
    kind: Literal["checkpoint", "savepoint"]
    job: JobInfo | SavedJob | None
    ok: bool
    files: int
    bytes: int
    damage: list[Finding]
    orphans: list[OrphanFile]
    stale_holds: list[Finding]
    stale_notes: list[Finding]
    records: int | None = None
    """Only of a checkpoint."""
    epochs: int | None = None
    """Only of a checkpoint."""
    epoch: int | None = None
    """Only of a savepoint."""


def check(
    url: str,
    progress: Callable[[int, int], None] | None = None,
    *,
    spark_checkpoint: str | None = None,
) -> CheckReport:
    """Check a checkpoint or a savepoint, whichever is there."""
    store = open_folder(url)
    if store.exists(SAVEPOINT_PATH):
        return check_savepoint(store, progress)
    spark_store = None if spark_checkpoint is None else open_folder(spark_checkpoint)
    return check_checkpoint(open_checkpoint(url), progress, spark_store=spark_store)


def check_checkpoint(
    store: Store,
    progress: Callable[[int, int], None] | None = None,
    *,
    spark_store: Store | None = None,
) -> CheckReport:
    """Read and check every file of a checkpoint."""
    report = verify(store, progress, checkers=_checkers(), spark_store=spark_store)
    damage, stale_notes = list(report.damage), list(report.stale_notes)
    if any(True for _ in store.list(DATABASES_FOLDER)):
        # Not at the top: most checkpoints need no redis.
        from cairn.snapshots.verify_redis import verify_redis

        checked = verify_redis(store)
        damage += [Damage(*found) for found in checked.damage]
        stale_notes += [Damage(*found) for found in checked.lost]
    return CheckReport(
        checkpoint=store.url,
        kind="checkpoint",
        job=report.job,
        ok=not damage,
        records=report.records,
        epochs=report.epochs,
        files=report.files,
        bytes=report.bytes,
        damage=[Finding(d.path, d.what) for d in damage],
        orphans=[OrphanFile(o.path, o.size, round(o.modified_s * 1000)) for o in report.orphans],
        stale_holds=[Finding(h.path, h.what) for h in report.stale_holds],
        stale_notes=[Finding(n.path, n.what) for n in stale_notes],
    )


def check_savepoint(
    store: Store, progress: Callable[[int, int], None] | None = None
) -> CheckReport:
    """Read and check every file of a savepoint."""
    from cairn.snapshots.savepoint import open_savepoint

    savepoint = open_savepoint(store.url)
    damage = savepoint.verify(progress)
    info = savepoint.info
    return CheckReport(
        checkpoint=store.url,
        kind="savepoint",
        job=SavedJob(info.job, info.max_parallelism),
        ok=not damage,
        epoch=info.epoch,
        files=len(info.files),
        bytes=info.bytes,
        damage=[Finding(d.path, d.what) for d in damage],
        orphans=[],
        stale_holds=[],
        stale_notes=[],
    )


def _checkers() -> dict[str, Any]:
    """For files in other formats than segments."""
    from cairn.backends.rocksdb.files import verify_rocksdb_base
    from cairn.backends.versioned.index import FORMATS, verify_base

    return {"rocksdb": verify_rocksdb_base, **dict.fromkeys(FORMATS, verify_base)}
