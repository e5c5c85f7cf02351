"""Holds: what others need kept of a checkpoint, said by a file in its `holds/` folder.

A hold names epochs, which then stay in the log, or objects, which then stay though no
record names them any more. A branch holds the objects it shares with the checkpoint it was
made from: `holds/branch-<job id of the branch>.json`.

Whoever writes a hold looks afterwards whether what it holds has been retired meanwhile. The
collector reads holds after it has retired something, and before it removes anything. So
one of the two always sees the other.

Who only reads may be gone any moment, without a word: such a hold says until when it counts,
and the collector removes it after that.

A reader's hold is never written again: to go on it writes another, under a new name, and removes
the first one after that. So one that was read once need not be read again, and one that is
about to be removed, because it is over, is nobody's.

Always true here:
- holds are read as they were at one moment, even when one is written while another is read;
- of a hold that gives way to another one of the two is seen;
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
from cairn.storage.paths import HOLDS_FOLDER
from cairn.storage.store import NotFoundError, Store, StoredObject

_READER: Final = f"{HOLDS_FOLDER}/reader-"
_BRANCH: Final = re.compile(rf"{HOLDS_FOLDER}/branch-(\w+)\.json")
_READ_ATTEMPTS_MAX: Final = 10
_GRACE_MS: Final = 60_000


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """What a file in `holds/` says. The rest tells people who still needs it."""

    epochs: list[int] = []
    paths: list[str] = []
    url: str = ""
    """Of the branch."""
    by: str = ""
    """The process that holds an epoch while it reads it: "pid 17 on host"."""
    until_ms: int = 0
    """It counts until then; 0: until it is removed."""

    def is_over(self, now_ms: int) -> bool:
        """Whether it counts no more. Clocks of two machines may differ by the grace."""
        return 0 < self.until_ms < now_ms - _GRACE_MS


class Holds(NamedTuple):
    """Everything that is held."""

    epochs: frozenset[int]
    paths: frozenset[str]


Known = dict[StoredObject, Hold]
"""Holds of readers that were read before."""


class Found(NamedTuple):
    """All holds that count, by path, and the listing they were read from."""

    listing: list[StoredObject]
    holds: dict[str, Hold]
    over: Sequence[str] = ()
    """The paths of those that count no more."""

    @property
    def all(self) -> Holds:
        return Holds(
            frozenset(number for hold in self.holds.values() for number in hold.epochs),
            frozenset(path for hold in self.holds.values() for path in hold.paths),
        )

    def is_one_over(self, now_ms: int) -> bool:
        """Whether one of those that counted when they were read counts no more."""
        return any(hold.is_over(now_ms) for hold in self.holds.values())


def branch_hold_path(job_id: str) -> str:
    return f"{HOLDS_FOLDER}/branch-{job_id}.json"


def branch_of_hold(path: str) -> str | None:
    """The job id of the branch that a hold belongs to; None when it is no branch's."""
    match = _BRANCH.fullmatch(path)
    return match[1] if match else None


def reader_hold_path() -> str:
    """Where nobody has written yet."""
    return f"{_READER}{uuid.uuid4().hex}.json"


def read_holds(store: Store, now_ms: int | None = None, known: Known | None = None) -> Holds:
    """Everything that `holds/` asks to keep."""
    return find_holds(store, now_ms, known).all


def find_holds(store: Store, now_ms: int | None = None, known: Known | None = None) -> Found:
    """All holds. CorruptFileError when one of them cannot be read.

    `known` are those of readers that the same caller has read before; it is kept up to date.
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
        # A branch of a branch writes its hold here before that branch gives up its own. Whoever
        # lists before the one and reads after the other would see neither.
        again = store.list(HOLDS_FOLDER) if listing else listing
        if not is_one_gone and _lasting(again) == _lasting(listing):
            break
        listing = again
    else:
        raise RestoreError(
            f"holds come and go faster than they can be read\n  of: {store.url}\n"
            "  next: nothing is collected until it is tried again"
        )
    for gone in known.keys() - set(listing):
        del known[gone]
    over = [path for path, hold in holds.items() if hold.is_over(now_ms)]
    return Found(listing, {p: hold for p, hold in holds.items() if p not in over}, over)


def _lasting(listing: list[StoredObject]) -> list[StoredObject]:
    """Without readers, who come and go: one that came later looks for itself, see above."""
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
    """Hold no more for a branch than the objects it still needs; nothing when there are none."""
    path = branch_hold_path(job_id)
    try:
        hold = decode_hold(store.get(path), store, path)
    except NotFoundError:
        return
    paths = [held for held in hold.paths if held in needed]
    if not paths:
        store.delete([path])
    elif len(paths) < len(hold.paths):
        write_hold(store, path, msgspec.structs.replace(hold, paths=paths))
