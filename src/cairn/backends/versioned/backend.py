"""State in a database with versions: rows carry their epoch, and the newest of a history counts.

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

from cairn.backends.cached.database import Database
from cairn.backends.cached.described import describe_state
from cairn.backends.cached.numbers import state_number
from cairn.backends.cached.ordered import Page
from cairn.backends.cached.outside import OutsideBackend
from cairn.backends.cached.rows import CachedRows
from cairn.backends.contract import Base
from cairn.backends.versioned.base import VersionedBase
from cairn.backends.versioned.contract import VersionStore
from cairn.backends.versioned.database import History, VersionedDatabase
from cairn.backends.versioned.index import FORMATS, StoredPart, read_index
from cairn.storage.manifest import FileRef
from cairn.storage.store import Store

if TYPE_CHECKING:
    from cairn.backends.overlay import Table


class VersionedBackend(OutsideBackend):
    """Rows of a job."""

    def __init__(
        self, directory: str, memory_bytes: int, versions: VersionStore, *, operator: str
    ) -> None:
        super().__init__(directory, memory_bytes)
        self.operator = operator
        self.versions = versions

    # Databases

    def _release(self, rows: CachedRows) -> None:
        rows.unbind()

    def database_of(self, group: int) -> VersionedDatabase:
        return self._new_database()

    def _new_database(self, history: History = ()) -> VersionedDatabase:
        self._has_databases = True
        for name, packing in self._packings.items():
            described = describe_state(packing, {})
            self._numbers[name] = state_number(self.operator, name, described)
        return VersionedDatabase(self.versions, self._numbers, history)

    def read_pages(
        self, database: Database, starts: Sequence[tuple[bytes, bytes]], count: int
    ) -> list[Page]:
        assert isinstance(database, VersionedDatabase)
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

    def databases(self, groups: range) -> dict[VersionedDatabase, set[int]]:
        """Return the databases of key groups, and which of them each has."""
        found: dict[VersionedDatabase, set[int]] = {}
        for rows in self.all_rows():
            if rows.group in groups and isinstance(rows.database, VersionedDatabase):
                found.setdefault(rows.database, set()).add(rows.group)
        return found

    def list_parts(
        self, groups: range, histories: Mapping[VersionedDatabase, History]
    ) -> list[StoredPart]:
        """Return key groups and states by history."""
        states: dict[tuple[History, int], dict[str, int]] = {}
        for rows in self.all_rows():
            database = rows.database
            if rows.group in groups and isinstance(database, VersionedDatabase):
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
        if ref.format not in FORMATS:
            return False
        index = read_index(store, ref)
        here = (index.kind, index.address, index.operator)
        if here != (self.versions.kind, self.versions.address, self.operator):
            return False
        if not self.fits(index.states) or self.run_tables:
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
        if self.run_tables:
            return self.begin_heap_base(tables)
        self.prepare_writer()
        self._bind_all(groups)
        base = self._writer = VersionedBase(self, groups)
        return base

    def _close_databases(self) -> None:
        self.versions.close()
