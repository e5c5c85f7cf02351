"""State in PostgreSQL: rows carry the epoch they are of, and the newest one of a history counts.

Changes of committed epochs stay in memory, decoded, until a base writes them (`base`). Contents
that were read or changed lately stay in memory too; other keys are read a batch of rows at a time
(see `cached.backend`). A restart, a rollback, a branch or another parallelism is another
history over the same rows: nothing is read beforehand, and nothing is moved.

Always true here:
- the database gets rows of committed epochs only, from bases;
- the backend never deletes rows: epochs that are kept may need them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cairn.backends.cached.backend import CachedBackend
from cairn.backends.cached.database import Database
from cairn.backends.cached.described import describe_state
from cairn.backends.cached.numbers import state_number
from cairn.backends.cached.ordered import Page
from cairn.backends.cached.rows import CachedRows
from cairn.backends.contract import Base
from cairn.backends.heap.backend import HeapBase
from cairn.backends.postgres.base import PostgresBase
from cairn.backends.postgres.database import History, PostgresDatabase
from cairn.backends.postgres.files import StoredPart, read_index
from cairn.backends.postgres.layout import schema_of
from cairn.backends.postgres.link import Link, address_of, parameters_of
from cairn.storage.manifest import FileRef
from cairn.storage.store import Store

if TYPE_CHECKING:
    from cairn.backends.overlay import Table


class PostgresBackend(CachedBackend):
    """Rows in the schema of a job."""

    writes_at_once = False

    def __init__(
        self, directory: str, memory_bytes: int, url: str, *, job_id: str, operator: str
    ) -> None:
        super().__init__(directory, memory_bytes)
        self.operator = operator
        self.schema = schema_of(job_id)
        self.address = address_of(parameters_of(url))
        self._reads = Link(self.address, f"cairn:{job_id[:12]}:{operator}:reads")
        self.writes = Link(self.address, f"cairn:{job_id[:12]}:{operator}:writes")
        self._numbers: dict[str, int] = {}
        self._base: PostgresBase | HeapBase | None = None
        self._given_up: list[CachedRows] = []
        """Frozen rows of a base that failed."""
        self._has_databases = False

    # Databases

    @property
    def has_databases(self) -> bool:
        return self._has_databases

    def _release(self, rows: CachedRows) -> None:
        rows.unbind()

    def database_of(self, group: int) -> PostgresDatabase:
        return self._new_database()

    def _new_database(self, history: History = ()) -> PostgresDatabase:
        self._has_databases = True
        for name, packing in self._packings.items():
            described = describe_state(packing, {})
            self._numbers[name] = state_number(self.operator, name, described)
        return PostgresDatabase(self._reads, self._numbers, history)

    def read_pages(
        self, database: Database, starts: Sequence[tuple[bytes, bytes]], count: int
    ) -> list[Page]:
        assert isinstance(database, PostgresDatabase)
        return database.read_pages(starts, count)

    def _bind_all(self, groups: range) -> None:
        """Bind rows that are in no database to a new history."""
        unbound = [
            rows
            for name in self._packings
            for group in groups
            if (rows := self.rows(name, group)).database is None
        ]
        if unbound:
            database = self._new_database()
            for rows in unbound:
                rows.bind(database)

    def databases(self, groups: range) -> set[PostgresDatabase]:
        return {
            rows.database
            for rows in self.all_rows()
            if rows.group in groups and isinstance(rows.database, PostgresDatabase)
        }

    def list_parts(
        self, groups: range, histories: Mapping[PostgresDatabase, History]
    ) -> list[StoredPart]:
        """Return key groups and states by history."""
        states: dict[tuple[History, int], dict[str, int]] = {}
        for rows in self.all_rows():
            database = rows.database
            if rows.group in groups and isinstance(database, PostgresDatabase):
                if database in histories:
                    at = histories[database], rows.group
                    states.setdefault(at, {})[rows.name] = self._numbers[rows.name]
        parts: dict[tuple[History, tuple[tuple[str, int], ...]], list[int]] = {}
        for (history, group), named in states.items():
            parts.setdefault((history, tuple(sorted(named.items()))), []).append(group)
        return [
            StoredPart(groups=sorted(owned), states=dict(named), history=history)
            for (history, named), owned in parts.items()
        ]

    def load(self, store: Store, ref: FileRef, groups: range) -> bool:
        if ref.format != "postgres":
            return False
        index = read_index(store, ref)
        if index.address != self.address or not self.fits(index.states) or self.run_tables:
            return False
        if index.operator != self.operator:
            return False
        self.cancel_base()
        for part in index.parts:
            owned = [group for group in part.groups if group in groups]
            named = [name for name in part.states if name in self._packings]
            if owned and named:
                database = self._new_database(part.history)
                self.serve(database, index.states, owned, named)
        for table in self.columns.values():
            table.note_loaded(groups)
        return True

    # Bases

    def begin_base(self, tables: Mapping[str, Table], groups: range) -> Base:
        assert self._base is None, "one base at a time"
        if self.run_tables:
            frozen = {name: table.freeze() for name, table in sorted(tables.items())}
            in_arrays = {name: pieces for name, pieces in frozen.items() if pieces is not None}
            assert len(in_arrays) == len(frozen), "rows of joins and those beside them"
            self._base = HeapBase({}, self._end_heap_base, in_arrays)
            return self._base
        self._thaw_given_up()
        self._bind_all(groups)
        self._base = PostgresBase(self, groups)
        return self._base

    def _end_heap_base(self) -> None:
        self._base = None

    def end_base(self, base: PostgresBase, *, is_written: bool) -> None:
        """Called by the thread that wrote the base."""
        if is_written:
            self.frozen_bytes = 0
        elif base is self._base:
            self._given_up = base.frozen
        if base is self._base:
            self._base = None

    def _thaw_given_up(self) -> None:
        parts, self._given_up = self._given_up, []
        if parts:
            self.thaw(parts)

    def settle_base(self) -> None:
        pass

    def cancel_base(self) -> None:
        base, self._base = self._base, None
        if base is not None:
            base.cancel()
            if isinstance(base, PostgresBase):
                self.thaw(base.frozen)
        self._thaw_given_up()

    def _close_databases(self) -> None:
        self._reads.close()
        self.writes.close()
