"""Remove what no kept epoch needs, and nothing that anybody can still come back to.

Retirement is a decision of the log. Each manifest says `oldest_kept`; all records below
the newest epoch's `oldest_kept` are retired for everybody from that put on: no rollback,
hold or read may start from them. Only then are they removed, oldest first, one by one,
so the log stays without gaps, and then the objects that only they referenced.

Why removing is safe, even when done late by a leader that has lost its leadership:
- *Retired objects* need no grace. Every epoch to come inherits from a record that is not
  retired, all of those are counted, and what is new in it lies under a newer term's name
  or was written for it. One case is left: within our own term a slow slot writes, under
  the same name, a base that has just been removed. The leader asks `find_lost_paths` before it
  publishes, on the thread that collects, and does not use such a file.
- *Orphans* (in no record) go only when their name says an older term and they are older
  than the grace period. Slots of older terms may still write them, but nobody can publish
  them; slots of our term write under our term, and assume nothing the parent does not list.
- *Holds* are read after the put that retired something, and before anything is removed.
  Whoever writes a hold then looks at the newest epoch: if what it holds is still not
  retired there, the hold is in time; otherwise it gives up. One of the two always sees
  the other. What only a hold keeps is remembered, and removed once no hold names it. A hold
  that counts no more is removed with what it kept.
- *Objects of other checkpoints*, which a branch shares, are theirs to remove. The branch's
  hold there shrinks after the records that needed them are retired here.

Always true here:
- every object that an epoch record in the log references exists;
- the newest epoch of the current lineage is never removed;
- when a hold cannot be read, nothing is removed and nothing is retired;
- after an epoch is committed, no failure to collect is raised: it is tried again after the next.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from cairn.errors import RestoreError
from cairn.logs import logger
from cairn.storage.holds import Found, Known, find_holds, read_holds, shrink_branch_hold
from cairn.storage.lineage import Window
from cairn.storage.log import FIRST_NUMBER, Log, read_job, record_path
from cairn.storage.manifest import Epoch, FileRef, is_full
from cairn.storage.pack import writer_term
from cairn.storage.paths import HOLDS_FOLDER, SPARK_FOLDER, STATE_FOLDER
from cairn.storage.published import remove_notes
from cairn.storage.store import Store, other_store

GRACE_S: Final = 3600.0
_REMOVED_MEMORY_MAX: Final = 100_000
_SPARK_FOLDER: Final = re.compile(r"(spark/(\d{12})(?:-\w+)?)/")


class Collected(NamedTuple):
    epochs_removed: int
    objects_removed: int
    bytes_removed: int


NOTHING: Final = Collected(0, 0, 0)


def files_of(epoch: Epoch) -> Iterator[FileRef]:
    """Every file that an epoch names, once for each range or source that lists it."""
    for operator in epoch.operators.values():
        for state in operator.ranges:
            yield from state.files
    for log in epoch.spark.logs.values():
        yield from log.chunks


def object_paths(epochs: Iterable[Epoch]) -> set[str]:
    """The objects of their own checkpoint that these epochs are made of."""
    return {
        path
        for epoch in epochs
        for file in files_of(epoch)
        if not file.store
        for path in (file.path, *file.objects)
    }


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


class _Record(NamedTuple):
    number: int
    is_epoch: bool


class Collector:
    """Collects for one leader, from its takeover on.

    An epoch is kept while it is among the last `keep` of its lineage or, with `keep_s`, younger
    than that. Before each put the leader asks `oldest_to_keep` and `find_lost_paths`; after each
    won put it calls `after_epoch`. Start-up calls `sweep` once. All of it on one thread.
    `spark_store` has Spark's folders, where that is not the checkpoint.
    """

    def __init__(
        self,
        store: Store,
        log: Log,
        keep: int,
        term: int,
        grace_s: float = GRACE_S,
        *,
        keep_s: float | None = None,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        spark_store: Store | None = None,
    ) -> None:
        self._store = store
        self._spark_store = spark_store or store
        self._log = log
        self._term = term
        self._grace_s = grace_s
        self._window = Window(log, keep, keep_s, clock_ms)
        # The records that are there, ascending, and those that are yet to be counted.
        self._records: deque[_Record] | None = None
        self._uncounted: deque[int] = deque()
        self._last_listed = FIRST_NUMBER - 1
        # The last record that references each thing. Records go oldest first, so a thing is
        # garbage when that one is gone.
        self._objects: dict[str, int] = {}
        self._foreign: dict[tuple[str, str], int] = {}
        self._spark_folders: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        # Objects that no record references and that are still there, and the holds that kept them.
        self._garbage: dict[str, int] = {}
        self._kept_by: Found | None = None
        self._known_holds: Known = {}
        self._removed: OrderedDict[str, None] = OrderedDict()
        self._holds_to_shrink: set[str] = set()

    def oldest_to_keep(self) -> int:
        """For `Epoch.oldest_kept` of the epoch that is about to be published."""
        oldest, retired_below = self._window.oldest(), self._log.retired_below()
        if oldest <= retired_below:
            return retired_below
        try:
            held = read_holds(self._store, known=self._known_holds).epochs
        except AssertionError:
            raise
        except Exception as error:
            logger.warning("cairn retires no epochs: holds cannot be read: %s", error)
            return retired_below
        for number in held:
            if number >= retired_below:
                oldest = min(oldest, _full_ancestor(self._log, number))
        return max(oldest, retired_below)

    def find_lost_paths(self, epoch: Epoch) -> set[str]:
        """Files this epoch would reference that were collected meanwhile: do not publish it."""
        return {path for path in object_paths([epoch]) if path in self._removed}

    def after_epoch(self) -> Collected:
        """Remove what the newest epoch has retired. Lists nothing but `holds/`.

        The epoch is committed: what fails here is logged, and done after a later epoch.
        """
        try:
            return self._collect()
        except AssertionError:
            raise
        except Exception as error:
            logger.warning("cairn could not remove all that is retired: %s", error)
            return NOTHING

    def sweep(self, now_s: float) -> Collected:
        """Also remove what earlier leaders left: objects and folders that no record names."""
        self._count()
        listed = self._store.list(STATE_FOLDER)
        retired = self._collect()
        found = find_holds(self._store, known=self._known_holds)
        held = found.all.paths
        orphans = []
        for there in listed:
            is_known = there.path in self._objects or there.path in self._removed
            if is_known or (writer_term(there.path) or self._term) >= self._term:
                continue
            if there.path in held:
                # It was in an epoch once, so nobody is about to publish it.
                self._garbage[there.path] = there.size
                self._kept_by = found
            elif now_s - there.modified_s > self._grace_s:
                orphans.append(there)
        self._remove([orphan.path for orphan in orphans])
        self._remove_spark_folders(now_s)
        records = self._count()
        if records:
            remove_notes(self._store, records[0].number)
        self._holds_to_shrink = {url for url, _ in self._foreign}
        job = read_job(self._store)
        if job is not None and job.ancestor is not None and job.ancestor.kind == "branch":
            self._holds_to_shrink.add(job.ancestor.url)
        self._shrink_holds()
        return Collected(
            retired.epochs_removed,
            retired.objects_removed + len(orphans),
            retired.bytes_removed + sum(orphan.size for orphan in orphans),
        )

    def _collect(self) -> Collected:
        records = self._count()
        newest = self._log.newest_epoch()
        end = self._log.retired_below()
        collected = NOTHING
        has_retired = newest is not None and bool(records) and end > records[0].number
        if has_retired or self._may_be_free():
            found = find_holds(self._store, known=self._known_holds)
            epochs_removed = 0
            if has_retired:
                assert newest is not None
                end = min(end, _full_ancestor(self._log, newest.number))
                held = [n for n in found.all.epochs if records[0].number <= n < end]
                end = min([end, *(_full_ancestor(self._log, number) for number in held)])
                epochs_removed = self._retire(end)
            removed = self._remove_garbage(found)
            collected = Collected(epochs_removed, len(removed), sum(removed.values()))
        self._shrink_holds()
        return collected

    def _may_be_free(self) -> bool:
        """Has anything changed for what only holds kept, or could not be removed?"""
        if not self._garbage:
            return False
        found, now_ms = self._kept_by, time.time_ns() // 1_000_000
        if found is None or found.is_one_over(now_ms):
            return True
        return found.listing != self._store.list(HOLDS_FOLDER)

    def _count(self) -> deque[_Record]:
        """Take in the records that were appended since; all that are there."""
        if self._records is None:
            self._uncounted.extend(self._log.numbers())
            self._records = deque()
            self._last_listed = self._uncounted[-1] if self._uncounted else self._last_listed
        last = self._log.last or self._last_listed
        self._uncounted.extend(range(self._last_listed + 1, last + 1))
        self._last_listed = max(self._last_listed, last)
        while self._uncounted:
            number = self._uncounted[0]
            epoch = self._epoch(number)
            if epoch is not None:
                self._count_epoch(epoch)
            self._records.append(_Record(number, epoch is not None))
            self._uncounted.popleft()
        return self._records

    def _count_epoch(self, epoch: Epoch) -> None:
        sizes: dict[str, int] = {}
        for file in files_of(epoch):
            if file.store:
                self._foreign.update(
                    ((file.store, path), epoch.number) for path in (file.path, *file.objects)
                )
                continue
            sizes[file.path] = sizes.get(file.path, 0) + file.length
            for path in file.objects:
                sizes[path] = file.objects_bytes // len(file.objects)
        for path, size in sizes.items():
            self._objects[path] = epoch.number
            self._sizes[path] = max(size, self._sizes.get(path, 0))
            self._garbage.pop(path, None)
        if epoch.spark.folder:
            self._spark_folders[epoch.spark.folder] = epoch.number

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

    def _retire(self, end: int) -> int:
        """Remove the records before `end`; what only they referenced becomes garbage."""
        records = self._count()
        epochs = 0
        # Records first: a record without its files would be a lie, files without a record are
        # only waste. One by one, oldest first: the log relies on it.
        while records and records[0].number < end:
            self._log.forget(records[0].number)
            self._store.delete([record_path(records[0].number)])
            epochs += records.popleft().is_epoch
        for path in [path for path, last in self._objects.items() if last < end]:
            del self._objects[path]
            self._garbage[path] = self._sizes.pop(path)
        for at in [at for at, last in self._foreign.items() if last < end]:
            del self._foreign[at]
            self._holds_to_shrink.add(at[0])
        for folder in [folder for folder, last in self._spark_folders.items() if last < end]:
            del self._spark_folders[folder]
        return epochs

    def _remove_garbage(self, found: Found) -> dict[str, int]:
        held = found.all.paths
        free = {path: size for path, size in self._garbage.items() if path not in held}
        self._kept_by = None
        self._remove(list(free))
        for path in free:
            del self._garbage[path]
        self._kept_by = found
        self._store.delete(found.over)
        return free

    def _remove(self, paths: list[str]) -> None:
        # Remembered first: if the removal fails half way, some of them are gone.
        for path in paths:
            self._removed[path] = None
        while len(self._removed) > _REMOVED_MEMORY_MAX:
            self._removed.popitem(last=False)
        self._store.delete(paths)

    def _remove_spark_folders(self, now_s: float) -> None:
        """Those of older terms that no epoch names. Spark runs in one that is named, or in ours."""
        modified_s: dict[str, float] = {}
        for there in self._spark_store.list(SPARK_FOLDER):
            match = _SPARK_FOLDER.match(there.path)
            if match and int(match[2]) < self._term and match[1] not in self._spark_folders:
                modified_s[match[1]] = max(there.modified_s, modified_s.get(match[1], 0.0))
        for folder, at_s in modified_s.items():
            # A driver that has lost its leadership may not have noticed yet.
            if now_s - at_s > self._grace_s:
                self._spark_store.delete_folder(folder)

    def _shrink_holds(self) -> None:
        """Tell the checkpoints we share objects with which ones we no longer need."""
        if not self._holds_to_shrink:
            return
        try:
            job = read_job(self._store)
            for url in sorted(self._holds_to_shrink):
                needed = {path for at, path in self._foreign if at == url}
                if job is not None:
                    shrink_branch_hold(other_store(url), job.job_id, needed)
                self._holds_to_shrink.discard(url)
        except AssertionError:
            raise
        except Exception as error:
            # They keep more than they need until it succeeds, nothing worse.
            logger.warning("cairn could not shrink a hold on a checkpoint it shares: %s", error)
