"""Remove what no kept epoch needs, and nothing that anybody can still come back to.

Retirement is a decision of the log. Each manifest says `oldest_kept`; all records below
the newest epoch's `oldest_kept` are retired for everybody from that put on: no rollback,
hold or read may start from them. Only then are they removed, oldest first, one by one,
so the log stays without gaps, and then the objects that only they referenced.

Why removing is safe, even when done late by a leader that has lost its leadership:
- *Retired objects* need no grace. Every epoch to come inherits from a record that is not
  retired, all of those are counted, and what is new in it lies under a newer term's name
  or was written for it. One case is left: within our own term a slow slot writes, under
  the same name, a base that has just been removed. The leader asks `lost_paths` before it
  publishes, on the thread that collects, and does not use such a file.
- *Orphans* (in no record) go only when their name says an older term and they are older
  than the grace period. Slots of older terms may still write them, but nobody can publish
  them; slots of our term write under our term, and assume nothing the parent does not list.
- *Holds* are read after the put that retired something, and before anything is removed.
  Whoever writes a hold then looks at the newest epoch: if what it holds is still not
  retired there, the hold is in time; otherwise it gives up. One of the two always sees
  the other.

Always true here:
- every object that an epoch record in the log references exists;
- the newest epoch of the current lineage is never removed;
- when a hold cannot be read, nothing is removed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from cairn.errors import CorruptFileError, RestoreError
from cairn.storage.log import FIRST_NUMBER, Log, record_path
from cairn.storage.manifest import FULL_EVERY, Epoch, is_full
from cairn.storage.pack import STATE_FOLDER, writer_term
from cairn.storage.store import NotFoundError, Store

HOLDS_FOLDER: Final = "holds"
GRACE_S: Final = 3600.0
_REMOVED_MEMORY_MAX: Final = 100_000


class Holds(NamedTuple):
    epochs: frozenset[int]
    paths: frozenset[str]


class Collected(NamedTuple):
    epochs_removed: int
    objects_removed: int
    bytes_removed: int


class _Hold(msgspec.Struct, frozen=True, kw_only=True):
    epochs: list[int] = []
    paths: list[str] = []


def read_holds(store: Store) -> Holds:
    """Everything that `holds/` asks to keep."""
    epochs: set[int] = set()
    paths: set[str] = set()
    for found in store.list(HOLDS_FOLDER):
        try:
            hold = msgspec.json.decode(store.get(found.path), type=_Hold)
        except NotFoundError:
            continue  # Released since it was listed.
        except msgspec.MsgspecError as error:
            raise CorruptFileError(
                f"a hold cannot be read: {error}\n"
                f"  file: {store.url}/{found.path}\n"
                "  next: nothing is collected until it is repaired or removed",
                file=found.path,
            ) from error
        epochs.update(hold.epochs)
        paths.update(hold.paths)
    return Holds(frozenset(epochs), frozenset(paths))


def referenced_paths(epochs: Iterable[Epoch]) -> set[str]:
    """The objects these epochs are made of."""
    return {
        path
        for epoch in epochs
        for operator in epoch.operators.values()
        for state in operator.ranges
        for file in state.files
        if not file.store
        for path in (file.path, *file.objects)
    }


def retained(log: Log, keep: int) -> set[int]:
    """The records to keep: all from the oldest one that the last `keep` epochs need.

    Those are the epochs of the current lineage, the full manifest that the oldest of them
    is resolved from, and every record after it, so that the log has no gaps.
    """
    oldest = _oldest_to_keep(log, keep, frozenset())
    return {number for number in log.numbers() if number >= oldest}


def _oldest_to_keep(log: Log, keep: int, held: frozenset[int]) -> int:
    assert keep >= 1, "the newest epoch is always kept"
    oldest = FIRST_NUMBER
    retired_below = log.retired_below()
    for position, epoch in enumerate(log.lineage(), start=1):
        oldest = epoch.number
        # The records before a full one are not needed to resolve it.
        if position >= keep and is_full(epoch.number, epoch.parent):
            break
    for number in held:
        if number >= retired_below:
            oldest = min(oldest, _full_ancestor(log, number))
    # What was retired stays retired, also after a rollback or with a larger `keep`.
    return max(oldest, retired_below)


def _full_ancestor(log: Log, number: int) -> int:
    try:
        epoch = log.epoch(number)
        while not is_full(epoch.number, epoch.parent):
            assert epoch.parent is not None
            epoch = log.epoch(epoch.parent)
    except RestoreError:
        # Nothing to resolve; keeping from the number on is the careful answer.
        return number
    return epoch.number


class Collector:
    """Collects for one leader, from its takeover on.

    Before each put the leader asks `oldest_to_keep` and `lost_paths`; after each won put it
    calls `after_epoch`. Start-up calls `sweep` once. All of it on one thread.
    """

    def __init__(
        self, store: Store, log: Log, keep: int, term: int, grace_s: float = GRACE_S, keep_s: float | None = None
    ) -> None:
        self._store = store
        self._log = log
        # A walk longer than the cache would read all of its records anew each time.
        log.remember_at_least(keep + 2 * FULL_EVERY)
        self._keep = keep
        self._term = term
        self._grace_s = grace_s
        # How many epoch records reference each path; kept up to date record by record.
        self._references: Counter[str] = Counter()
        self._numbers: deque[int] | None = None  # The records that are there, ascending.
        self._removed: OrderedDict[str, None] = OrderedDict()

    def oldest_to_keep(self) -> int:
        """For `Epoch.oldest_kept` of the epoch that is about to be published."""
        return _oldest_to_keep(self._log, self._keep, read_holds(self._store).epochs)

    def lost_paths(self, epoch: Epoch) -> set[str]:
        """Files this epoch would reference that were collected meanwhile: do not publish it."""
        return {path for path in referenced_paths([epoch]) if path in self._removed}

    def after_epoch(self) -> Collected:
        """Remove what the newest epoch has retired. Lists nothing but `holds/`."""
        numbers = self._count()
        newest = self._log.newest_epoch()
        end = self._log.retired_below()
        if newest is None or not numbers or end <= numbers[0]:
            return Collected(0, 0, 0)
        end = min(end, _full_ancestor(self._log, newest.number))
        holds = read_holds(self._store)
        held = [number for number in holds.epochs if numbers[0] <= number < end]
        end = min([end, *(_full_ancestor(self._log, number) for number in held)])
        return self._retire(end, holds)

    def sweep(self, now_s: float) -> Collected:
        """Also remove orphans: objects of older terms that no record references."""
        self._count()
        listed = self._store.list(STATE_FOLDER)
        retired = self.after_epoch()
        paths = read_holds(self._store).paths
        orphans = [
            found
            for found in listed
            if found.path not in self._references
            and found.path not in self._removed
            and found.path not in paths
            and (writer_term(found.path) or self._term) < self._term
            and now_s - found.modified_s > self._grace_s
        ]
        self._remove([orphan.path for orphan in orphans])
        return Collected(
            retired.epochs_removed,
            retired.objects_removed + len(orphans),
            retired.bytes_removed + sum(orphan.size for orphan in orphans),
        )

    def _count(self) -> deque[int]:
        """Take in the records that were appended since; the numbers of all that are there."""
        if self._numbers is None:
            self._numbers = deque()
            new = self._log.numbers()
        else:
            known_to = self._numbers[-1] if self._numbers else FIRST_NUMBER - 1
            new = list(range(known_to + 1, (self._log.last or known_to) + 1))
        for number in new:
            epoch = self._epoch(number)
            if epoch is not None:
                self._references.update(referenced_paths([epoch]))
            self._numbers.append(number)
        return self._numbers

    def _epoch(self, number: int) -> Epoch | None:
        try:
            record = self._log.read(number)
        except RestoreError:
            # A retired record may be left without the one it was written against, when a
            # leader died while removing them. Any other unreadable record stops collection.
            if number >= self._log.retired_below():
                raise
            return None
        return record if isinstance(record, Epoch) else None

    def _retire(self, end: int, holds: Holds) -> Collected:
        numbers = self._count()
        retired = [number for number in numbers if number < end]
        epochs = [epoch for epoch in map(self._epoch, retired) if epoch is not None]
        # Records first: a record without its files would be a lie, files without a record are
        # only waste. One by one, oldest first: the log relies on it.
        for number in retired:
            self._store.delete([record_path(number)])
            self._log.forget(number)
            numbers.popleft()
        unreferenced: dict[str, int] = {}
        for epoch in epochs:
            lengths = _lengths(epoch)
            for path, length in lengths.items():
                self._references[path] -= 1
                if self._references[path] == 0:
                    del self._references[path]
                    unreferenced[path] = length
        removed = [path for path in unreferenced if path not in holds.paths]
        self._remove(removed)
        return Collected(len(epochs), len(removed), sum(unreferenced[path] for path in removed))

    def _remove(self, paths: list[str]) -> None:
        # Remembered first: if the removal fails half way, some of them are gone.
        for path in paths:
            self._removed[path] = None
        while len(self._removed) > _REMOVED_MEMORY_MAX:
            self._removed.popitem(last=False)
        self._store.delete(paths)


def collect(
    store: Store, log: Log, keep: int, term: int, now_s: float, grace_s: float = GRACE_S
) -> Collected:
    """One full collection by a driver that has just taken over, in the term it won."""
    return Collector(store, log, keep, term, grace_s).sweep(now_s)


def _lengths(epoch: Epoch) -> dict[str, int]:
    """Bytes per object as far as this epoch references them; for reports only."""
    lengths: Counter[str] = Counter()
    for operator in epoch.operators.values():
        for state in operator.ranges:
            for file in state.files:
                lengths[file.path] += file.length
    return lengths
