"""Merge small published files into larger ones, without a reader noticing.

    plan written -> merged file stored -> a `.compact` entry of the list has the merged file
    in place of its sources -> a grace period -> sources deleted, plan deleted

A thread of the driver writes plans and merged files. The commit that creates the next
`.compact` entry includes the merges that are ready: with that entry all readers change over at
once. If other sinks of the folder create those entries, an extra one is created. Files of one
folder and of similar size are merged, eight or more at a time, so a row is rewritten only a few
times, however long the job runs.

Always true here:
- sources and their merged file are never in the list together;
- only files of this job and sink are merged, and only once their epochs have marks: a
  repeated commit finds its epoch in the list, by its mark, or by the note of removed marks;
- a driver that creates the entry has read the list and then seen the plan; a driver that
  abandons a merge deletes the plan, creates an entry, and deletes the merged file only if it is
  not in the list then;
- a source is deleted only after the entry without it is durable and the grace period is over.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final

import msgspec

from cairn.errors import CommitError, CorruptFileError
from cairn.ids import new_id
from cairn.logs import logger
from cairn.sinks.files.formats import Format
from cairn.sinks.files.published import find_marks, parse_name, read_mark
from cairn.sinks.files.spark_list import COMPACT_INTERVAL, Listed, Listing, SparkList
from cairn.storage.store import NotFoundError, Store, StoredObject, is_transient

MERGE_FILES_MIN: Final = 8
# The limit of one round, in target sizes: all merges of a round wait for one entry.
ROUND_TARGETS_MAX: Final = 4


class Merge(msgspec.Struct, frozen=True):
    """A plan: one file in place of several."""

    path: str
    """The path of the plan itself."""
    merged: str
    sources: list[str]
    bytes: int = 0
    published_s: float | None = None


class Compactor:
    """Merges the files of one sink. `wall_clock` can be replaced in tests."""

    def __init__(
        self,
        store: Store,
        spark_list: SparkList,
        format: Format,
        *,
        home: str,
        owner: str,
        file_bytes_target: int,
        grace_s: float,
    ) -> None:
        self._store = store
        self._list = spark_list
        self._format = format
        self._home = home
        self._owner = owner
        self._target = file_bytes_target
        self._grace_s = grace_s
        self.wall_clock = time.time
        self._lock = threading.Lock()
        self._ready: list[Merge] = []
        self._ready_at = 0
        self._applied: list[Merge] = []
        self._marked: set[str] = set()
        self._refused: set[str] = set()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._commits = 0

    # Beside the commits

    def consider(self) -> None:
        """Start a round in the background if one is due; called after each commit."""
        self._commits += 1
        if self._thread is not None and self._thread.is_alive():
            return
        with self._lock:
            is_due = not self._ready and self._commits % (COMPACT_INTERVAL // 2) == 0
        if is_due and not self._closed.is_set():
            self._thread = threading.Thread(target=self._run, name="cairn-compact", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for the round in progress; `recover` handles merges that are in no entry."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.round()
        except Exception:
            # Harmless: the files stay as they are, and the next round tries again.
            logger.warning("merging small files in %s failed", self._store.url, exc_info=True)

    def round(self) -> None:
        """Delete sources whose grace period is over, then prepare merges of small files."""
        listing = self._list.read()
        names = listing.names
        merges = [self._settle(merge, names) for merge in self._plans()]
        self._expire(merges, names)
        self._ready_at = listing.next_number
        budget = ROUND_TARGETS_MAX * self._target
        for sources in self._groups(listing):
            budget -= sum(size for _, size in sources)
            if self._closed.is_set():
                return
            self._merge(sources)
            if budget <= 0:
                return

    def _groups(self, listing: Listing) -> Iterable[list[tuple[str, int]]]:
        """Yield groups of files to merge, with their sizes."""
        small = []
        for file in listing.files:
            name = self._list.name(file)
            if name is None or file.size >= self._target / 2 or name in self._refused:
                continue
            parsed = parse_name(name)
            # Another extension means another format or other settings.
            if parsed is not None and parsed.extension == self._format.extension:
                small.append((name, file.size))
        marked = self._with_mark([name for name, _ in small])
        tiers: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
        for name, size in small:
            if name in marked:
                tier = int(math.log2(size + 1) / 3)
                tiers[name.rpartition("/")[0], tier].append((name, size))
        for files in tiers.values():
            group: list[tuple[str, int]] = []
            for candidate in files:
                group.append(candidate)
                if sum(size for _, size in group) >= self._target:
                    yield group
                    group = []
            if len(group) >= MERGE_FILES_MIN:
                yield group

    def _with_mark(self, names: list[str]) -> set[str]:
        """Return the files of this sink that are merged files or whose epochs have marks."""
        found = set()
        wanted: dict[int, set[str]] = defaultdict(set)
        for name in names:
            parsed = parse_name(name)
            if parsed is not None and parsed.owner == self._owner:
                if parsed.is_merged or name in self._marked:
                    found.add(name)
                else:
                    wanted[parsed.epoch].add(name)
        self._marked &= found
        if not wanted:
            return found
        marks = find_marks(self._store, f"{self._home}/epochs")
        for epoch, of_epoch in wanted.items():
            # Epochs are marked in order, and the oldest marks are removed.
            found |= of_epoch if marks and epoch < marks[0].epoch else set()
        for mark in marks:
            if mark.epoch in wanted:
                of_mark = {file["name"] for file in read_mark(self._store, mark.path)}
                found |= of_mark & wanted[mark.epoch]
        self._marked |= found
        return found

    def _merge(self, files: list[tuple[str, int]]) -> None:
        sources = [name for name, _ in files]
        parsed = parse_name(sources[0])
        assert parsed is not None
        id, folder = new_id(), sources[0].rpartition("/")[0]
        name = f"part-{parsed.epoch:012d}-merged-{self._owner}-{id}{self._format.extension}"
        merge = Merge(
            f"{self._home}/merges/{id}.json", f"{folder}/{name}" if folder else name, sources
        )
        try:
            self._put(merge)
            with tempfile.TemporaryDirectory(prefix="cairn-merge") as scratch:
                local = os.path.join(scratch, "merged")
                self._write_merged(local, files)
                self._store.put_file(merge.merged, local)
                size = os.path.getsize(local)
        except Exception:
            # Harmless: the files stay as they are, and no other driver has this merge.
            logger.warning("small files in %s are not merged", self._store.url, exc_info=True)
            self._store.delete([merge.path, merge.merged])
            return
        with self._lock:
            self._ready.append(msgspec.structs.replace(merge, bytes=size))

    def _write_merged(self, local: str, files: list[tuple[str, int]]) -> None:
        """Write the merged file. Files that fail are left out of later rounds."""
        read = []

        def contents() -> Iterator[bytes]:
            for name, size in files:
                read.append(name)
                yield self._content(name, size)

        try:
            self._format.merge(local, contents())
        except CommitError:
            # Their schemas differ.
            self._refused |= {name for name, _ in files}
            raise
        except Exception as error:
            if not is_transient(error):
                self._refused.add(read[-1])
            raise

    def _content(self, name: str, size: int) -> bytes:
        content = self._store.get(name)
        if len(content) != size:
            path = f"{self._store.url}/{name}"
            raise CorruptFileError(
                f"a published file is damaged\n  file: {path}\n"
                f"  expected: {size} bytes, found {len(content)}",
                path=path,
            )
        return content

    # In commits

    def is_overdue(self, next_number: int) -> bool:
        """True if merges wait while other sinks create the `.compact` entries."""
        with self._lock:
            waits = next_number - self._ready_at
            return bool(self._ready) and waits >= 2 * COMPACT_INTERVAL

    def apply_merges(self, listing: Listing) -> list[Listed]:
        """Return all files of the list, with merged files that are ready in place of sources."""
        files = list(listing.files)
        with self._lock:
            self._applied = []
            for merge in list(self._ready):
                by_name = {self._list.name(file): i for i, file in enumerate(files)}
                is_there = all(source in by_name for source in merge.sources)
                if not is_there or not self._store.exists(merge.path):
                    # In the list already, which the next round notices; or abandoned by
                    # another driver, which removes it.
                    self._ready.remove(merge)
                    continue
                first = min(by_name[source] for source in merge.sources)
                gone = {by_name[source] for source in merge.sources}
                files[first] = self._list.line(merge.merged, merge.bytes)
                files = [file for i, file in enumerate(files) if i == first or i not in gone]
                self._applied.append(merge)
        return files

    def confirm_entry(self) -> None:
        """Note that the entry of the last `apply_merges` is in the list."""
        with self._lock:
            applied, self._applied = self._applied, []
            self._ready = [merge for merge in self._ready if merge not in applied]
        for merge in applied:
            self._put(msgspec.structs.replace(merge, published_s=self.wall_clock()))

    # After a takeover

    def leftovers(self, stored: Sequence[StoredObject], names: Set[str]) -> list[Merge]:
        """Return merges of earlier drivers that are in no entry; expire the others."""
        plans = self._plans()
        merges = [self._settle(merge, names) for merge in plans]
        self._expire(merges, names)
        known = {merge.merged for merge in merges} | in_grace(merges)
        strays = []
        for found in stored:
            parsed = parse_name(found.path)
            if parsed is not None and parsed.is_merged and parsed.owner == self._owner:
                if found.path not in names and found.path not in known:
                    strays.append(Merge("", found.path, []))
        return [merge for merge in merges if merge.published_s is None] + strays

    def revoke(self, leftovers: Sequence[Merge]) -> None:
        """Delete their plans: from here on no driver starts an entry with them."""
        self._store.delete([merge.path for merge in leftovers if merge.path])

    def remove(self, leftovers: Sequence[Merge], names: Set[str]) -> None:
        """Delete their merged files, unless `names`, the list since `revoke`, has them."""
        gone = []
        for merge in leftovers:
            if merge.merged not in names:
                gone.append(merge.merged)
            elif merge.path:
                self._put(msgspec.structs.replace(merge, published_s=self.wall_clock()))
        self._store.delete(gone)

    def sources_in_grace(self) -> set[str]:
        """Return sources that have left the list, but that readers may still use."""
        return in_grace(self._plans())

    # Plans

    def _plans(self) -> list[Merge]:
        plans = []
        for found in self._store.list(f"{self._home}/merges"):
            try:
                data = self._store.get(found.path)
                plans.append(msgspec.json.decode(data, type=Merge))
            except NotFoundError:
                continue
            except msgspec.MsgspecError as error:
                path = f"{self._store.url}/{found.path}"
                raise CorruptFileError(
                    f"the plan of a merge of files is damaged: {error}\n  file: {path}", path=path
                ) from error
        return plans

    def _put(self, merge: Merge) -> None:
        self._store.put(merge.path, msgspec.json.encode(merge))

    def _settle(self, merge: Merge, names: Set[str]) -> Merge:
        """Set the time of a merge whose driver died right after it created the entry."""
        if merge.published_s is not None or merge.merged not in names:
            return merge
        settled = msgspec.structs.replace(merge, published_s=self.wall_clock())
        self._put(settled)
        return settled

    def _expire(self, merges: list[Merge], names: Set[str]) -> None:
        for merge in merges:
            if merge.published_s is None:
                continue
            if self.wall_clock() - merge.published_s >= self._grace_s:
                self._store.delete([source for source in merge.sources if source not in names])
                self._store.delete([merge.path])


def in_grace(merges: Iterable[Merge]) -> set[str]:
    return {s for merge in merges if merge.published_s is not None for s in merge.sources}
