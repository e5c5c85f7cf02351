"""State in RocksDB, on the slot's disk: for state that does not fit in memory.

Committed changes are kept in memory, decoded, until there are enough of them or a base is to
be written; then they go to RocksDB as sorted files. What was read or changed lately stays
decoded. So a key that is used in every epoch costs what it costs on the heap, and RocksDB is
asked for the others, a batch of rows at a time.

`memory_bytes` is shared out: four eighths for what is decoded, three for changes that are not
written yet, one for RocksDB's block cache. When the first is full, the rows objects are made
older one after the other: each forgets what was not touched since it was last its turn.

After a change of parallelism a slot may serve its key groups from several databases, each
taken over from a base as it was; what they hold of other key groups is not looked at.

Always true here:
- all states of a key group are in one database;
- the folder is ours: emptied at the start and removed at the end, never trusted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from cairn.backends.base import Backend, Base
from cairn.backends.packing import Packing
from cairn.backends.registry import DEFAULT_MEMORY_BYTES
from cairn.backends.rocksdb.base import RocksBase
from cairn.backends.rocksdb.containers import make_rows
from cairn.backends.rocksdb.database import Database, Op, Tuning
from cairn.backends.rocksdb.files import RocksIndex, fetch_database, read_index, state_entry
from cairn.backends.rocksdb.rows import DIRTY_ENTRY_BYTES, RocksRows
from cairn.storage.files import store_of
from cairn.storage.manifest import FileRef
from cairn.storage.store import Store
from cairn.types.codec import Codec

if TYPE_CHECKING:
    from cairn.backends.overlay import Table

DATABASES_MAX: Final = 4
# A database of which less than this counts is copied rather than kept.
_OWNED_MIN: Final = 0.45
# Packing or writing so many rows takes a few milliseconds.
_STEP_OPS: Final = 8192


class _ByGroup(dict[int, RocksRows]):
    """Rows by key group, made when they are first asked for."""

    def __init__(self, make: Callable[[int], RocksRows]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, group: int) -> RocksRows:
        rows = self[group] = self._make(group)
        return rows


class RocksBackend(Backend):
    """Rows in RocksDB databases under one directory."""

    def __init__(self, directory: str, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        self.directory = directory
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        self.tuning = Tuning(memory_bytes // 8)
        self._cached_bytes_max = memory_bytes // 2
        self._dirty_bytes_max = memory_bytes // 4
        self._unwritten_bytes_max = memory_bytes * 3 // 8
        self.cached_bytes = 0
        self.dirty_bytes = 0
        self.frozen_bytes = 0
        self._clock: Iterator[RocksRows] = iter(())
        self._packings: dict[str, Packing] = {}
        self._rows: dict[str, _ByGroup] = {}
        self._databases: list[Database] = []
        self._home: Database | None = None
        self._folders = 0
        self._base: RocksBase | None = None

    # Rows

    def open_state(
        self, name: str, kind: str, keys: Codec, values: Codec, entries: Codec | None
    ) -> None:
        packing = Packing(kind, keys, values, entries)
        known = self._packings.get(name)
        if known is not None and state_entry(known, {}) != state_entry(packing, {}):
            for group in list(self._rows[name]):
                self.drop(name, group)
        elif known is not None:
            return
        self._packings[name] = packing
        self._rows[name] = _ByGroup(partial(make_rows, name, packing, self))

    def rows(self, name: str, group_index: int) -> RocksRows:
        return self._rows[name][group_index]

    def drop(self, name: str, group_index: int) -> None:
        self._cancel_base()
        rows = self._rows[name].pop(group_index, None) if name in self._rows else None
        if rows is None:
            return
        self.cached_bytes -= rows.young_bytes + rows.old_bytes
        self.dirty_bytes = max(0, self.dirty_bytes - len(rows.dirty) * DIRTY_ENTRY_BYTES)
        database = rows.database
        if database is not None:
            database.delete(rows.prefix)
            rows.unbind()
            self._let_go(database)

    def _let_go(self, database: Database) -> None:
        """Nobody needs a database that no rows are bound to."""
        if database.rows_bound == 0:
            self._databases.remove(database)
            if database is self._home:
                self._home = None
            database.destroy()

    def all_rows(self) -> Iterator[RocksRows]:
        # Copies: a base looks at them in the background while states and groups come.
        for by_group in list(self._rows.values()):
            yield from list(by_group.values())

    def prefetch(self, groups: Sequence[int], keys: Sequence[Any]) -> None:
        self._forget_if_full()
        if not self._databases:
            return
        is_young = dict.__contains__
        for by_group in self._rows.values():
            # Almost all are there: one look at each, at C speed, duplicates and all.
            unknown = [
                (group, key)
                for group, key in zip(groups, keys, strict=True)
                if not is_young(by_group[group], key)
            ]
            wanted: dict[int, list[Any]] = {}
            for group, key in dict.fromkeys(unknown):
                if not by_group[group].recall(key):
                    wanted.setdefault(group, []).append(key)
            if wanted:
                self._fetch([(by_group[group], missing) for group, missing in wanted.items()])

    def _fetch(self, wanted: list[tuple[RocksRows, list[Any]]]) -> None:
        """One question to each database."""
        asked: dict[Database | None, list[tuple[RocksRows, list[Any], dict[Any, Any]]]] = {}
        for rows, keys in wanted:
            asked.setdefault(rows.database, []).append((rows, keys, rows.frozen))
        for database, parts in asked.items():
            if database is None:
                for rows, keys, frozen in parts:
                    rows.fill(keys, [None] * len(keys), frozen)
                continue
            names: list[bytes] = []
            for rows, keys, _ in parts:
                key_bytes, prefix = rows.packing.key, rows.prefix
                names += [prefix + key_bytes(key) for key in keys]
            raws = database.get_many(names)
            at = 0
            for rows, keys, frozen in parts:
                rows.fill(keys, raws[at : at + len(keys)], frozen)
                at += len(keys)

    # Memory

    def cached(self, count: int) -> None:
        self.cached_bytes += count

    def changed(self, count: int) -> None:
        self.dirty_bytes += count
        unwritten = self.dirty_bytes + self.frozen_bytes
        if self.dirty_bytes > self._dirty_bytes_max or unwritten > self._unwritten_bytes_max:
            self.flush()
        self._forget_if_full()

    def _forget_if_full(self) -> None:
        """Between batches and epochs: nobody is in the middle of reading."""
        turns = 0
        while self.cached_bytes > self._cached_bytes_max:
            rows = next(self._clock, None)
            if rows is None:
                turns += 1
                if turns > 3:
                    # Each had its turn twice and holds nothing; the count was off.
                    self.cached_bytes = 0
                self._clock = self.all_rows()
            else:
                self.cached_bytes -= rows.rotate()

    def flush(self) -> None:
        """Everything into RocksDB."""
        if self._base is not None:
            self._base.settle()
        parts = self.freeze()
        try:
            for _ in self.write_frozen(parts):
                pass
        except BaseException:
            self.thaw(parts)
            raise

    def freeze(self) -> list[RocksRows]:
        parts = [rows for rows in self.all_rows() if rows.dirty]
        for rows in parts:
            rows.freeze()
        self.frozen_bytes, self.dirty_bytes = self.dirty_bytes, 0
        return parts

    def thaw(self, parts: list[RocksRows]) -> None:
        """A writer gave up: what is still frozen is dirty again."""
        for rows in parts:
            if rows.frozen:
                rows.thaw()
        self.dirty_bytes += self.frozen_bytes
        self.frozen_bytes = 0

    def write_frozen(self, parts: list[RocksRows]) -> Generator[None]:
        """Take frozen changes to RocksDB, in steps of a few milliseconds."""
        by_database: dict[Database, list[tuple[bytes, RocksRows]]] = {}
        for rows in parts:
            database = rows.database or self._place(rows.group)
            prefix = database.prefix(rows.name, rows.group)
            by_database.setdefault(database, []).append((prefix, rows))
        for database, found in by_database.items():
            writer = database.write_sorted()
            try:
                done = 0
                for prefix, rows in sorted(found, key=lambda pair: pair[0]):
                    ops: list[Op] = []
                    for piece in rows.ops(prefix):
                        ops += piece
                        done += len(piece)
                        if done >= _STEP_OPS:
                            yield
                            done = 0
                    ops.sort()
                    for at in range(0, len(ops), _STEP_OPS):
                        part = ops[at : at + _STEP_OPS]
                        writer.add(part)
                        done += len(part)
                        if done >= _STEP_OPS:
                            yield
                            done = 0
                writer.finish()
            finally:
                writer.discard()
            for _, rows in found:
                # In this order: whoever finds nothing frozen must find the database.
                if rows.database is None:
                    rows.bind(database)
                rows.frozen = {}
        self.frozen_bytes = 0

    # Databases

    @property
    def databases(self) -> Sequence[Database]:
        return self._databases

    def new_folder(self, kind: str) -> str:
        self._folders += 1
        return os.path.join(self.directory, f"{kind}{self._folders}")

    def _place(self, group: int) -> Database:
        """Where rows of a key group that have no database yet belong."""
        for by_group in self._rows.values():
            rows = by_group.get(group)
            if rows is not None and rows.database is not None:
                return rows.database
        if self._home is None:
            self._home = Database(self.new_folder("db"), self.tuning)
            self._databases.append(self._home)
        return self._home

    def load(self, store: Store, ref: FileRef, groups: range, scratch: str) -> bool:
        if ref.format != "rocksdb":
            return False
        index = read_index(store, ref)
        if not self._fits(index):
            return False
        self._cancel_base()
        store = store_of(store, ref)
        for entry in index.databases:
            owned = [group for group in entry.group_list() if group in groups]
            if not owned:
                continue
            database = fetch_database(store, entry, self.new_folder("db"), self.tuning)
            self._databases.append(database)
            for name in [name for name in entry.states if name not in self._packings]:
                # A state that the function no longer has must not come back with a later one.
                for group in owned:
                    database.delete(database.prefix(name, group))
                del database.states[name]
            self._serve(database, index, owned)
            counted = _keys(index, entry.group_list())
            if counted and _keys(index, owned) < _OWNED_MIN * counted:
                self._absorb(database)
        while len(self._databases) > DATABASES_MAX:
            others = [d for d in self._databases if d is not self._home]
            self._absorb(min(others, key=Database.size_bytes))
        return True

    def _fits(self, index: RocksIndex) -> bool:
        """Whether what is stored is as it is declared."""
        for name, packing in self._packings.items():
            stored = index.states.get(name)
            if stored is not None and state_entry(packing, stored.counts) != stored:
                return False
        return True

    def _serve(self, database: Database, index: RocksIndex, groups: Sequence[int]) -> None:
        for name in self._packings:
            counts = index.states[name].counts if name in index.states else {}
            for group in groups:
                rows = self.rows(name, group)
                assert rows.database is None and not rows.dirty, "loaded into rows that are empty"
                rows.clear()
                rows.old = {}
                rows.bind(database)
                rows.set_counts(*counts.get(group, (0, 0)))

    def _absorb(self, database: Database) -> None:
        """Copy what counts of a database to the home database, and remove it."""
        self.flush()
        bound = [rows for rows in self.all_rows() if rows.database is database]
        if self._home is None:
            self._home = Database(self.new_folder("db"), self.tuning)
            self._databases.append(self._home)
        home = self._home
        writer = home.write_sorted()
        try:
            for rows in sorted(bound, key=lambda r: home.prefix(r.name, r.group)):
                prefix, old = home.prefix(rows.name, rows.group), len(rows.prefix)
                writer.add((prefix + key[old:], raw) for key, raw in database.scan(rows.prefix))
            writer.finish()
        finally:
            writer.discard()
        for rows in bound:
            rows.bind(home)
        self._let_go(database)

    # Bases

    def begin_base(self, tables: Mapping[str, Table], groups: range) -> Base:
        assert self._base is None, "one base at a time"
        self._base = RocksBase(self, groups)
        return self._base

    def compact(self) -> None:
        # Tombstones of large rows are small: by their size alone they would wait for long.
        for database in list(self._databases):
            database.compact()

    def base_closed(self) -> None:
        self._base = None

    def packings(self) -> Mapping[str, Packing]:
        return self._packings

    def _cancel_base(self) -> None:
        if self._base is not None:
            self._base.cancel()

    def close(self) -> None:
        self._cancel_base()
        for by_group in self._rows.values():
            for rows in by_group.values():
                rows.database = None
            by_group.clear()
        for database in self._databases:
            database.close()
        self._databases = []
        self._home = None
        self.cached_bytes = self.dirty_bytes = self.frozen_bytes = 0
        self._clock = iter(())
        shutil.rmtree(self.directory, ignore_errors=True)


def _keys(index: RocksIndex, groups: Sequence[int]) -> int:
    return sum(
        state.counts.get(group, (0, 0))[0] for state in index.states.values() for group in groups
    )
