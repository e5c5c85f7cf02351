"""State in RocksDB, on the slot's disk: for state that does not fit in memory.

Committed changes stay in memory, decoded, until there are enough of them or a base begins; then
they are written to RocksDB as sorted files. Contents that were read or changed lately stay
decoded. So a key that is used in every epoch costs what it costs on the heap, and the other keys
are read from RocksDB a batch of rows at a time.

`memory_bytes` is divided: four eighths for decoded contents, three for unwritten changes, one for
RocksDB's block cache. When the first part is full, the `RocksRows` objects are rotated in turn:
each drops the contents that were not used since its last rotation.

State of batches is in arrays as far as memory goes (`columns`, `mapped_rows`), and uses none of the
above until it is written to a database.

After a change of parallelism a slot may serve its key groups from several databases, each the
unchanged files of a base; rows of other key groups in them are ignored.

Always true here:
- all states of a key group are in one database;
- the backend owns its folder: it is emptied at the start and removed at the end, never trusted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from cairn.backends.contract import Backend, Base, Change
from cairn.backends.heap.backend import HeapBase
from cairn.backends.packing import Packing
from cairn.backends.registry import DEFAULT_MEMORY_BYTES
from cairn.backends.rocksdb.base import RocksBase
from cairn.backends.rocksdb.containers import make_rows
from cairn.backends.rocksdb.database import Database, Op, Tuning
from cairn.backends.rocksdb.files import RocksIndex, describe_state, fetch_database, read_index
from cairn.backends.rocksdb.rows import DIRTY_ENTRY_BYTES, RocksRows
from cairn.storage.files import store_of
from cairn.storage.manifest import FileRef
from cairn.storage.store import Store
from cairn.types.codec import Codec, Key

if TYPE_CHECKING:
    from cairn.backends.overlay import Table
    from cairn.backends.rocksdb.columns import SpillTable

DATABASES_MAX: Final = 4
# If the slot owns a smaller share of a database, its rows are copied instead.
_OWNED_MIN: Final = 0.45
# Packing or writing this number of rows takes a few milliseconds.
_STEP_OPS: Final = 8192


class _ByGroup(dict[int, RocksRows]):
    """Rows by key group, made on first use."""

    def __init__(self, make: Callable[[int], RocksRows]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, group: int) -> RocksRows:
        rows = self[group] = self._make(group)
        return rows


class RocksBackend(Backend):
    """Rows in RocksDB databases under one directory."""

    spills_columns = True

    def __init__(self, directory: str, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        self.directory = directory
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        self.tuning = Tuning(memory_bytes // 8)
        self._memory_bytes = memory_bytes
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
        self._base: RocksBase | HeapBase | None = None
        self.columns: dict[str, SpillTable] = {}
        """Tables in arrays, by state."""
        self.run_tables: set[str] = set()
        """States whose tables hold rows in runs, never in a database."""

    # Rows

    def open_state(
        self, name: str, kind: str, keys: Codec, values: Codec, entries: Codec | None
    ) -> None:
        packing = Packing(kind, keys, values, entries)
        known = self._packings.get(name)
        if known is not None and describe_state(known, {}) != describe_state(packing, {}):
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
            self._destroy_if_unused(database)

    def _destroy_if_unused(self, database: Database) -> None:
        if database.rows_bound == 0:
            self._databases.remove(database)
            if database is self._home:
                self._home = None
            database.destroy()

    def all_rows(self) -> Iterator[RocksRows]:
        # Copies: a base iterates in the background while states and groups are added.
        for by_group in list(self._rows.values()):
            yield from list(by_group.values())

    def prefetch(self, groups: Sequence[int], keys: Sequence[Key]) -> None:
        self._rotate_if_full()
        if not self._databases:
            return
        is_young = dict.__contains__
        for by_group in self._rows.values():
            # Almost all are in memory: check each at C speed, duplicates included.
            unknown = [
                (group, key)
                for group, key in zip(groups, keys, strict=True)
                if not is_young(by_group[group], key)
            ]
            wanted: dict[int, list[Key]] = {}
            for group, key in dict.fromkeys(unknown):
                if not by_group[group].recall(key):
                    wanted.setdefault(group, []).append(key)
            if wanted:
                self._fetch([(by_group[group], missing) for group, missing in wanted.items()])

    def _fetch(self, wanted: list[tuple[RocksRows, list[Key]]]) -> None:
        """Read keys with one call per database."""
        by_database: dict[
            Database | None, list[tuple[RocksRows, list[Key], dict[Key, Change]]]
        ] = {}
        for rows, keys in wanted:
            by_database.setdefault(rows.database, []).append((rows, keys, rows.frozen))
        for database, parts in by_database.items():
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

    @property
    def table_bytes_max(self) -> int:
        """Limit of a table in arrays. Without a database, nothing else needs memory."""
        share = self._memory_bytes // 2 if self._databases else self._memory_bytes * 3 // 4
        return share // max(1, len(self.columns) + len(self.run_tables))

    @property
    def filter_bytes_max(self) -> int:
        """Limit of a filter of the names in the databases."""
        return self._memory_bytes // 16 // max(1, len(self.columns))

    def add_cached(self, count: int) -> None:
        self.cached_bytes += count

    def add_dirty(self, count: int) -> None:
        self.dirty_bytes += count
        unwritten = self.dirty_bytes + self.frozen_bytes
        if self.dirty_bytes > self._dirty_bytes_max or unwritten > self._unwritten_bytes_max:
            self.flush()
        self._rotate_if_full()

    def _rotate_if_full(self) -> None:
        """Drop decoded contents, between batches and epochs, while no one reads them."""
        turns = 0
        while self.cached_bytes > self._cached_bytes_max:
            rows = next(self._clock, None)
            if rows is None:
                turns += 1
                if turns > 3:
                    # All were rotated twice and are empty; the count was off.
                    self.cached_bytes = 0
                self._clock = self.all_rows()
            else:
                self.cached_bytes -= rows.rotate()

    def flush(self) -> None:
        """Write all changes to RocksDB."""
        self.settle_base()
        parts = self.freeze()
        try:
            for _ in self.write_frozen(parts):
                pass
        except BaseException:
            self.thaw(parts)
            raise

    def settle_base(self) -> None:
        """Let the base that is being written be done with the databases."""
        if isinstance(self._base, RocksBase):
            self._base.settle()

    def freeze(self) -> list[RocksRows]:
        parts = [rows for rows in self.all_rows() if rows.dirty]
        for rows in parts:
            rows.freeze()
        self.frozen_bytes, self.dirty_bytes = self.dirty_bytes, 0
        return parts

    def thaw(self, parts: list[RocksRows]) -> None:
        """Make frozen changes dirty again, after the writer gave up."""
        for rows in parts:
            if rows.frozen:
                rows.thaw()
        self.dirty_bytes += self.frozen_bytes
        self.frozen_bytes = 0

    def write_frozen(self, parts: list[RocksRows]) -> Generator[None]:
        """Write frozen changes to RocksDB, in steps of a few milliseconds."""
        by_database: dict[Database, list[tuple[bytes, RocksRows]]] = {}
        for rows in parts:
            database = rows.database or self.database_of(rows.group)
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
                # In this order: a reader that finds nothing frozen must find the database.
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

    def database_of(self, group: int) -> Database:
        """Return the database of a key group: that of its other states, else the home database."""
        for by_group in self._rows.values():
            rows = by_group.get(group)
            if rows is not None and rows.database is not None:
                return rows.database
        return self._open_home()

    def _open_home(self) -> Database:
        if self._home is None:
            self._home = Database(self.new_folder("db"), self.tuning)
            self._databases.append(self._home)
        return self._home

    def load(self, store: Store, ref: FileRef, groups: range) -> bool:
        if ref.format != "rocksdb":
            return False
        index = read_index(store, ref)
        if not self._fits(index) or self._fits_in_arrays(index):
            return False
        self._cancel_base()
        store = store_of(store, ref)
        for stored in index.databases:
            owned = [group for group in stored.group_list() if group in groups]
            if not owned:
                continue
            database = fetch_database(store, stored, self.new_folder("db"), self.tuning)
            self._databases.append(database)
            for name in [name for name in stored.states if name not in self._packings]:
                # A state that the function no longer has must not come back with a later version.
                for group in owned:
                    database.delete(database.prefix(name, group))
                del database.states[name]
            self._serve(database, index, owned)
            counted = _count_keys(index, stored.group_list())
            if counted and _count_keys(index, owned) < _OWNED_MIN * counted:
                self._absorb(database)
        while len(self._databases) > DATABASES_MAX:
            others = [d for d in self._databases if d is not self._home]
            self._absorb(min(others, key=Database.size_bytes))
        for table in self.columns.values():
            table.note_loaded()
        return True

    def _fits_in_arrays(self, index: RocksIndex) -> bool:
        """True if the rows belong into arrays, and memory is enough for them."""
        if self.run_tables or not self.columns:
            return bool(self.run_tables)
        size = sum(file.size for stored in index.databases for file in stored.files)
        # Files are compressed.
        return not self._databases and 4 * size <= self.table_bytes_max

    def _fits(self, index: RocksIndex) -> bool:
        """True if the stored types are the declared ones."""
        for name, packing in self._packings.items():
            stored = index.states.get(name)
            if stored is not None and describe_state(packing, stored.counts) != stored:
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
        """Copy the slot's rows of a database to the home database, and remove it."""
        self.flush()
        bound = [rows for rows in self.all_rows() if rows.database is database]
        home = self._open_home()
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
        self._destroy_if_unused(database)

    # Bases

    def begin_base(self, tables: Mapping[str, Table], groups: range) -> Base:
        assert self._base is None, "one base at a time"
        if (self.columns or self.run_tables) and not self._databases:
            frozen = {name: table.freeze() for name, table in sorted(tables.items())}
            in_arrays = {name: pieces for name, pieces in frozen.items() if pieces is not None}
            assert len(in_arrays) == len(frozen), "without a database all rows are in arrays"
            self._base = HeapBase({}, self.end_base, in_arrays)
            return self._base
        for table in self.columns.values():
            table.collect()
        self._base = RocksBase(self, groups)
        return self._base

    def compact(self) -> None:
        # Tombstones of large rows are small: by size alone they would wait for a long time.
        for database in list(self._databases):
            database.compact()

    def end_base(self) -> None:
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


def _count_keys(index: RocksIndex, groups: Sequence[int]) -> int:
    return sum(
        state.counts.get(group, (0, 0))[0] for state in index.states.values() for group in groups
    )
