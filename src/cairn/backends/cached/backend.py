"""State in a database, for state that does not fit in memory, and the part of it in memory.

Committed changes stay in memory, decoded, until they are written. Contents that were read or
changed lately stay decoded. So a key that is used in every epoch costs what it costs on the heap,
and the other keys are read from the database a batch of rows at a time.

`memory_bytes` is divided: four eighths for decoded contents, three for unwritten changes, one for
the database's own cache. When the first part is full, the `CachedRows` objects are rotated in turn:
each drops the contents that were not used since its last rotation.

State of batches is in arrays as far as memory goes (`columns`, `mapped_rows`), and uses none of the
above until it is written to a database.

Always true here:
- all states of a key group that are in a database are in one, or have been declared later;
- the backend owns its folder: it is emptied at the start and removed at the end, never trusted.
"""

from __future__ import annotations

import os
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from cairn.backends.cached.ahead import Missing, Read, ReadAhead, read_missing
from cairn.backends.cached.database import Database, Op
from cairn.backends.cached.described import StoredState, describe_state
from cairn.backends.cached.kinds import make_rows
from cairn.backends.cached.ordered import Page, read_pages
from cairn.backends.cached.rows import DIRTY_ENTRY_BYTES, CachedRows
from cairn.backends.cached.timer_names import TIME_KINDS, is_index
from cairn.backends.contract import Backend, Change
from cairn.backends.packing import Packing
from cairn.types.codec import Codec, Key

if TYPE_CHECKING:
    from cairn.backends.cached.columns import SpillTable


class _ByGroup(dict[int, CachedRows]):
    """Rows by key group, made on first use."""

    def __init__(self, make: Callable[[int], CachedRows]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, group: int) -> CachedRows:
        rows = self[group] = self._make(group)
        return rows


class CachedBackend(Backend):
    """Rows in memory over databases."""

    spills_columns = True
    orders_times = True
    settles_later = False
    writes_at_once: bool
    """Changes may be written to a database whenever memory is short, not only by a base."""

    def __init__(self, directory: str, memory_bytes: int) -> None:
        self.directory = directory
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        self.memory_bytes = memory_bytes
        self._cached_bytes_max = memory_bytes // 2
        self.cached_bytes = 0
        self.dirty_bytes = 0
        self.frozen_bytes = 0
        self._clock: Iterator[CachedRows] = iter(())
        self._packings: dict[str, Packing] = {}
        self._rows: dict[str, _ByGroup] = {}
        self._folders = 0
        self._ahead = ReadAhead()
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

    def rows(self, name: str, group_index: int) -> CachedRows:
        return self._rows[name][group_index]

    def drop(self, name: str, group_index: int) -> None:
        self.cancel_base()
        rows = self._rows[name].pop(group_index, None) if name in self._rows else None
        if rows is None:
            return
        self.cached_bytes -= rows.young_bytes + rows.old_bytes
        self.dirty_bytes = max(0, self.dirty_bytes - len(rows.dirty) * DIRTY_ENTRY_BYTES)
        if rows.database is not None:
            self._release(rows)

    @abstractmethod
    def _release(self, rows: CachedRows) -> None:
        """Unbind rows that the backend no longer has."""

    def all_rows(self) -> Iterator[CachedRows]:
        # Copies: a base iterates in the background while states and groups are added.
        for by_group in list(self._rows.values()):
            yield from list(by_group.values())

    def packings(self) -> Mapping[str, Packing]:
        return self._packings

    def describe_states(self, groups: Sequence[int]) -> dict[str, StoredState]:
        """Return types and sizes of all states."""
        return {
            name: describe_state(
                packing,
                {
                    group: (len(rows), rows.entry_count())
                    for group in groups
                    if len(rows := self.rows(name, group))
                },
            )
            for name, packing in self._packings.items()
        }

    def fits(self, states: Mapping[str, StoredState]) -> bool:
        """True if the stored types are the declared ones."""
        for name, packing in self._packings.items():
            stored = states.get(name)
            if stored is not None and describe_state(packing, stored.counts) != stored:
                return False
        return True

    def serve(
        self,
        database: Database,
        states: Mapping[str, StoredState],
        groups: Sequence[int],
        names: Iterable[str],
    ) -> None:
        """Take the rows of states in empty key groups from a database."""
        for name in names:
            counts = states[name].counts if name in states else {}
            for group in groups:
                rows = self.rows(name, group)
                assert rows.database is None and not rows.dirty, "loaded into rows that are empty"
                rows.clear()
                rows.old = {}
                rows.bind(database)
                rows.set_counts(*counts.get(group, (0, 0)))
        for name in filter(is_index, self._packings):
            if name not in states:
                # The base is older than the index: its rows are to be scanned.
                for group in groups:
                    self.rows(name, group).set_counts(0, 0)

    # Reading by the batch

    def prefetch(self, groups: Sequence[int], keys: Sequence[Key]) -> None:
        self._rotate_if_full()
        if not self.has_databases:
            return
        self._fill(self._ahead.take())
        # Without a read ahead these are all; else those that have left memory since it began.
        self._fill(read_missing(self._find_missing(groups, keys)))

    def _fill(self, found: Read) -> None:
        """Take rows that were read into memory."""
        # One read, not one per key group.
        self.settle([(part.rows, part.rows.needs_settled(part.keys)) for part, _ in found])
        for part, raws in found:
            part.rows.fill(part.keys, raws, part.frozen)

    def read_ahead(self, groups: Sequence[int], keys: Sequence[Key]) -> None:
        if self.has_databases:
            missing = self._find_missing(groups, keys)
            if missing:
                self._ahead.begin(missing)

    def prepare_promote(self, name: str, changes: Mapping[int, Mapping[Key, Change]]) -> None:
        if not self.has_databases:
            return
        by_group = self._rows[name]
        found: list[Missing] = []
        for group, changed in changes.items():
            rows = by_group[group]
            missing = rows.not_in_memory(rows.select_to_compare(changed))
            if missing:
                found.append(Missing(rows, missing, rows.frozen))
        # One read, not one per key group.
        self._fill(read_missing(found))

    def prepare_restore(self, name: str, changes: Mapping[int, Mapping[Key, Change]]) -> None:
        self.prepare_promote(name, changes)

    def drop_ahead(self) -> None:
        self._ahead.drop()

    def _find_missing(self, groups: Sequence[int], keys: Sequence[Key]) -> list[Missing]:
        """Return the keys that are not in memory, by state and key group."""
        found: list[Missing] = []
        is_young = dict.__contains__
        for name, by_group in self._rows.items():
            if self._packings[name].kind in TIME_KINDS:
                continue
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
            for group, missing in wanted.items():
                rows = by_group[group]
                found.append(Missing(rows, missing, rows.frozen))
        return found

    def load_keys(self, wanted: Sequence[tuple[CachedRows, Sequence[Key]]]) -> None:
        """Read keys of several rows into memory."""
        missing = [Missing(rows, rows.not_in_memory(keys), rows.frozen) for rows, keys in wanted]
        self._fill(read_missing([part for part in missing if part.keys]))

    def settle(self, wanted: Iterable[tuple[CachedRows, list[Key]]]) -> None:
        """Count restored keys of rows by what their databases have of them."""
        by_database: dict[Database, list[tuple[CachedRows, list[Key]]]] = {}
        for rows, keys in wanted:
            if keys:
                assert rows.database is not None, "restored without a look at the database"
                by_database.setdefault(rows.database, []).append((rows, keys))
        for database, found in by_database.items():
            names = [rows.names_to_settle(keys) for rows, keys in found]
            raws = iter(database.get_many([name for each in names for name in each]))
            for (rows, keys), each in zip(found, names, strict=True):
                rows.settle(keys, list(islice(raws, len(each))))

    # Memory

    @property
    @abstractmethod
    def has_databases(self) -> bool:
        """True if rows may be in a database."""

    @property
    def table_bytes_max(self) -> int:
        """Limit of a table in arrays. Without a database, nothing else needs memory."""
        share = self.memory_bytes // 2 if self.has_databases else self.memory_bytes * 3 // 4
        return share // max(1, len(self.columns) + len(self.run_tables))

    @property
    def filter_bytes_max(self) -> int:
        """Limit of a filter of the names in the databases."""
        return self.memory_bytes // 16 // max(1, len(self.columns))

    def add_cached(self, count: int) -> None:
        self.cached_bytes += count

    def add_dirty(self, count: int) -> None:
        self.dirty_bytes += count
        self._write_if_full()
        self._rotate_if_full()

    def _write_if_full(self) -> None:
        """Write changes if they take too much memory."""

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

    def freeze(self) -> list[CachedRows]:
        parts = [rows for rows in self.all_rows() if rows.dirty]
        for rows in parts:
            rows.freeze()
        self.frozen_bytes, self.dirty_bytes = self.dirty_bytes, 0
        return parts

    def thaw(self, parts: list[CachedRows]) -> None:
        """Make frozen changes dirty again, after the writer gave up."""
        for rows in parts:
            if rows.frozen:
                rows.thaw()
        self.dirty_bytes += self.frozen_bytes
        self.frozen_bytes = 0

    # Databases

    def read_pages(
        self, database: Database, starts: Sequence[tuple[bytes, bytes]], count: int
    ) -> list[Page]:
        """Return the next `count` names of several prefixes, each from a place on."""
        return read_pages(database, starts, count)

    def write_ops(self, database: Database, pieces: Iterable[Iterable[Op]]) -> None:
        """Write rows now, in ascending order of their keys."""
        raise AssertionError("a database that bases write")

    @abstractmethod
    def database_of(self, group: int) -> Database:
        """Return the database that takes the rows of a key group that are in none."""

    def new_folder(self, kind: str) -> str:
        self._folders += 1
        return os.path.join(self.directory, f"{kind}{self._folders}")

    # Bases

    @abstractmethod
    def settle_base(self) -> None:
        """Let the base that is being written be done with the databases."""

    @abstractmethod
    def cancel_base(self) -> None:
        """Give up the base that is being written."""

    def close(self) -> None:
        self._ahead.close()
        self.cancel_base()
        for by_group in self._rows.values():
            for rows in by_group.values():
                rows.database = None
            by_group.clear()
        self._close_databases()
        self.cached_bytes = self.dirty_bytes = self.frozen_bytes = 0
        self._clock = iter(())
        shutil.rmtree(self.directory, ignore_errors=True)

    @abstractmethod
    def _close_databases(self) -> None: ...
