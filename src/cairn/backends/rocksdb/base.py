"""A base out of RocksDB: a checkpoint by hard links, of which only new files are uploaded.

Changes that are unwritten when the base begins are frozen and written to RocksDB in steps; then
the checkpoint is taken. Later changes stay in memory until then, so the base has none of them. A
thread that cannot wait (memory is full) does the remaining steps itself.

Always true here:
- one thread at a time does a step;
- the frozen changes of a cancelled base become unwritten changes again;
- only objects that the parent epoch lists for this range are shared; others are uploaded.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from cairn.backends.contract import Base, BaseCancelledError, BaseTarget
from cairn.backends.rocksdb.database import RocksDatabase, StoredSst
from cairn.backends.rocksdb.files import (
    RocksIndex,
    SstFile,
    StoredDatabase,
    digest_file,
    encode_index,
)
from cairn.crash import crash_point
from cairn.storage.files import StateFile
from cairn.storage.pack import state_path

if TYPE_CHECKING:
    from cairn.backends.rocksdb.backend import RocksBackend

_GROUPS_ALL = (0, (1 << 16) - 1)


class _Checkpoint:
    def __init__(self, database: RocksDatabase, folder: str, groups: list[int]) -> None:
        self.database = database
        self.folder = folder
        self.groups = groups
        self.states = dict(database.states)
        # Compaction goes on: a linked file was live before or is live after.
        self.live = database.live_files()
        database.checkpoint(folder)
        self.live.update(database.live_files())


class RocksBase(Base):
    def __init__(self, backend: RocksBackend, groups: range) -> None:
        self._backend = backend
        self._groups = groups
        self._lock = threading.Lock()
        self._frozen = backend.freeze()
        self._steps: Generator[None] = backend.write_frozen(self._frozen)
        self._states = backend.describe_states(groups)
        self._checkpoints: list[_Checkpoint] | None = None
        self._cancelled = False
        self._closed = False

    # Taking the checkpoint

    def step(self) -> bool:
        """Do a step towards the checkpoint, or take it; False once it is taken."""
        with self._lock:
            if self._checkpoints is not None or self._cancelled:
                return False
            try:
                for _ in self._steps:
                    return True
                self._checkpoints = self._take()
            except BaseException:
                self._cancel()
                raise
            return False

    def settle(self) -> None:
        """Take the checkpoint now, without waiting for the writer."""
        while self.step():
            pass

    def _take(self) -> list[_Checkpoint]:
        groups: dict[RocksDatabase, set[int]] = {}
        for rows in self._backend.all_rows():
            if isinstance(rows.database, RocksDatabase) and rows.group in self._groups:
                groups.setdefault(rows.database, set()).add(rows.group)
        return [
            _Checkpoint(database, self._backend.new_folder("base"), sorted(owned))
            for database, owned in groups.items()
        ]

    def cancel(self) -> None:
        with self._lock:
            if not self._cancelled:
                self._cancel()

    def _cancel(self) -> None:
        self._cancelled = True
        if self._checkpoints is None:
            self._steps.close()
            self._backend.thaw(self._frozen)

    def close(self) -> None:
        self.cancel()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for checkpoint in self._checkpoints or ():
                shutil.rmtree(checkpoint.folder, ignore_errors=True)
        self._backend.end_base()

    # Writing it

    def write(self, target: BaseTarget, pace: Callable[[], None]) -> StateFile:
        while self.step():
            pace()
        self._check()
        assert self._checkpoints is not None
        known = {path for ref in target.known if not ref.store for path in ref.objects}
        databases = []
        uploaded = 0
        try:
            for checkpoint in self._checkpoints:
                database, size = self._upload(checkpoint, target, known, pace)
                databases.append(database)
                uploaded += size
        except FileNotFoundError as error:
            # The base was closed meanwhile, and its links are gone.
            self._check(error)
            raise
        index = RocksIndex(
            operator=target.operator,
            epoch=target.epoch,
            states=self._states,
            databases=databases,
        )
        self._check()
        digest, data = encode_index(index)
        path = state_path(target.term, f"{digest}.rocks")
        target.store.put(path, data)
        files = {file.path: file.size for database in databases for file in database.files}
        return StateFile(
            digest,
            "base",
            len(data),
            index.rows,
            path=path,
            format="rocksdb",
            objects=tuple(files),
            objects_bytes=sum(files.values()),
            uploaded_bytes=uploaded + len(data),
        )

    def _upload(
        self, checkpoint: _Checkpoint, target: BaseTarget, known: set[str], pace: Callable[[], None]
    ) -> tuple[StoredDatabase, int]:
        by_digest = {os.path.basename(path).partition(".")[0]: path for path in known}
        files: list[SstFile] = []
        meta: dict[str, bytes] = {}
        uploaded = 0
        for name in sorted(os.listdir(checkpoint.folder)):
            local = os.path.join(checkpoint.folder, name)
            if not name.endswith(".sst"):
                if not name.endswith(".log"):
                    with open(local, "rb") as file:
                        meta[name] = file.read()
                continue
            stored = checkpoint.database.stored.get(name)
            if stored is None or stored.path not in known:
                digest = stored.digest if stored is not None else digest_file(local)
                size = os.path.getsize(local)
                path = by_digest.get(digest)
                if path is None:
                    path = state_path(target.term, f"{digest}.sst")
                    target.store.put_file(path, local)
                    uploaded += size
                    crash_point("slot.sst.uploaded")
                stored = checkpoint.database.stored[name] = StoredSst(digest, path, size)
                pace()
                self._check()
            first, last, level = _key_range(checkpoint.live.get(name))
            files.append(SstFile(name, stored.digest, stored.path, stored.size, first, last, level))
        return (
            StoredDatabase(
                groups=_runs(checkpoint.groups), states=checkpoint.states, files=files, meta=meta
            ),
            uploaded,
        )

    def _check(self, cause: BaseException | None = None) -> None:
        if self._cancelled:
            raise BaseCancelledError from cause


def _key_range(live: dict[str, Any] | None) -> tuple[int, int, int]:
    """Return first and last key group, and level; an unknown file may hold any group."""
    if live is None or not live["start_key"] or not live["end_key"]:
        return *_GROUPS_ALL, 0
    first = int.from_bytes(live["start_key"][:2], "big")
    return first, int.from_bytes(live["end_key"][:2], "big"), live["level"]


def _runs(groups: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for group in groups:
        if runs and runs[-1][1] == group - 1:
            runs[-1] = (runs[-1][0], group)
        else:
            runs.append((group, group))
    return runs
