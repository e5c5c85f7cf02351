"""Remove a whole checkpoint or savepoint, so that half of one is never used as a whole one.

First a mark is written, `removing.json`. From then on no job starts from the rest; only the
removal can continue. Then the running driver is fenced, and everything is removed, the mark last.
Without the mark no order would be safe: a log without its end looks like an older one, and an
empty log beside Spark's folder makes a new job skip input.

Always true here:
- a checkpoint that a branch still needs is not touched, unless forced;
- an interrupted removal can be repeated;
- only files that cairn and Spark have written are removed from a checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from cairn.errors import CairnError, RestoreError
from cairn.storage.holds import Hold, branch_hold_path, branch_of_hold, find_holds
from cairn.storage.log import Log, job_of
from cairn.storage.manifest import Epoch, JobInfo
from cairn.storage.paths import (
    DATABASES_FOLDER,
    HOLDS_FOLDER,
    JOB_PATH,
    LEADER_PATH,
    LOG_FOLDER,
    NOTE_FOLDERS,
    PENDING_FOLDER,
    PROBE_PREFIX,
    PUBLISHED_FOLDER,
    REMOVAL_PATH,
    SAVEPOINT_PATH,
    SPARK_FOLDER,
    STANDBYS_FOLDER,
    STATE_FOLDER,
    UNFINISHED_PATH,
    WAL_FOLDER,
)
from cairn.storage.references import files_of
from cairn.storage.store import LocalStore, NotFoundError, Store, other_store

_FOLDERS: Final = (
    STATE_FOLDER,
    SPARK_FOLDER,
    HOLDS_FOLDER,
    PENDING_FOLDER,
    WAL_FOLDER,
    PUBLISHED_FOLDER,
    STANDBYS_FOLDER,
    DATABASES_FOLDER,
    *NOTE_FOLDERS,
)


class Removed(NamedTuple):
    objects: int
    bytes: int
    unreleased: list[str]
    """Checkpoints on which a hold of the removed one may remain, and databases with its state."""


def is_savepoint(store: Store) -> bool:
    """True if this is a savepoint, finished or not."""
    return store.exists(SAVEPOINT_PATH) or store.exists(UNFINISHED_PATH)


def is_being_removed(store: Store) -> bool:
    return store.exists(REMOVAL_PATH)


def branches_of(store: Store) -> dict[str, Hold]:
    """Return the holds of branches on a checkpoint, by path."""
    holds = find_holds(store).holds
    return {path: hold for path, hold in holds.items() if branch_of_hold(path) is not None}


def delete_checkpoint(
    store: Store, *, force: bool = False, clean: Callable[[Store], list[str]] = lambda _: []
) -> Removed:
    """Remove a checkpoint with all its epochs. RestoreError when branches still need it.

    `clean` removes state that is not in the store, and returns what it could not reach.
    """
    if not force:
        branches = branches_of(store)
        if branches:
            listed = "\n".join(
                f"  branch: {hold.url or path}" for path, hold in sorted(branches.items())
            )
            raise RestoreError(
                f"checkpoint {store.url} is needed by its branches\n{listed}\n"
                "  next: remove the branches first; `cairn verify` lists those that are gone; "
                "--force removes their state too",
                url=store.url,
                branches=[hold.url for hold in branches.values()],
            )
    store.put(REMOVAL_PATH, _mark())
    job = job_of(store)  # A damaged checkpoint can be removed too.
    _fence(store)
    unreleased = [*_release_holds(store, job), *clean(store)]
    found = [o for o in store.list() if _is_ours(o.path)]
    for folder in _FOLDERS:
        store.delete_folder(folder)
    # Oldest first: a driver that has not noticed finds the newest record, and is fenced.
    for path in sorted(o.path for o in found if o.path.startswith(f"{LOG_FOLDER}/")):
        store.delete([path])
    store.delete_folder(LOG_FOLDER)
    store.delete(o.path for o in found if o.path.startswith(PROBE_PREFIX))
    store.delete([LEADER_PATH, JOB_PATH])
    store.delete([REMOVAL_PATH])
    _remove_empty_folder(store)
    return Removed(len(found), sum(o.size for o in found), unreleased)


def delete_savepoint(store: Store) -> Removed:
    """Remove a savepoint: everything in its folder."""
    store.put(REMOVAL_PATH, _mark())
    found = [o for o in store.list() if o.path != REMOVAL_PATH]
    store.delete([SAVEPOINT_PATH])
    store.delete([o.path for o in found])
    for folder in sorted({o.path.partition("/")[0] for o in found if "/" in o.path}):
        store.delete_folder(folder)
    store.delete([REMOVAL_PATH])
    _remove_empty_folder(store)
    return Removed(len(found), sum(o.size for o in found), [])


def _mark() -> bytes:
    return msgspec.json.encode({"started_ms": time.time_ns() // 1_000_000, "pid": os.getpid()})


def _is_ours(path: str) -> bool:
    is_file = path in (JOB_PATH, LEADER_PATH) or path.startswith(PROBE_PREFIX)
    return is_file or path.partition("/")[0] in (*_FOLDERS, LOG_FOLDER)


def _fence(store: Store) -> None:
    """Take over the job, so that a running driver stops at its next record."""
    log = Log(store)
    if log.newest_number() is not None:
        log.take_over(
            host=os.uname().nodename, pid=os.getpid(), wall_ms=time.time_ns() // 1_000_000
        )


def _release_holds(store: Store, job: JobInfo | None) -> list[str]:
    """Remove the holds of a branch on other checkpoints; return those that cannot be reached."""
    if job is None or job.ancestor is None or job.ancestor.kind != "branch":
        return []
    urls = {job.ancestor.url}
    try:
        for record in Log(store).records():
            if isinstance(record, Epoch):
                urls.update(file.store for file in files_of(record) if file.store)
    except CairnError:
        pass  # Half removed already; job.json names the parent.
    unreleased = []
    for url in sorted(urls):
        try:
            other_store(url).delete([branch_hold_path(job.job_id)])
        except (RestoreError, NotFoundError):
            continue  # The checkpoint was removed, and the hold with it.
        except Exception as error:
            unreleased.append(f"{url}: {error}")
    return unreleased


def _remove_empty_folder(store: Store) -> None:
    if isinstance(store, LocalStore):
        try:
            os.rmdir(store.root)
        except OSError:
            pass  # The folder has other files.
