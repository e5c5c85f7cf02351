"""Committed changes on their way to a database outside of the slot, in the background.

Changes that are unwritten when a writer begins are frozen, and written in pieces while later epochs
run. PostgreSQL gets them as part of a base, Redis when an epoch is applied.

Always true here:
- there is one writer at a time;
- only the thread that begins writers makes frozen changes unwritten again;
- readers find a change frozen, or in the database as readers see it, or both.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from cairn.backends.cached.backend import CachedBackend
from cairn.backends.cached.database import Op
from cairn.backends.cached.described import StoredState
from cairn.backends.cached.rows import CachedRows
from cairn.backends.contract import BaseCancelledError, Change
from cairn.backends.heap.backend import HeapBase
from cairn.types.codec import Key

if TYPE_CHECKING:
    from cairn.backends.overlay import Table


class Outgoing:
    """The changes of one writer."""

    def __init__(self, backend: OutsideBackend, groups: range) -> None:
        self._owner = backend
        self._groups = groups
        self._lock = threading.Lock()
        # Tables in arrays are counted when they are written.
        self._states = backend.describe_states(groups)
        self.frozen = backend.freeze()
        self._unwritten = [table.hand_over() for table in backend.columns.values()]
        self._cancelled = False
        self._is_done = False
        self._is_closed = False

    def check(self) -> None:
        """Raise BaseCancelledError if the state was dropped, or the writer closed."""
        if self._cancelled:
            raise BaseCancelledError

    def ops(self) -> Iterator[Iterator[Op]]:
        """Yield the changes, a piece at a time."""
        for rows in self.frozen:
            for piece in rows.ops(rows.prefix):
                yield iter(piece)
                self.check()
        for table in self._unwritten:
            for _, ops in table.ops():
                yield ops
                self.check()

    def states(self) -> dict[str, StoredState]:
        """Return types and sizes of all states, after all changes were written."""
        counted = self._owner.describe_states(self._groups)
        columns = self._owner.columns
        return {n: counted[n] if n in columns else s for n, s in self._states.items()}

    def end(self) -> None:
        """Make all readers use what was written."""
        with self._lock:
            self.check()
            # In this order: a reader that finds nothing frozen must find the database.
            self._show()
            for rows in self.frozen:
                rows.frozen = {}
            for table in self._unwritten:
                table.end(is_written=True)
            self._is_done = True

    @abstractmethod
    def _show(self) -> None:
        """Let readers of the database see the rows that were written."""

    def cancel(self) -> None:
        """Give up, unless all is written. Called on the thread that begins writers."""
        with self._lock:
            self._cancelled = True
            if not self._is_done:
                self._undo()

    def _undo(self) -> None:
        for table in self._unwritten:
            table.end(is_written=False)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if not self._is_done:
                self._cancelled = True
                self._undo()
        self._owner.end_writer(self, is_written=self._is_done)


class OutsideBackend(CachedBackend):
    """Rows in memory over a database that gets its rows from writers in the background."""

    settles_later = True
    writes_at_once = False

    def __init__(self, directory: str, memory_bytes: int) -> None:
        super().__init__(directory, memory_bytes)
        self._numbers: dict[str, int] = {}
        """The numbers of states, by name."""
        self._writer: Outgoing | HeapBase | None = None
        self._given_up: list[CachedRows] = []
        """Frozen rows of a writer that failed."""
        self._has_databases = False

    @property
    def has_databases(self) -> bool:
        return self._has_databases

    def is_short_of_memory(self) -> bool:
        unwritten = self.dirty_bytes + self.frozen_bytes
        return unwritten > self.unwritten_bytes_max or any(
            table.is_too_large for table in list(self.columns.values())
        )

    def unwritten_bytes(self, *, with_frozen: bool) -> int:
        tables = self.columns.values()
        in_arrays = sum(table.unwritten_bytes(with_frozen=with_frozen) for table in tables)
        unwritten = self.dirty_bytes + (self.frozen_bytes if with_frozen else 0)
        if unwritten + in_arrays > self.unwritten_bytes_max:
            # The counters add up what was changed again and again: look at what there is.
            unwritten = self.dirty_bytes = sum(r.layer_bytes(r.dirty) for r in self.all_rows())
            if with_frozen:
                unwritten += sum(r.layer_bytes(r.frozen) for r in self.all_rows())
        return unwritten + in_arrays

    @property
    def unwritten_bytes_max(self) -> int:
        return self.memory_bytes * 3 // 8

    def prepare_restore(self, name: str, changes: Mapping[int, Mapping[Key, Change]]) -> None:
        if self._writer is None:
            self._thaw_given_up()

    def is_settled(self) -> bool:
        tables = self.columns.values()
        return all(table.is_settled for table in tables) and not any(
            rows.unsettled for rows in self.all_rows()
        )

    def prepare_writer(self) -> None:
        """Called before a writer is made: it needs to know what restored changes have changed."""
        assert self._writer is None, "one writer at a time"
        self._thaw_given_up()
        self.settle([(rows, rows.select_unsettled()) for rows in self.all_rows()])
        for table in self.columns.values():
            table.settle()

    def end_writer(self, writer: Outgoing, *, is_written: bool) -> None:
        """Called by the thread that wrote."""
        if is_written:
            self.frozen_bytes = 0
        elif writer is self._writer:
            self._given_up = writer.frozen
        if writer is self._writer:
            self._writer = None

    def begin_heap_base(self, tables: Mapping[str, Table]) -> HeapBase:
        """Begin a base of rows that are in no database: those of joins, and those beside them."""
        assert self._writer is None, "one base at a time"
        frozen = {name: table.freeze() for name, table in sorted(tables.items())}
        in_arrays = {name: pieces for name, pieces in frozen.items() if pieces is not None}
        assert len(in_arrays) == len(frozen), "rows of joins and those beside them"
        self._writer = HeapBase({}, self._end_heap_base, in_arrays)
        return self._writer

    def _end_heap_base(self) -> None:
        self._writer = None

    def _thaw_given_up(self) -> None:
        parts, self._given_up = self._given_up, []
        if parts:
            self.thaw(parts)

    def settle_base(self) -> None:
        pass

    def cancel_base(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.cancel()
            if isinstance(writer, Outgoing):
                self.thaw(writer.frozen)
        self._thaw_given_up()
