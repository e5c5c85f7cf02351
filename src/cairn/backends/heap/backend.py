"""State in the slot's memory: a dict per state and key group.

A base is written by key group: the writer copies a group at once and encodes the copy. In groups
that the writer has not reached, `promote` keeps the previous content of each key that it changes
(copy-on-write per key), and the writer puts that back into its copy.

Always true here:
- while no base is written, `promote` and `get` cost what a dict costs;
- content that a base has captured is never changed: containers are replaced, not written to.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import filterfalse, repeat
from typing import TYPE_CHECKING

import pyarrow as pa

from cairn.backends.contract import (
    ABSENT,
    Backend,
    Base,
    BaseCancelledError,
    BaseTarget,
    Change,
    Content,
    Cursor,
)
from cairn.backends.layout import RowsByGroup
from cairn.storage.files import SegmentWriter, StateFile
from cairn.storage.pack import write_segment_file
from cairn.types.codec import Codec, Key

if TYPE_CHECKING:
    from cairn.backends.overlay import Table

BASE_PIECE_ROWS = 8 * 1024
# A dict takes 30 to 120 bytes a row as it grows.
COMPACT_ROW_BYTES = 400
COMPACT_BYTES_MIN = 4096


class HeapRows(dict[Key, Content]):
    """Rows of value state. `get` and `[]` are dict's own: they run once or more per input row."""

    __slots__ = ("lock", "undo")

    def __init__(self, lock: threading.Lock | None = None) -> None:
        super().__init__()
        self.lock = lock or threading.Lock()
        self.undo: dict[Key, Content] | None = None
        """Until a base has captured these rows: the previous content of changed keys."""

    def __missing__(self, key: Key) -> None:
        return None

    def entry_count(self) -> int:
        return len(self)

    def promote(self, changes: Mapping[Key, Change]) -> None:
        if self.undo is None:
            self._change(changes)
            return
        with self.lock:
            if self.undo is not None:
                self._remember(self.undo, changes)
            self._change(changes)

    def restore(self, changes: Mapping[Key, Change]) -> None:
        self.promote(changes)

    def peek(self, key: Key) -> Content:
        return self.get(key)

    def capture(self) -> dict[Key, Content] | None:
        """Return the rows as of the beginning of the base; None if the base was cancelled."""
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

    def get_many(self, keys: Sequence[Key]) -> list[Content]:
        return list(map(self.get, keys))

    def new_keys(self, keys: Iterable[Key]) -> list[Key]:
        return list(filterfalse(self.__contains__, keys))

    def scan(self, cursor: Cursor | None, count: int) -> tuple[list[tuple[Key, Content]], None]:
        return list(self.items()), None

    def compact(self) -> None:
        # A dict never shrinks by itself.
        if sys.getsizeof(self) > COMPACT_BYTES_MIN + COMPACT_ROW_BYTES * len(self):
            with self.lock:
                kept = dict(self)
                # The dict's own clear: counts stay, as the rows are the same before and after.
                dict.clear(self)
                self.update(kept)

    def _undo_after_capture(self) -> dict[Key, Content] | None:
        return None

    def _remember(self, undo: dict[Key, Content], changes: Mapping[Key, Change]) -> None:
        first = [key for key in changes if key not in undo]
        undo.update(zip(first, map(self.get, first, repeat(ABSENT)), strict=True))

    def _change(self, changes: Mapping[Key, Change]) -> None:
        self.update(changes)
        if None in changes.values():
            for key, value in changes.items():
                if value is None:
                    del self[key]


class _ContainerRows(HeapRows):
    """Rows whose content is changed in place: captured content must be replaced first."""

    __slots__ = ()

    def peek(self, key: Key) -> Content:
        held = self.get(key)
        return None if held is None else held.copy()

    def _undo_after_capture(self) -> dict[Key, Content] | None:
        # Until the copy is encoded it shares its containers with these rows.
        return {}

    def _remember(self, undo: dict[Key, Content], changes: Mapping[Key, Change]) -> None:
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

    def _change(self, changes: Mapping[Key, Change]) -> None:
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

    def _change(self, changes: Mapping[Key, Change]) -> None:
        for key, (start, added) in changes.items():
            items = self.setdefault(key, [])
            del items[start:]
            items += added
            if not items:
                del self[key]


ROWS: dict[str, type[HeapRows]] = {"map": HeapMapRows, "list": HeapListRows}


def empty_rows(kind: str) -> HeapRows:
    """Return the rows of a key group that this slot does not own."""
    return ROWS.get(kind, HeapRows)()


class HeapBackend(Backend):
    """The fastest backend, for state that fits in memory."""

    takes_columns = True

    def __init__(self) -> None:
        self._states: dict[str, tuple[object, ...]] = {}
        self._rows: dict[tuple[str, int], HeapRows] = {}
        self._lock = threading.Lock()
        self._base: HeapBase | None = None

    def open_state(
        self, name: str, kind: str, keys: Codec, values: Codec, entries: Codec | None
    ) -> None:
        declared: tuple[object, ...] = (kind, keys.type, values.type, entries and entries.type)
        if self._states.get(name, declared) != declared:
            for state, group in list(self._rows):
                if state == name:
                    self.drop(name, group)
        self._states[name] = declared

    def rows(self, name: str, group_index: int) -> HeapRows:
        found = self._rows.get((name, group_index))
        if found is None:
            kind = str(self._states[name][0])
            found = self._rows[name, group_index] = ROWS.get(kind, HeapRows)(self._lock)
        return found

    def drop(self, name: str, group_index: int) -> None:
        if self._base is not None:
            self._base.cancel()
        self._rows.pop((name, group_index), None)

    def repack(self, tables: Sequence[Table]) -> bool:
        if self._base is not None:
            return False
        # Python releases an arena when it is empty. So everything is removed before anything
        # is added again: moved one by one, rows would fill the holes that others left. The
        # overlay too: a few thousand keys would keep as many arenas alive.
        packed = [(table, list(table.dump()), table.pack_changes()) for table in tables]
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
        self._base = HeapBase(parts, self._end_base, frozen)
        return self._base

    def _end_base(self) -> None:
        self._base = None

    def close(self) -> None:
        if self._base is not None:
            self._base.cancel()
        self._rows.clear()


_Parts = dict[str, tuple["Table", list[tuple[int, HeapRows]]]]


class HeapBase(Base):
    """Writes a segment with all rows, one key group after the other."""

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
                pieces = table.layout.pieces(self._capture(rows), BASE_PIECE_ROWS)
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

    def _capture(self, parts: list[tuple[int, HeapRows]]) -> RowsByGroup:
        """Yield each group as it was when the base began."""
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
    for number, batch in enumerate(pieces):
        if not number:
            writer.begin_state(name, batch.schema)
        writer.write(batch)
        pace()
