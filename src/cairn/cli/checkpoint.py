"""A checkpoint as it lies there, found without Spark, and what `verify` tells of it.

Each function gives plain data, the machine-readable twin of what a person sees. Its
names are stable: fields are added, never renamed.

Always true here:
- looking changes nothing, and does not make a folder where there is none;
- a checkpoint can be looked at while a job writes to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cairn.errors import CairnError
from cairn.query.facts import job_facts
from cairn.storage.paths import LOG_FOLDER, SAVEPOINT_PATH
from cairn.storage.removal import is_being_removed
from cairn.storage.store import NotFoundError, Store, open_store
from cairn.storage.verify import verify

Facts = dict[str, Any]


class NoCheckpointError(CairnError):
    """There is no checkpoint where the command was told to look."""


def split_epoch(text: str) -> tuple[str, int | None]:
    """CHECKPOINT or CHECKPOINT@EPOCH: digits after the last '@' are an epoch."""
    match = re.fullmatch(r"(.+)@([0-9]+)", text, re.DOTALL)
    return (match[1], int(match[2])) if match else (text, None)


def open_folder(url: str) -> Store:
    """The store at a url, if there is anything; local folders are not made."""
    try:
        return open_store(url, create=False)
    except NotFoundError:
        raise _no_checkpoint(url, "there is no such folder") from None
    except ValueError as error:
        raise NoCheckpointError(str(error)) from None


def open_checkpoint(url: str) -> Store:
    """The store of a checkpoint that exists."""
    store = open_folder(url)
    if is_being_removed(store):
        raise NoCheckpointError(
            f"the removal of {url} was interrupted; what is left is no checkpoint\n"
            f"  next: `cairn rm {url}` goes on with it",
            url=url,
        )
    if not store.exists("job.json") and not store.list(LOG_FOLDER):
        if store.exists(SAVEPOINT_PATH):
            readers = f"`cairn state {url}` and `cairn verify {url}` read it"
            raise _no_checkpoint(url, "a savepoint", readers)
        raise _no_checkpoint(url, "neither job.json nor epochs/ is there")
    return store


def _no_checkpoint(
    url: str, found: str, next: str = "give the checkpoint= that the job was started with"
) -> NoCheckpointError:
    return NoCheckpointError(
        f"there is no checkpoint at {url}\n  found: {found}\n  next: {next}", url=url
    )


def check_facts(
    url: str,
    progress: Callable[[int, int], None] | None = None,
    *,
    spark_checkpoint: str | None = None,
) -> Facts:
    """Check a checkpoint or a savepoint, whichever is there, and return what was found."""
    store = open_folder(url)
    if store.exists(SAVEPOINT_PATH):
        return savepoint_facts(store, progress)
    spark_store = None if spark_checkpoint is None else open_folder(spark_checkpoint)
    return verify_facts(open_checkpoint(url), progress, spark_store=spark_store)


def verify_facts(
    store: Store,
    progress: Callable[[int, int], None] | None = None,
    *,
    spark_store: Store | None = None,
) -> Facts:
    """Return what `storage.verify` found."""
    report = verify(store, progress, checkers=_checkers(), spark_store=spark_store)
    return {
        "checkpoint": store.url,
        "kind": "checkpoint",
        "job": job_facts(report.job),
        "ok": report.ok,
        "records": report.records,
        "epochs": report.epochs,
        "files": report.files,
        "bytes": report.bytes,
        "damage": [{"path": d.path, "what": d.what} for d in report.damage],
        "orphans": [
            {"path": o.path, "bytes": o.size, "modified_ms": round(o.modified_s * 1000)}
            for o in report.orphans
        ],
        "stale_holds": [{"path": h.path, "what": h.what} for h in report.stale_holds],
        "stale_notes": [{"path": n.path, "what": n.what} for n in report.stale_notes],
    }


def savepoint_facts(store: Store, progress: Callable[[int, int], None] | None = None) -> Facts:
    """What checking a savepoint found, under the names of `verify_facts`."""
    from cairn.snapshots.savepoint import open_savepoint

    savepoint = open_savepoint(store.url)
    damage = savepoint.verify(progress)
    info = savepoint.info
    return {
        "checkpoint": store.url,
        "kind": "savepoint",
        "job": {"name": info.job, "max_parallelism": info.max_parallelism},
        "ok": not damage,
        "epoch": info.epoch,
        "files": len(info.files),
        "bytes": info.bytes,
        "damage": [{"path": d.path, "what": d.what} for d in damage],
        "orphans": [],
        "stale_holds": [],
        "stale_notes": [],
    }


def _checkers() -> dict[str, Any]:
    """For files in other formats than segments."""
    from cairn.backends.rocksdb.files import verify_rocksdb_base

    return {"rocksdb": verify_rocksdb_base}
