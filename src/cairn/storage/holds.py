"""Holds: files in `holds/` that keep parts of a checkpoint from being collected.

A hold lists epochs, which stay in the log, or objects, which stay when no record lists them any
more. A branch holds the objects it shares with the checkpoint it was made from:
`holds/branch-<job id of the branch>.json`.

The writer of a hold checks afterwards if its epoch or objects were retired meanwhile. The
collector reads holds after it has retired something, and before it removes anything. So one of
the two always sees the other.

A reader may die at any moment. Its hold has an end, after which the collector removes it.

A reader's hold is never overwritten: to renew it, the reader writes another under a new name and
then removes the first. So the collector reads each file once, and never removes one in use.

Always true here:
- holds are read as of one moment, even when one is written while another is read;
- when one hold replaces another, at least one of the two is seen;
- a hold that cannot be read is an error, never an empty hold;
- a branch's hold only ever shrinks.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import msgspec

from cairn.errors import CorruptFileError, RestoreError
from cairn.storage.paths import EXTERNAL_SUFFIX, HOLDS_FOLDER
from cairn.storage.store import NotFoundError, Store, StoredObject

_READER: Final = f"{HOLDS_FOLDER}/reader-"
_BRANCH: Final = re.compile(rf"{HOLDS_FOLDER}/branch-(\w+)\.json")
_READ_ATTEMPTS_MAX: Final = 10
_GRACE_MS: Final = 60_000


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """A file in `holds/`. `url` and `by` show people who needs it."""

    epochs: list[int] = []
    paths: list[str] = []
    url: str = ""
    """The branch that needs the objects."""
    by: str = ""
    """The process that holds an epoch while it reads it: "pid 17 on host"."""
    until_ms: int = 0
    """The end of the hold; 0: it lasts until it is removed."""

    def is_over(self, now_ms: int) -> bool:
        """True if the hold has ended. Clocks of two machines may differ by the grace."""
        return 0 < self.until_ms < now_ms - _GRACE_MS


class Holds(NamedTuple):
    """All epochs and objects that are held."""

    epochs: frozenset[int]
    paths: frozenset[str]


Known = dict[StoredObject, Hold]
"""Readers' holds that were read before."""


class Found(NamedTuple):
    """The holds in force, by path, and the listing they were read from."""

    listing: list[StoredObject]
    holds: dict[str, Hold]
    over: Sequence[str] = ()
    """The paths of holds that have ended."""

    @property
    def all(self) -> Holds:
        return Holds(
            frozenset(number for hold in self.holds.values() for number in hold.epochs),
            frozenset(path for hold in self.holds.values() for path in hold.paths),
        )

    def is_one_over(self, now_ms: int) -> bool:
        """True if one of the holds has ended since they were read."""
        return any(hold.is_over(now_ms) for hold in self.holds.values())


def branch_hold_path(job_id: str) -> str:
    return f"{HOLDS_FOLDER}/branch-{job_id}.json"


def branch_of_hold(path: str) -> str | None:
    """Return the job id of the branch that a hold belongs to; None for other holds."""
    match = _BRANCH.fullmatch(path)
    return match[1] if match else None


def reader_hold_path() -> str:
    """Return a new path for a reader's hold."""
    return f"{_READER}{uuid.uuid4().hex}.json"


def read_holds(store: Store, known: Known | None = None) -> Holds:
    """Return all epochs and objects that are held."""
    return find_holds(store, known=known).all


def find_holds(store: Store, now_ms: int | None = None, known: Known | None = None) -> Found:
    """Return all holds. CorruptFileError when one of them cannot be read.

    `known` has readers' holds that the same caller has read before, and is updated.
    """
    known = {} if known is None else known
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    listing = store.list(HOLDS_FOLDER)
    for _ in range(_READ_ATTEMPTS_MAX):
        holds, is_one_gone = {}, False
        for found in listing:
            try:
                hold = known.get(found) or decode_hold(store.get(found.path), store, found.path)
            except NotFoundError:
                is_one_gone = True  # Released since it was listed.
                continue
            holds[found.path] = hold
            if found.path.startswith(_READER):
                known[found] = hold
        # A branch of a branch writes its hold here before that branch gives up its own. A listing
        # from before the one and reads from after the other would show neither.
        again = store.list(HOLDS_FOLDER) if listing else listing
        if not is_one_gone and _lasting(again) == _lasting(listing):
            break
        listing = again
    else:
        raise RestoreError(
            f"holds change faster than they can be read\n  checkpoint: {store.url}\n"
            "  next: nothing is collected now; the next epoch tries again"
        )
    for gone in known.keys() - set(listing):
        del known[gone]
    over = [path for path, hold in holds.items() if hold.is_over(now_ms)]
    return Found(listing, {p: hold for p, hold in holds.items() if p not in over}, over)


def _lasting(listing: list[StoredObject]) -> list[StoredObject]:
    """Leave out readers: one that came later checks for itself, see above."""
    return [found for found in listing if not found.path.startswith(_READER)]


def decode_hold(data: bytes, store: Store, path: str) -> Hold:
    try:
        return msgspec.json.decode(data, type=Hold)
    except msgspec.MsgspecError as error:
        raise CorruptFileError(
            f"a hold cannot be read: {error}\n"
            f"  file: {store.url}/{path}\n"
            "  next: nothing is collected until it is repaired or removed",
            file=path,
        ) from error


def write_hold(store: Store, path: str, hold: Hold) -> None:
    store.put(path, msgspec.json.encode(hold))


def shrink_branch_hold(store: Store, job_id: str, needed: Collection[str]) -> None:
    """Reduce a branch's hold to the objects it still needs; remove it when there are none.

    Bases in a database are needed as long as the branch exists: its own bases name their rows.
    """
    path = branch_hold_path(job_id)
    try:
        hold = decode_hold(store.get(path), store, path)
    except NotFoundError:
        return
    paths = [held for held in hold.paths if held in needed or held.endswith(EXTERNAL_SUFFIX)]
    if not paths:
        store.delete([path])
    elif len(paths) < len(hold.paths):
        write_hold(store, path, msgspec.structs.replace(hold, paths=paths))
