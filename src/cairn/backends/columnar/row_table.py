"""Rows of keys with times, in runs.

The running epoch adds runs of its own and changes flags of the parent's rows. When it is promoted,
its runs join the others; runs of similar size are merged, so there are few of them, and rows are
sorted a few times however many epochs there are.

Always true here:
- `_runs` holds rows of the parent epoch, `_fresh` rows of the running one;
- the number of a new row is above all numbers of the parent epoch in this table: so it depends on
  state and input alone;
- results and deltas are ordered by input or by name, never by the number of a key;
- lookups on other threads and changes hold the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from cairn.backends.columnar.key_count import KeyCount
from cairn.backends.columnar.key_index import NameIndex
from cairn.backends.columnar.name_order import name_order
from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.pages import Pages
from cairn.backends.columnar.runs import Bools, Found, Rows, Run, concat_rows, expand
from cairn.backends.columnar.spread import Array, grow
from cairn.backends.columnar.stored_rows import make_rows, merge_names
from cairn.backends.contract import Backend, Content
from cairn.backends.overlay import Table, concat_batches
from cairn.backends.timed_rows import TimedRows
from cairn.key_groups import key_groups
from cairn.state import Declaration
from cairn.storage.manifest import Held
from cairn.types.codec import Key, codec
from cairn.types.codec.core import cast_to

PIECE_ROWS = 32 * 1024
DEAD_MIN = 4096


class RowTable(Table):
    """Timed rows, in memory."""

    declaration: TimedRows

    def __init__(
        self, declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
    ) -> None:
        super().__init__(declaration, key_type, backend, group_count)
        self._group_count = group_count
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._keys = NameIndex([self.keys.arrow])
        self._groups: Array = np.empty(0, np.int32)
        """The key group of each key, by its number."""
        self._runs: list[Run] = []
        self._fresh: list[Run] = []
        self._next: int | None = None
        self._dropped = 0
        """Rows that were removed since keys were last numbered."""
        self._loaded: list[pa.RecordBatch] = []
        self._key_count = KeyCount()

    # Reading and writing, by the batch

    def runs(self) -> list[Run]:
        """Return all runs; the oldest rows are in the first ones."""
        self._settle()
        return [*self._runs, *self._fresh]

    def find(self, keys: pa.Array) -> Ints:
        """Return the number of each key, -1 for one that has no rows."""
        self._settle()
        return self._keys.find([keys])

    def key_array(self, numbers: Ints) -> pa.Array:
        """Return the keys with these numbers."""
        return self._keys.arrays(numbers)[0]

    def append(self, keys: pa.Array, times: Ints, rows: pa.StructArray, waiting: Bools) -> None:
        """Add rows, in the order in which they get their numbers."""
        if not len(times):
            return
        self._settle()
        with self._lock:
            self._note_undo()
            numbers = self._place(keys)
            start = self._next_number()
            self._next = start + len(times)
            each = np.arange(start, self._next)
            at = np.arange(len(times))
            added = Rows(numbers, times, each, waiting, at, Pages([rows]))
            run = Run(added, is_committed=False)
            self._fresh = with_run(self._fresh, run)

    def _place(self, keys: pa.Array) -> Ints:
        numbers = self._keys.find([keys])
        missing = np.flatnonzero(numbers < 0)
        if len(missing):
            new = keys if len(missing) == len(keys) else keys.take(pa.array(missing))
            groups = key_groups(new, self.keys.arrow, self._group_count)
            # Before they are added: a key that has a number is not checked again.
            self.check_owned(new, groups)
            placed, firsts = self._keys.add([new])
            self._set_groups(placed[firsts], groups[firsts])
            numbers[missing] = placed
        return numbers

    def _set_groups(self, numbers: Ints, groups: Array) -> None:
        if len(self._keys) > len(self._groups):
            self._groups = grow(self._groups, max(len(self._keys), len(self._groups) * 3 // 2))
        self._groups[numbers] = groups

    def _next_number(self) -> int:
        if self._next is None:
            self._next = 1 + max((run.number_max() for run in self._runs), default=-1)
        return self._next

    def set_waiting(self, found: Found, *, waits: bool) -> None:
        """Record that rows wait for a match, or have found one."""
        with self._lock:
            self._note_undo()
            found.set_waiting(waits=waits)

    def remove(self, found: Found) -> None:
        with self._lock:
            self._note_undo()
            found.remove()

    def before(self, time: int) -> Found:
        """Return the live rows of before a time, in no particular order."""
        parts = [(run, run.before(time)) for run in self.runs()]
        return Found(
            [(run, at, np.zeros(len(at), np.int64)) for run, at in parts], is_ordered=False
        )

    def in_order(self, found: Found) -> Found:
        """Return the same rows by time, number and key."""
        times, numbers = found.times, found.numbers
        if (numbers[1:] > numbers[:-1]).all():
            return found.pick(np.argsort(times, kind="stable"))
        order = np.lexsort((numbers, times))
        is_same = times[order[1:]] == times[order[:-1]]
        is_same &= numbers[order[1:]] == numbers[order[:-1]]
        if is_same.any():
            keys = self.key_array(found.keys)
            order = name_order([pa.array(times), pa.array(numbers), keys])
        return found.pick(order)

    def first_time(self) -> int | None:
        """Return the earliest time of a row."""
        firsts = [run.first for run in self.runs()]
        return min((first for first in firsts if first is not None), default=None)

    def keys_between(self, low: int, high: int) -> pa.Array:
        """Return the keys that have a row from time `low` to `high`, each once."""
        runs = self.runs()
        has_row = np.zeros(len(self._keys), np.bool_)
        for run in runs:
            times = run.all.times
            has_row[run.all.keys[run.live & (times >= low) & (times <= high)]] = True
        return self.key_array(np.flatnonzero(has_row))

    def entries_of(self, keys: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
        """Return every entry of these keys: rows of `keys`, entries, values."""
        numbers = self.find(keys)
        parts = [(run, *self._rows_of(run, numbers)) for run in self.runs()]
        found = Found([(run, rows[run.live[rows]], at[run.live[rows]]) for run, at, rows in parts])
        times = found.times
        entries = self._entries(times, found.numbers)
        order = np.lexsort((found.numbers, self.declaration.panes(times), found.at))
        values = self.declaration.make_values(
            times, found.waiting, found.rows(self.declaration.row_type)
        )
        taken = pa.array(order)
        return pa.array(found.at).take(taken), entries.take(taken), values.take(taken)

    def _rows_of(self, run: Run, numbers: Ints) -> tuple[Ints, Ints]:
        """Return (index into numbers, row) of every row of these keys, gone or not."""
        starts, stops = run.key_bounds(np.maximum(numbers, 0))
        at, places = expand(starts, np.where(numbers < 0, 0, stops - starts))
        return at, run.index.order[places]

    def _note_undo(self) -> None:
        if self.journal is not None:
            marks = [(run, run.mark()) for run in (*self._runs, *self._fresh)]
            self.journal.call(self._undo, self._fresh, marks, self._next)

    def _undo(self, fresh: list[Run], marks: list[tuple[Run, int]], next: int | None) -> None:
        with self._lock:
            self._fresh, self._next = fresh, next
            for run, mark in marks:
                run.back_to(mark)

    # Lookups, on other threads

    def look_up(self, places: Sequence[tuple[int, Key]], *, finished: bool) -> list[Content] | None:
        keys = self.keys.encode([key for _, key in places])
        found: list[Content] = [None] * len(places)
        self._settle()
        with self._lock:
            numbers = self._keys.find([keys])
            runs = [*self._runs, *self._fresh] if finished else self._runs
            for run in runs:
                at, rows = self._rows_of(run, numbers)
                is_held = (run.live if finished else run.committed)[rows]
                at, rows = at[is_held], rows[is_held]
                times = run.all.times[rows]
                waiting = (run.waiting if finished else run.waited)[rows]
                values = self.declaration.make_values(times, waiting, run.all.read(rows))
                entries = self._entries(times, run.all.numbers[rows])
                names = codec(self.declaration.entry_type).decode_keys(entries)
                for index, name, value in zip(
                    at.tolist(), names, self.values.decode(values), strict=True
                ):
                    if found[index] is None:
                        found[index] = {}
                    found[index][name] = value
        return found

    # Epochs

    def assign(self, groups: range) -> None:
        if any(group not in groups for group in self.groups):
            self._keep_groups(lambda held: (held >= groups.start) & (held < groups.stop))
        self.groups = groups

    def forget(self, groups: range) -> None:
        self._keep_groups(lambda held: (held < groups.start) | (held >= groups.stop))

    def _keep_groups(self, keeps: Callable[[Array], Array]) -> None:
        """Drop rows of other key groups. Called between epochs, without pending changes."""
        self.rollback()
        self._settle()
        with self._lock:
            kept = [
                run.all._replace(waiting=run.waited).take(
                    np.flatnonzero(run.committed & keeps(self._groups[run.all.keys]))
                )
                for run in self._runs
            ]
            self._lay_out(kept)

    def _lay_out(self, held: Sequence[Rows]) -> None:
        """Number keys again, those that have rows only."""
        held = [rows for rows in held if len(rows.times)]
        index, groups = self._keys, self._groups
        self._clear()
        if not held:
            return
        has_row = np.zeros(len(index), np.bool_)
        for rows in held:
            has_row[rows.keys] = True
        numbers = np.flatnonzero(has_row)
        placed, _ = self._keys.place(index.arrays(numbers))
        self._set_groups(placed, groups[numbers])
        renumbered = np.empty(len(index), np.int64)
        renumbered[numbers] = placed
        for rows in held:
            run = Run(rows._replace(keys=renumbered[rows.keys]).compact(), is_committed=True)
            self._runs = with_run(self._runs, run)

    def promote(self) -> None:
        with self._lock:
            for run in self._runs:
                if run.is_changed:
                    self._dropped += int(np.count_nonzero(run.committed & ~run.live))
                    run.promote()
            for run in self._fresh:
                self._dropped += int(np.count_nonzero(~run.live))
                run.commit_all()
                self._runs = with_run(self._runs, run)
            self._fresh, self._next = [], None
            self._lay_out_if_sparse()

    def _lay_out_if_sparse(self) -> None:
        held = sum(int(np.count_nonzero(run.live)) for run in self._runs)
        if self._dropped > max(DEAD_MIN, held):
            self._lay_out([run.live_rows() for run in self._runs])

    def rollback(self) -> None:
        with self._lock:
            for run in self._runs:
                run.back_to(0)
            self._fresh, self._next = [], None

    # Stored rows

    def delta(self) -> pa.RecordBatch | None:
        parts = [(run, run.find_changes()) for run in self.runs()]
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return None
        live, waiting = (
            np.concatenate([getattr(run, name)[at] for run, at in parts])
            for name in ("live", "waiting")
        )
        times, numbers, keys = (
            np.concatenate([getattr(run.all, name)[at] for run, at in parts])
            for name in ("times", "numbers", "keys")
        )
        order = self._order_by_name(keys, times, numbers)
        live, waiting = live[order], waiting[order]
        times, keys = times[order], keys[order]
        # Rows that are gone are stored without their content.
        rows = _read(parts, order, None if live.all() else ~live)
        names = [self.key_array(keys), self._entries(times, numbers[order])]
        values = self.declaration.make_values(times, waiting, rows, live)
        return make_rows(self._groups[keys], names, values, live)

    def _order_by_name(self, keys: Ints, times: Ints, numbers: Ints) -> Ints:
        """Return the order of stored rows: by key group, then by name."""
        groups = self._groups[keys]
        small = groups.astype(np.int16 if self._group_count <= 1 << 15 else np.int32)
        order = np.arange(len(keys))
        if (numbers[1:] < numbers[:-1]).any():
            order = np.argsort(numbers, kind="stable")
            small = small[order]
        # Numpy sorts 16-bit numbers in linear time.
        order = order[np.argsort(small, kind="stable")]
        ordered = numbers[order]
        is_same = (ordered[1:] == ordered[:-1]) & (np.diff(groups[order]) == 0)
        if not is_same.any():
            return order
        names = [groups.astype(np.int64), numbers, times]
        return name_order([*map(pa.array, names), self.key_array(keys)])

    def _entries(self, times: Ints, numbers: Ints) -> pa.StructArray:
        columns = [pa.array(self.declaration.panes(times)), pa.array(numbers)]
        return pa.StructArray.from_arrays(columns, fields=list(self.declaration.entry_type))

    def freeze(self) -> Iterator[pa.RecordBatch]:
        """Return the present committed rows; later epochs do not change them."""
        self._settle()
        with self._lock:
            held = [(run, np.flatnonzero(run.committed)) for run in self._runs]
            parts = [
                (run.all._replace(waiting=run.waited.copy()), at) for run, at in held if len(at)
            ]
            index, groups = self._keys, self._groups
        return self._pieces(parts, index, groups)

    def _pieces(
        self, parts: Sequence[tuple[Rows, Ints]], index: NameIndex, groups: Array
    ) -> Iterator[pa.RecordBatch]:
        if not parts:
            return
        held = concat_rows([rows.take(at) for rows, at in parts])
        order = np.argsort(groups[held.keys], kind="stable")
        for start in range(0, len(order), PIECE_ROWS):
            piece = held.take(order[start : start + PIECE_ROWS])
            content = piece.pages.take(piece.at)
            yield make_rows(
                groups[piece.keys],
                [index.arrays(piece.keys)[0], self._entries(piece.times, piece.numbers)],
                self.declaration.make_values(piece.times, piece.waiting, content),
            )

    def dump(self) -> Iterator[pa.RecordBatch]:
        return self.freeze()

    def apply(self, batch: pa.RecordBatch) -> None:
        self._loaded.append(batch)

    def _settle(self) -> None:
        """Make runs of the rows that were read from files: the last one of each name counts."""
        if not self._loaded:
            return
        with self._lock:
            loaded, self._loaded = self._loaded, []
            index, placed = NameIndex(self._name_types), []
            for batch in loaded:
                placed.append(index.place(self._names(batch))[0])
            last = np.empty(len(index), np.int64)
            starts = np.cumsum([0, *map(len, placed)])
            for positions, start in zip(placed, starts[:-1].tolist(), strict=True):
                last[positions] = np.arange(start, start + len(positions))
            if self._runs:
                for batch in loaded:
                    self._drop_named(batch)
            for batch, positions, start in zip(loaded, placed, starts.tolist(), strict=False):
                is_last = last[positions] == np.arange(start, start + len(positions))
                is_last &= batch["live"].to_numpy(zero_copy_only=False)
                if is_last.any():
                    self._load(batch.filter(pa.array(is_last)))

    def end_applying(self) -> None:
        self._settle()
        with self._lock:
            self._lay_out_if_sparse()

    def _drop_named(self, batch: pa.RecordBatch) -> None:
        """Drop the rows that stored rows replace or delete."""
        keys, entries = self._names(batch)
        numbers = self._keys.find([keys])
        is_known = numbers >= 0
        panes, each = (entries.field(at).to_numpy()[is_known] for at in (0, 1))
        numbers = numbers[is_known]
        named = _tuples(numbers, panes, each)
        for run in self._runs:
            _, rows = self._rows_of(run, np.unique(numbers))
            rows = rows[run.committed[rows]]
            panes = self.declaration.panes(run.all.times[rows])
            held = _tuples(run.all.keys[rows], panes, run.all.numbers[rows])
            gone = rows[np.isin(held, named)]
            self._dropped += len(gone)
            run.drop(gone)

    def _load(self, batch: pa.RecordBatch) -> None:
        keys, entries = self._names(batch)
        numbers, _ = self._keys.place([keys])
        self._set_groups(numbers, batch["group"].to_numpy())
        values = cast_to(self.values.arrow, batch["value"])
        rows = Rows(
            numbers,
            values.field("time").to_numpy(),
            entries.field(1).to_numpy(),
            self.declaration.read_waiting(values),
            np.arange(len(numbers)),
            Pages([values.field("row")]),
        )
        self._runs = with_run(self._runs, Run(rows, is_committed=True))

    @property
    def _name_types(self) -> list[pa.DataType]:
        return [self.keys.arrow, codec(self.declaration.entry_type).arrow]

    def _names(self, batch: pa.RecordBatch) -> list[pa.Array]:
        columns = zip(("key", "entry"), self._name_types, strict=True)
        return [cast_to(type, batch[name]) for name, type in columns]

    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        return merge_names(concat_batches(batches), NameIndex(self._name_types), self._names)

    def keys_changed(self) -> int:
        return sum(len(run.find_changes()) for run in self.runs())

    def count_held(self) -> Held:
        runs = self.runs()
        entries = sum(int(np.count_nonzero(run.live)) for run in runs)

        def count_keys() -> int:
            has_row = np.zeros(len(self._keys), np.bool_)
            for run in runs:
                has_row[run.all.keys[run.live]] = True
            return int(np.count_nonzero(has_row))

        return self._key_count.update(entries, self.keys_changed(), count_keys)


def _read(parts: Sequence[tuple[Run, Ints]], order: Ints, is_null: Bools | None) -> pa.StructArray:
    """Return the content of rows of several runs in this order."""
    pages = [run.all.pages for run, _ in parts]
    starts = np.cumsum([0, *map(len, pages[:-1])]).tolist()
    at = [run.all.at[rows] + start for (run, rows), start in zip(parts, starts, strict=True)]
    places = np.concatenate(at)[order]
    return Pages([array for each in pages for array in each.arrays]).take(places, is_null)


def with_run(runs: Sequence[Run], run: Run) -> list[Run]:
    """Return the runs with one more; those that are not much larger are merged with it.

    All are of the parent epoch, or all of the running one.
    """
    kept = list(runs)
    merged = [run]
    size = len(run)
    while kept and len(kept[-1]) < 2 * size and not kept[-1].is_changed:
        merged.append(kept.pop())
        size += len(merged[-1])
    if len(merged) == 1:
        return [*kept, run] if run.live.any() else kept
    parts = (each.live_rows().compact() for each in reversed(merged))
    held = [rows for rows in parts if len(rows.times)]
    return [*kept, Run(concat_rows(held), is_committed=not run.is_fresh)] if held else kept


def _tuples(*columns: Ints) -> Array:
    """Return the rows of these columns as values that can be compared."""
    stacked = np.stack([column.astype(np.int64) for column in columns], axis=1)
    return stacked.view([("", np.int64)] * len(columns)).ravel()
