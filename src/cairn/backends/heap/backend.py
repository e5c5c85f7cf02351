"""State in the slot's memory: a dict per state and key group.

A base is written by key group: the writer copies a group in one go and encodes the copy. Of
groups it has not come to yet, `promote` remembers what was there before each key that it
changes (copy-on-write per key), and the writer reads through that.

Always true here:
- without a base under way, `promote` and `get` cost what a dict costs;
- what a base has captured is never changed: containers are replaced, not written to.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import filterfalse, repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cairn.backends.base import (
    ABSENT,
    Backend,
    Base,
    BaseCancelledError,
    BaseTarget,
)
from cairn.storage.files import SegmentWriter, StateFile
from cairn.storage.pack import write_segment_file
from cairn.types.codec import Codec

if TYPE_CHECKING:
    from cairn.backends.overlay import Table

BASE_PIECE_ROWS = 8 * 1024
# A dict takes 30 to 120 bytes a row as it grows.
COMPACT_ROW_BYTES = 400
COMPACT_BYTES_MIN = 4096


class HeapRows(dict[Any, Any]):
    """Rows of value state. `get` and `[]` are dict's own: they run once or more per input row."""

    __slots__ = ("lock", "undo")

    def __init__(self, lock: threading.Lock | None = None) -> None:
        super().__init__()
        self.lock = lock or threading.Lock()
        self.undo: dict[Any, Any] | None = None
        """While a base is to capture these rows: what was there, of keys changed since."""

    def __missing__(self, key: Any) -> None:
        return None

    def entry_count(self) -> int:
        return len(self)

    def promote(self, changes: Mapping[Any, Any]) -> None:
        if self.undo is None:
            self._change(changes)
            return
        with self.lock:
            if self.undo is not None:
                self._remember(self.undo, changes)
            self._change(changes)

    def peek(self, key: Any) -> Any:
        return self.get(key)

    def capture(self) -> dict[Any, Any] | None:
        """What was there when the base began; None when the base was cancelled."""
        with self.lock:
            undo = self.undo
            if undo is None:
                return None
            captured = dict(self)
            self.undo = self._undo_after_capture()
        captured.update(undo)
        for key, held in undo.items():
            if held is ABSENT:
                del captured[key]
        return captured

    def held_many(self, keys: Sequence[Any]) -> list[Any]:
        return list(map(self.get, keys))

    def new_keys(self, keys: Iterable[Any]) -> list[Any]:
        return list(filterfalse(self.__contains__, keys))

    def scan(self, cursor: Any, count: int) -> tuple[list[tuple[Any, Any]], Any]:
        return list(self.items()), None

    def compact(self) -> None:
        # A dict never shrinks by itself.
        if sys.getsizeof(self) > COMPACT_BYTES_MIN + COMPACT_ROW_BYTES * len(self):
            with self.lock:
                kept = dict(self)
                # Only the dict's own: the rows are the same ones before and after.
                dict.clear(self)
                self.update(kept)

    def _undo_after_capture(self) -> dict[Any, Any] | None:
        return None

    def _remember(self, undo: dict[Any, Any], changes: Mapping[Any, Any]) -> None:
        first = [key for key in changes if key not in undo]
        undo.update(zip(first, map(self.get, first, repeat(ABSENT)), strict=True))

    def _change(self, changes: Mapping[Any, Any]) -> None:
        self.update(changes)
        if None in changes.values():
            for key, value in changes.items():
                if value is None:
                    del self[key]


class _ContainerRows(HeapRows):
    """Rows whose values are changed in place: a captured one must be replaced first."""

    __slots__ = ()

    def peek(self, key: Any) -> Any:
        held = self.get(key)
        return None if held is None else held.copy()

    def _undo_after_capture(self) -> dict[Any, Any] | None:
        # Until the copy is encoded it shares its containers with these rows.
        return {}

    def _remember(self, undo: dict[Any, Any], changes: Mapping[Any, Any]) -> None:
        for key in changes:
            if key not in undo:
                held = self.get(key)
                if held is None:
                    undo[key] = ABSENT
                else:
                    undo[key] = held
                    self[key] = held.copy()


class HeapMapRows(_ContainerRows):
    __slots__ = ("entries_held",)

    def __init__(self, lock: threading.Lock | None = None) -> None:
        super().__init__(lock)
        self.entries_held = 0

    def entry_count(self) -> int:
        return self.entries_held

    def clear(self) -> None:
        super().clear()
        self.entries_held = 0

    def _change(self, changes: Mapping[Any, Any]) -> None:
        for key, changed in changes.items():
            entries = self.setdefault(key, {})
            before = len(entries)
            for entry, value in changed.items():
                if value is ABSENT:
                    entries.pop(entry, None)
                else:
                    entries[entry] = value
            self.entries_held += len(entries) - before
            if not entries:
                del self[key]


class HeapListRows(_ContainerRows):
    __slots__ = ()

    def _change(self, changes: Mapping[Any, Any]) -> None:
        for key, (start, added) in changes.items():
            items = self.setdefault(key, [])
            del items[start:]
            items += added
            if not items:
                del self[key]


ROWS: dict[str, type[HeapRows]] = {"map": HeapMapRows, "list": HeapListRows}


def empty_rows(kind: str) -> HeapRows:
    """Rows of a key group that nobody here owns."""
    return ROWS.get(kind, HeapRows)()


class HeapBackend(Backend):
    """The fastest backend, for state that fits in memory."""

    takes_columns = True

    def __init__(self) -> None:
        self._states: dict[str, tuple[str, Any, Any, Any]] = {}
        self._rows: dict[tuple[str, int], HeapRows] = {}
        self._lock = threading.Lock()
        self._base: HeapBase | None = None

    def open_state(
        self, name: str, kind: str, keys: Codec, values: Codec, entries: Codec | None
    ) -> None:
        declared = (kind, keys.type, values.type, entries and entries.type)
        if self._states.get(name, declared) != declared:
            for state, group in list(self._rows):
                if state == name:
                    self.drop(name, group)
        self._states[name] = declared

    def rows(self, name: str, group_index: int) -> HeapRows:
        found = self._rows.get((name, group_index))
        if found is None:
            kind = self._states[name][0]
            found = self._rows[name, group_index] = ROWS.get(kind, HeapRows)(self._lock)
        return found

    def drop(self, name: str, group_index: int) -> None:
        if self._base is not None:
            self._base.cancel()
        self._rows.pop((name, group_index), None)

    def repack(self, tables: Sequence[Table]) -> bool:
        if self._base is not None:
            return False
        # Python gives back an arena when it is empty. So everything goes before anything
        # comes back: moved one by one, rows would fill the holes that others have left.
        # The overlay as well: a few thousand keys would hold on to as many arenas.
        packed = [(table, list(table.dump()), table.packed_changes()) for table in tables]
        for table, _, changes in packed:
            if changes is not None:
                table.rollback()
            for group in table.groups:
                self.rows(table.name, group).clear()
                if table.expiry is not None:
                    table.expiry.assign(group)
        for table, batches, changes in packed:
            for batch in batches:
                table.apply(batch)
            if changes is not None:
                table.unpack_changes(changes)
        return True

    def begin_base(self, tables: Mapping[str, Table], groups: range) -> Base:
        assert self._base is None, "one base at a time"
        parts: _Parts = {}
        frozen: dict[str, Iterator[pa.RecordBatch]] = {}
        for name, table in sorted(tables.items()):
            columns = table.freeze()
            if columns is None:
                parts[name] = (table, [(group, self.rows(name, group)) for group in groups])
            else:
                frozen[name] = columns
        self._base = HeapBase(parts, self._base_closed, frozen)
        return self._base

    def _base_closed(self) -> None:
        self._base = None

    def close(self) -> None:
        if self._base is not None:
            self._base.cancel()
        self._rows.clear()


_Parts = dict[str, tuple["Table", list[tuple[int, HeapRows]]]]


class HeapBase(Base):
    """A segment with everything, group after group."""

    def __init__(
        self,
        parts: _Parts,
        closed: Callable[[], None],
        frozen: Mapping[str, Iterator[pa.RecordBatch]],
    ) -> None:
        self._parts = parts
        self._frozen = frozen
        self._closed: Callable[[], None] | None = closed
        self._cancelled = False
        for _, rows in self._all_rows():
            rows.undo = {}

    def _all_rows(self) -> Iterator[tuple[int, HeapRows]]:
        for _, rows in self._parts.values():
            yield from rows

    def cancel(self) -> None:
        self._cancelled = True
        self._forget()

    def _forget(self) -> None:
        for _, rows in self._all_rows():
            rows.undo = None

    def close(self) -> None:
        closed, self._closed = self._closed, None
        if closed is not None:
            self._cancelled = True
            self._forget()
            closed()

    def write(self, target: BaseTarget, pace: Callable[[], None]) -> StateFile:
        with tempfile.NamedTemporaryFile(dir=target.scratch, prefix="base-") as file:
            writer = SegmentWriter(
                file, "base", target.operator, first_epoch=0, last_epoch=target.epoch
            )
            for name, (table, rows) in self._parts.items():
                pieces = table.layout.pieces(self._captured(rows), BASE_PIECE_ROWS)
                _write_state(writer, name, map(table.leave_out_expired, pieces), pace)
                for _, encoded in rows:
                    encoded.undo = None
            for name, pieces in self._frozen.items():
                _write_state(writer, name, pieces, pace)
            written = writer.finish()
            file.flush()
            if self._cancelled:
                raise BaseCancelledError
            return write_segment_file(
                target.store,
                written,
                file.name,
                target.term,
                inline_bytes_max=target.inline_bytes_max,
            )

    def _captured(self, parts: list[tuple[int, HeapRows]]) -> Iterator[tuple[int, dict[Any, Any]]]:
        """Each group as it was."""
        for group, rows in parts:
            captured = rows.capture()
            if captured is None:
                raise BaseCancelledError
            if captured:
                yield group, captured


def _write_state(
    writer: SegmentWriter,
    name: str,
    pieces: Iterator[pa.RecordBatch],
    pace: Callable[[], None],
) -> None:
    begun = False
    for batch in pieces:
        if not begun:
            writer.begin_state(name, batch.schema)
            begun = True
        writer.write(batch)
        pace()
