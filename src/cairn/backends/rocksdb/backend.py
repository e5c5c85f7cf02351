"""State in RocksDB, on the slot's disk: for state that does not fit in memory.

Committed changes are written to RocksDB as sorted files, when there are enough of them or when a
base begins (see `cached.backend`).

After a change of parallelism a slot may serve its key groups from several databases, each the
unchanged files of a base; rows of other key groups in them are ignored.

Always true here:
- all states of a key group are in one database.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from cairn.backends.cached.backend import CachedBackend
from cairn.backends.cached.database import Database, Op
from cairn.backends.cached.rows import CachedRows
from cairn.backends.contract import Base
from cairn.backends.heap.backend import HeapBase
from cairn.backends.registry import DEFAULT_MEMORY_BYTES
from cairn.backends.rocksdb.base import RocksBase
from cairn.backends.rocksdb.database import RocksDatabase, Tuning
from cairn.backends.rocksdb.files import RocksIndex, fetch_database, read_index
from cairn.storage.files import store_of
from cairn.storage.manifest import FileRef
from cairn.storage.store import Store

if TYPE_CHECKING:
    from cairn.backends.overlay import Table

DATABASES_MAX: Final = 4
# If the slot owns a smaller share of a database, its rows are copied instead.
_OWNED_MIN: Final = 0.45
# Packing or writing this number of rows takes a few milliseconds.
_STEP_OPS: Final = 8192


class RocksBackend(CachedBackend):
    """Rows in RocksDB databases under one directory."""

    writes_at_once = True

    def __init__(self, directory: str, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        super().__init__(directory, memory_bytes)
        self.tuning = Tuning(memory_bytes // 8)
        self._dirty_bytes_max = memory_bytes // 4
        self._unwritten_bytes_max = memory_bytes * 3 // 8
        self._databases: list[RocksDatabase] = []
        self._home: RocksDatabase | None = None
        self._base: RocksBase | HeapBase | None = None

    def _release(self, rows: CachedRows) -> None:
        database = rows.database
        assert isinstance(database, RocksDatabase)
        database.delete(rows.prefix)
        rows.unbind()
        self._destroy_if_unused(database)

    def _destroy_if_unused(self, database: RocksDatabase) -> None:
        if database.rows_bound == 0:
            self._databases.remove(database)
            if database is self._home:
                self._home = None
            database.destroy()

    # Memory

    @property
    def has_databases(self) -> bool:
        return bool(self._databases)

    def _write_if_full(self) -> None:
        unwritten = self.dirty_bytes + self.frozen_bytes
        if self.dirty_bytes > self._dirty_bytes_max or unwritten > self._unwritten_bytes_max:
            self.flush()

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

    def write_frozen(self, parts: list[CachedRows]) -> Generator[None]:
        """Write frozen changes to RocksDB, in steps of a few milliseconds."""
        by_database: dict[RocksDatabase, list[tuple[bytes, CachedRows]]] = {}
        for rows in parts:
            database = self._database_of(rows)
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

    def write_ops(self, database: Database, pieces: Iterable[Iterable[Op]]) -> None:
        assert isinstance(database, RocksDatabase)
        writer = database.write_sorted()
        try:
            for piece in pieces:
                writer.add(piece)
            writer.finish()
        finally:
            writer.discard()

    def _database_of(self, rows: CachedRows) -> RocksDatabase:
        database = rows.database or self.database_of(rows.group)
        assert isinstance(database, RocksDatabase)
        return database

    # Databases

    @property
    def databases(self) -> Sequence[RocksDatabase]:
        return self._databases

    def database_of(self, group: int) -> RocksDatabase:
        """Return the database of a key group: that of its other states, else the home database."""
        for by_group in self._rows.values():
            rows = by_group.get(group)
            if rows is not None and isinstance(rows.database, RocksDatabase):
                return rows.database
        return self._open_home()

    def _open_home(self) -> RocksDatabase:
        if self._home is None:
            self._home = RocksDatabase(self.new_folder("db"), self.tuning)
            self._databases.append(self._home)
        return self._home

    def load(self, store: Store, ref: FileRef, groups: range) -> bool:
        if ref.format != "rocksdb":
            return False
        index = read_index(store, ref)
        if not self.fits(index.states) or self._fits_in_arrays(index):
            return False
        self.cancel_base()
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
            self.serve(database, index.states, owned, self.packings())
            counted = _count_keys(index, stored.group_list())
            if counted and _count_keys(index, owned) < _OWNED_MIN * counted:
                self._absorb(database)
        while len(self._databases) > DATABASES_MAX:
            others = [d for d in self._databases if d is not self._home]
            self._absorb(min(others, key=RocksDatabase.size_bytes))
        for table in self.columns.values():
            table.note_loaded(groups)
        return True

    def _fits_in_arrays(self, index: RocksIndex) -> bool:
        """True if the rows belong into arrays, and memory is enough for them."""
        if self.run_tables or not self.columns:
            return bool(self.run_tables)
        size = sum(file.size for stored in index.databases for file in stored.files)
        # Files are compressed.
        return not self._databases and 4 * size <= self.table_bytes_max

    def _absorb(self, database: RocksDatabase) -> None:
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

    def cancel_base(self) -> None:
        if self._base is not None:
            self._base.cancel()

    def _close_databases(self) -> None:
        for database in self._databases:
            database.close()
        self._databases = []
        self._home = None


def _count_keys(index: RocksIndex, groups: Sequence[int]) -> int:
    return sum(
        state.counts.get(group, (0, 0))[0] for state in index.states.values() for group in groups
    )
