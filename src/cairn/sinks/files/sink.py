"""Files in a folder: Parquet, JSON lines or CSV, written by the slots, published by the driver.

    <folder>/[<column>=<value>/…]part-<epoch>-<subtask>-<owner>-<digest>.parquet
    <folder>/_cairn/<job>/<sink>/epochs/<epoch>.json     the files of an epoch: the mark
    <folder>/_cairn/<job>/<sink>/staged/                 durable, invisible; without a list only
    <folder>/_cairn/<job>/<sink>/merges/                 see `compaction`; with a list only
    <folder>/_cairn/<job>/<sink>/below/recovered-<epoch> unlisted files of epochs below are deleted
    <folder>/_cairn/<job>/<sink>/below/trimmed-<epoch>   epochs below are published
    <folder>/_spark_metadata/                            the list, see `spark_list`

Without a list (a disk, HDFS) files are staged and renamed into the folder: a plain reader sees
published files only, and a reader that uses the marks sees whole epochs only. With a list
(object stores, where a rename is a copy) files are written once, under their final names, and
one entry of the list publishes an epoch to Spark. `list_published` reads marks or list.

Always true here:
- a file is named by its sink, its place and its content, so an attempt that runs again cannot
  change a file, and no file replaces another;
- the mark of an epoch is written once all its files are published, and proves the commit; with
  a list, a note replaces old marks;
- an epoch enters the list once: the driver that adds it has read the list, then looked for the
  mark, and its files leave the list only after the mark is written;
- a commit raises if a file is missing, and publishes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from cairn.crash import crash_point
from cairn.errors import CommitError, PlanError
from cairn.ids import digest
from cairn.sinks.base import (
    Committable,
    Execution,
    Sink,
    SinkContext,
    Writer,
    causes,
    without_password,
)
from cairn.sinks.files.compaction import Compactor
from cairn.sinks.files.formats import make_format
from cairn.sinks.files.partitions import Partitions
from cairn.sinks.files.published import (
    CAIRN_FOLDER,
    files_without_list,
    find_marks,
    mark_path,
    parse_name,
    spark_url,
)
from cairn.sinks.files.spark_list import Listed, Listing, Replacement, SparkList, is_compact
from cairn.sinks.files.writer import FilesWriter, Target
from cairn.storage.store import is_away, is_bucket, open_store

THREADS: Final = 16
MARKS_KEPT: Final = 100
"""Marks that stay when old ones are removed, which happens at twice this number."""
MOVED_ALONE_MAX: Final = 16
_OPENED: Final = (
    "context", "_store", "_spark_url", "_spark_list", "home", "owner", "_partitions", "_compactor",
)  # fmt: skip


class Files(Sink):
    """Files in a local folder, HDFS or an object store, each row exactly once."""

    def __init__(
        self,
        path: str,
        *,
        format: str = "parquet",
        partition_by: str | Sequence[str] = (),
        compression: str | None = None,
        file_bytes_target: int = 128 * 1024 * 1024,
        header: bool = True,
        listed: bool | None = None,
        compact: bool = False,
        compact_grace_s: float = 3600.0,
    ) -> None:
        """`listed` is the default on object stores; `compact` merges small files and needs it.

        Every tenth entry of a list names all files: `compact` also keeps that short.

        `header` is for CSV. Files that were merged into others are deleted after
        `compact_grace_s`, when readers no longer use them.
        """
        self.path = str(path) if "://" in str(path) else os.path.abspath(path)
        self.format = make_format(format, compression, header=header)
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else (*partition_by,)
        if file_bytes_target < 1:
            raise PlanError(f"file_bytes_target must be positive, found {file_bytes_target}")
        self.file_bytes_target = file_bytes_target
        self.listed = is_bucket(self.path) if listed is None else listed
        if self.listed and self.path.startswith(("az://", "azure://")):
            raise PlanError(
                f"Spark cannot read a list of files in {self.path!r}: it lacks the scheme\n"
                "  next: use abfss://<container>@<account>.dfs.core.windows.net/<path>"
            )
        # Files are renamed one by one; readers that use `list_published` still see whole epochs.
        self.shows = "epochs" if self.listed else "pieces"
        if compact and not self.listed:
            raise PlanError(
                f"compact=True needs a list of published files, and {self.path!r} has none\n"
                "  next: pass listed=True too"
            )
        self.compact = compact
        self.compact_grace_s = compact_grace_s

    def open(self, context: SinkContext) -> None:
        super().open(context)
        self._partitions = Partitions(self.partition_by, context.schema)
        why = self.format.check(self._partitions.schema)
        if why is not None:
            raise PlanError(
                f"sink {context.uid!r} cannot write its rows as {self.format.name}\n"
                f"  {why}\n"
                "  next: use format='parquet', or change the column in a map before the sink"
            )
        self._store = open_store(self.path)
        self._spark_url = spark_url(self._store)
        self._spark_list: SparkList | None = None
        self.home = f"{CAIRN_FOLDER}/{context.job_id}/{context.uid}"
        self.owner = digest(self.home.encode())[:12]
        if context.scratch is None:
            self._check_list()
        self._compactor: Compactor | None = None

    def _check_list(self) -> None:
        if not self.listed:
            if self._list().exists():
                raise PlanError(
                    f"{self.path!r} has a list of published files (_spark_metadata); Spark ignores "
                    "files that are not in it\n  next: pass listed=True"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in _OPENED}

    @property
    def target(self) -> str:
        return f"files in {without_password(self._store.url)}"

    def is_away(self, error: Exception) -> bool:
        """True if the store of the folder cannot be reached now, and may be later."""
        return any(is_away(each) for each in causes(error))

    def close(self) -> None:
        if getattr(self, "_compactor", None) is not None:
            assert self._compactor is not None
            self._compactor.close()
            self._compactor = None

    # Slots

    def writer(self, epoch: int, subtask: int, execution: Execution) -> Writer:
        target = Target(
            store=self._store,
            stored_as=(lambda name: name) if self.listed else self.staging_path,
            format=self.format,
            partitions=self._partitions,
            file_bytes_target=self.file_bytes_target,
            scratch=self.context.scratch,
        )
        # Equal rows of another sink in this folder, or of the next file, batch or round, are
        # other rows.
        place = f"{self.home}/{execution.batch}/{execution.round}"
        return FilesWriter(target, f"part-{epoch:012d}-{subtask:05d}-{self.owner}", place)

    def staging_path(self, name: str) -> str:
        return f"{self.home}/staged/{name}"

    # The driver

    def commit(self, epoch: int, committables: Sequence[Committable], batch: int = 0) -> None:
        files = [file for committable in committables for file in committable["files"]]
        mark = mark_path(self.home, epoch, batch)
        if not files or self._store.exists(mark):
            return
        number = 0
        if not self.listed:
            self._publish_by_rename([file["name"] for file in files])
        if self.listed or self._list().exists():
            # Another job may have created a list since this one started.
            number = self._publish_by_list(epoch, files, mark)
        crash_point("driver.sink.unmarked")
        self._store.put(mark, msgspec.json.encode({"files": files}))
        if self.listed and epoch % MARKS_KEPT == 0:
            self._trim_marks()
        if self.compact:
            self._list_merges(number)
            self._compacting().consider()

    def _publish_by_rename(self, names: list[str]) -> None:
        missing = self._missing([self.staging_path(name) for name in names])
        published = [name for name in names if self.staging_path(name) in missing]
        self._refuse_missing(self._missing(published))
        if len(names) < MOVED_ALONE_MAX:
            for name in names:
                self._store.move(self.staging_path(name), name)
                crash_point("driver.sink.piece")
            return
        # Each waits for the disk; together they wait about as long as one.
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda name: self._store.move(self.staging_path(name), name), names):
                crash_point("driver.sink.piece")

    def _publish_by_list(self, epoch: int, files: list[dict[str, Any]], mark: str) -> int:
        spark_list = self._list()
        names = [file["name"] for file in files]
        added = [spark_list.line(file["name"], file["bytes"]) for file in files]

        def choose_added(listing: Listing) -> Sequence[Listed] | None:
            # In this order: files leave the list only after the mark is written, and files are
            # deleted only after the note about it and another entry.
            if names[0] in listing.names or self._store.exists(mark):
                return None
            below = self._below()
            if epoch < below["trimmed"]:
                return None
            if epoch < below["recovered"]:
                self._refuse_missing(set(names))
            if missing := self._missing(names):
                # Staged by a run for which the folder had no list.
                self._publish_by_rename(sorted(missing))
            if listing.next_number == 0:
                return [*self._files_of_before(), *added]
            return added

        return self._append(choose_added)

    def _append(self, choose_added: Callable[[Listing], Sequence[Listed] | None]) -> int:
        """Create an entry, a `.compact` one with merges, and return its number."""
        number, is_merging = 0, False

        def change(listing: Listing) -> Replacement | None:
            nonlocal number, is_merging
            number, is_merging = listing.next_number, False
            added = choose_added(listing)
            if added is None:
                return None
            if self.compact and is_compact(number):
                is_merging = True
                return Replacement(added, self._compacting().apply_merges(listing))
            return Replacement(added)

        self._list().append(change)
        if is_merging:
            self._compacting().confirm_entry()
        return number

    def _list_merges(self, number: int) -> None:
        """Create empty entries up to a `.compact` one if no epoch's entry includes the merges."""
        while self._compacting().is_overdue(number):
            number = self._append(lambda listing: ())

    def _files_of_before(self) -> list[Listed]:
        found = files_without_list(self._store)
        return [self._list().line(file.path, file.size) for file in found]

    def _missing(self, paths: list[str]) -> set[str]:
        if len(paths) < 2:
            return {path for path in paths if not self._store.exists(path)}
        # Each is a request to a bucket.
        with ThreadPoolExecutor(min(THREADS, len(paths))) as pool:
            there = pool.map(self._store.exists, paths)
            return {path for path, is_there in zip(paths, there, strict=True) if not is_there}

    def _refuse_missing(self, missing: set[str]) -> None:
        if missing:
            raise CommitError(
                f"sink {self.context.uid!r} cannot publish an epoch: {len(missing)} of its files "
                f"are gone\n  first: {self._store.url}/{min(missing)}\n"
                "  next: restore the files; this attempt has published nothing of the epoch",
                paths=sorted(missing),
            )

    def newest_mark(self) -> int | None:
        marks = find_marks(self._store, f"{self.home}/epochs")
        return max((mark.epoch for mark in marks), default=None)

    def recover(self, before_epoch: int) -> None:
        self._remove_unfinished(before_epoch)
        if not self.listed:
            staged = self._store.list(f"{self.home}/staged/")
            self._store.delete([f.path for f in staged if self._is_before(f.path, before_epoch)])
            return
        self._trim_marks()
        stored = self._store.list()
        compactor = self._compacting()
        live = self._live()
        merges = compactor.leftovers(stored, live)
        kept = live | compactor.sources_in_grace()
        left = [
            found.path
            for found in stored
            if found.path not in kept and self._is_before(found.path, before_epoch)
        ]
        if not left and not merges:
            return
        # A fenced driver may be about to list files that are deleted here. After the note it
        # does not start to, and after another entry it cannot finish.
        self._note("recovered", before_epoch)
        compactor.revoke(merges)
        self._list().append(
            lambda listing: Replacement([] if listing.next_number else self._files_of_before())
        )
        live = self._live()
        self._store.delete([path for path in left if path not in live])
        compactor.remove(merges, live)

    def _remove_unfinished(self, before_epoch: int) -> None:
        """Delete partial files of slots that were killed while storing, or of a killed merge."""
        unfinished = self._store.list_unfinished("" if self.listed else self.staging_path(""))
        left = []
        for path, target in unfinished.items():
            name = parse_name(target)
            # A merge without its file is abandoned, also by a newer driver at work.
            if name is not None and name.owner == self.owner:
                left += [path] if name.is_merged or name.epoch < before_epoch else []
        self._store.delete(left)

    def _live(self) -> set[str]:
        listing = self._list().read()
        if listing.next_number:
            return set(listing.names)
        return {found.path for found in files_without_list(self._store)}

    def _trim_marks(self) -> None:
        """Delete old marks: the list proves commits, marks are for files that have left it."""
        marks = find_marks(self._store, f"{self.home}/epochs")
        if len(marks) < 2 * MARKS_KEPT:
            return
        oldest = marks[-MARKS_KEPT].epoch
        # In this order: a reader that misses a mark finds the note.
        self._note("trimmed", oldest)
        self._store.delete([mark.path for mark in marks if mark.epoch < oldest])

    def _note(self, kind: str, epoch: int) -> None:
        prefix = f"{self.home}/below/{kind}-"
        self._store.put(f"{prefix}{epoch:012d}", b"")
        notes = [note.path for note in self._store.list(f"{self.home}/below")]
        self._store.delete([path for path in notes if path.startswith(prefix)][:-1])

    def _below(self) -> dict[str, int]:
        """Return the epochs of the newest notes."""
        newest = {"recovered": 0, "trimmed": 0}
        for note in self._store.list(f"{self.home}/below"):
            kind, _, epoch = note.path.rpartition("/")[2].partition("-")
            newest[kind] = int(epoch)
        return newest

    def _is_before(self, path: str, epoch: int) -> bool:
        name = parse_name(path)
        return (
            name is not None
            and name.owner == self.owner
            and not name.is_merged
            and name.epoch < epoch
        )

    def _list(self) -> SparkList:
        if self._spark_list is None or self._spark_list.store is not self._store:
            self._spark_list = SparkList(self._store, self._spark_url)
        return self._spark_list

    def _compacting(self) -> Compactor:
        if self._compactor is None:
            self._compactor = Compactor(
                self._store,
                # Not shared: another thread reads it.
                SparkList(self._store, self._spark_url),
                self.format,
                home=self.home,
                owner=self.owner,
                file_bytes_target=self.file_bytes_target,
                grace_s=self.compact_grace_s,
            )
        return self._compactor
