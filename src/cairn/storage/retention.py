"""Remove files that no kept epoch needs.

The log decides what is retired. Each manifest has `oldest_kept`; all records below that of the
newest epoch are retired for everybody once it is put: no rollback, hold or read may start from
them. Only then are they removed, oldest first, one by one, so that the log has no gaps, and then
the objects that only they referenced.

Removal is safe, even when done late by a leader that has lost its leadership:
- *Retired objects* need no grace period. Every later epoch inherits from a record that is not
  retired, all of those are counted, and new files have a newer term's name or were written for
  it. One case remains: within our own term, a slow slot may write a base that was just removed,
  under the same name. The leader calls `find_lost_paths` before it publishes, on the thread that
  collects, and does not use such a file.
- *Orphans* (in no record) are removed only when their name has an older term and they are older
  than the grace period. Slots of older terms may still write them, but nobody can publish them;
  slots of our term write under our term, and use no file that the parent does not list.
- *Holds* are read after the put that retired something, and before anything is removed. The
  writer of a hold then reads the newest epoch: if its objects are not retired there, the hold is
  in time; otherwise it gives up. One of the two always sees the other. Objects that only a hold
  keeps are remembered, and removed once no hold lists them. A hold that has ended is removed
  with its objects.
- *Objects of other checkpoints*, which a branch shares, are removed there. The branch's hold
  shrinks after the records that needed them are retired here.

Always true here:
- every object that an epoch record in the log references exists;
- the newest epoch of the current lineage is never removed;
- when a hold cannot be read, nothing is removed and nothing is retired;
- after an epoch is committed, a failure to collect is logged and tried again after the next.
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
from cairn.storage.references import References, changes, files_of
from cairn.storage.store import Store, other_store

GRACE_S: Final = 3600.0
_REMOVED_MEMORY_MAX: Final = 100_000
_SPARK_FOLDER: Final = re.compile(r"(spark/(\d{12})(?:-\w+)?)/")


class Collected(NamedTuple):
    epochs_removed: int
    objects_removed: int
    bytes_removed: int


NOTHING: Final = Collected(0, 0, 0)


def object_paths(epochs: Iterable[Epoch]) -> set[str]:
    """Return the paths of the objects that these epochs have in their own checkpoint."""
    return {
        path
        for epoch in epochs
        for file in files_of(epoch)
        if not file.store
        for path in (file.path, *file.objects)
    }


def _own(files: Iterable[FileRef]) -> Iterator[str]:
    for file in files:
        if not file.store:
            yield file.path
            yield from file.objects


def _foreign(files: Iterable[FileRef]) -> Iterator[tuple[str, str]]:
    for file in files:
        if file.store:
            for path in (file.path, *file.objects):
                yield file.store, path


def _full_ancestor(log: Log, number: int) -> int:
    try:
        epoch = log.epoch(number)
        while not is_full(epoch.number, epoch.parent):
            assert epoch.parent is not None
            epoch = log.epoch(epoch.parent)
    except RestoreError:
        # It cannot be resolved; keeping records from the number on is safe.
        return number
    return epoch.number


class _Record(NamedTuple):
    number: int
    is_epoch: bool


class Collector:
    """Collects for one leader, from its takeover on.

    An epoch is kept while it is among the last `keep` of its lineage or, with `keep_s`, younger
    than that. Before each put the leader calls `oldest_to_keep` and `find_lost_paths`; after each
    won put, `after_epoch`. A start calls `sweep` once. All calls are on one thread.
    `spark_store` has Spark's folders, if they are not in the checkpoint.
    """

    def __init__(
        self,
        store: Store,
        log: Log,
        keep: int,
        term: int,
        *,
        keep_s: float | None = None,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        spark_store: Store | None = None,
    ) -> None:
        self._store = store
        self._spark_store = spark_store or store
        self._log = log
        self._term = term
        self._window = Window(log, keep, keep_s, clock_ms)
        # The existing records, ascending, and those that are not counted yet.
        self._records: deque[_Record] | None = None
        self._uncounted: deque[int] = deque()
        self._last_listed = FIRST_NUMBER - 1
        # Records are removed oldest first, so without the last one that references it an object or
        # a folder is garbage.
        self._counted: Epoch | None = None
        self._objects: References[str] = References()
        self._foreign: References[tuple[str, str]] = References()
        self._spark_folders: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        # Objects that exist though no record references them, and the holds that kept them.
        self._garbage: dict[str, int] = {}
        self._kept_by: Found | None = None
        self._known_holds: Known = {}
        self._removed: OrderedDict[str, None] = OrderedDict()
        self._holds_to_shrink: set[str] = set()

    def oldest_to_keep(self) -> int:
        """Return `oldest_kept` for the epoch that is about to be published."""
        oldest, oldest_kept = self._window.oldest(), self._log.oldest_kept()
        if oldest <= oldest_kept:
            return oldest_kept
        try:
            held = read_holds(self._store, known=self._known_holds).epochs
        except AssertionError:
            raise
        except Exception as error:
            logger.warning("cairn retires no epochs: holds cannot be read: %s", error)
            return oldest_kept
        for number in held:
            if number >= oldest_kept:
                oldest = min(oldest, _full_ancestor(self._log, number))
        return max(oldest, oldest_kept)

    def find_lost_paths(self, epoch: Epoch) -> set[str]:
        """Return the files of an epoch that were collected meanwhile: it must not be published."""
        removed = self._removed
        # Files of an epoch in the log exist.
        added, _ = changes(self._counted, epoch)
        return {
            path
            for file in added
            if not file.store
            for path in (file.path, *file.objects)
            if path in removed
        }

    def after_epoch(self) -> Collected:
        """Remove the records and objects that the newest epoch has retired. Lists only `holds/`.

        The epoch is committed: a failure is logged, and a later epoch tries again.
        """
        try:
            return self._collect()
        except AssertionError:
            raise
        except Exception as error:
            logger.warning("cairn could not remove all retired files: %s", error)
            return NOTHING

    def sweep(self, now_s: float) -> Collected:
        """Also remove objects and folders of earlier leaders that no record references."""
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
                # It was in an epoch once, so no epoch that is under way will use it.
                self._garbage[there.path] = there.size
                self._kept_by = found
            elif now_s - there.modified_s > GRACE_S:
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
        end = self._log.oldest_kept()
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
        """True if garbage that holds kept, or that could not be removed, may be free now."""
        if not self._garbage:
            return False
        found, now_ms = self._kept_by, time.time_ns() // 1_000_000
        if found is None or found.is_one_over(now_ms):
            return True
        return found.listing != self._store.list(HOLDS_FOLDER)

    def _count(self) -> deque[_Record]:
        """Count the records that were appended since, and return all that exist."""
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
        sizes = self._sizes
        added, removed = changes(self._counted, epoch)
        before = 0 if self._counted is None else self._counted.number
        self._counted = epoch
        new: dict[str, int] = {}
        for file in added:
            if file.store:
                continue
            if file.path not in sizes:
                new[file.path] = new.get(file.path, 0) + file.length
            for path in file.objects:
                if path not in sizes:
                    new[path] = file.objects_bytes // len(file.objects)
        sizes.update(new)
        for path in new:
            # It was garbage if an epoch has listed it again.
            self._garbage.pop(path, None)
        self._objects.advance(_own(added), _own(removed), before)
        self._foreign.advance(_foreign(added), _foreign(removed), before)
        if epoch.spark.folder:
            self._spark_folders[epoch.spark.folder] = epoch.number

    def _epoch(self, number: int) -> Epoch | None:
        try:
            record = self._log.read(number)
        except RestoreError:
            # A retired record may be left without the one it was written against, when a
            # leader died while removing them. Any other unreadable record stops collection.
            if number >= self._log.oldest_kept():
                raise
            return None
        return record if isinstance(record, Epoch) else None

    def _retire(self, end: int) -> int:
        """Remove the records before `end`; objects that only they referenced become garbage."""
        records = self._count()
        epochs = 0
        # Records first: a record without its files would be damage, files without a record are
        # only waste. One by one, oldest first: the log relies on it.
        while records and records[0].number < end:
            self._log.forget(records[0].number)
            self._store.delete([record_path(records[0].number)])
            epochs += records.popleft().is_epoch
        for path in self._objects.drop_before(end):
            self._garbage[path] = self._sizes.pop(path)
        self._holds_to_shrink |= {url for url, _ in self._foreign.drop_before(end)}
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
        # Remembered first: a removal that fails half way has removed some of them.
        for path in paths:
            self._removed[path] = None
        while len(self._removed) > _REMOVED_MEMORY_MAX:
            self._removed.popitem(last=False)
        self._store.delete(paths)

    def _remove_spark_folders(self, now_s: float) -> None:
        """Remove Spark's folders of older terms that no epoch references."""
        modified_s: dict[str, float] = {}
        for there in self._spark_store.list(SPARK_FOLDER):
            match = _SPARK_FOLDER.match(there.path)
            if match and int(match[2]) < self._term and match[1] not in self._spark_folders:
                modified_s[match[1]] = max(there.modified_s, modified_s.get(match[1], 0.0))
        for folder, at_s in modified_s.items():
            # A driver that was fenced may not have noticed yet.
            if now_s - at_s > GRACE_S:
                self._spark_store.delete_folder(folder)

    def _shrink_holds(self) -> None:
        """Reduce our holds on other checkpoints to the objects that we still need."""
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
