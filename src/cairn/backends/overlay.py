"""One state of an operator: the committed rows, and above them the changes of the running epoch.

A function reads through the overlay and writes only to it. So the overlay is the delta of the
epoch, dropping it is the rollback, and the rows below are the last committed epoch, which
lookups read. A backend never holds anything uncommitted.

Stored rows have the form described in `layout`.

Always true here:
- `rows` is the parent epoch's state, until `promote` adds the overlay to it;
- applying a base and then its deltas, in order, gives the state they were taken from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.backends.contract import ABSENT, Backend, Change, Content, Rows
from cairn.backends.expiry import Expiry, leave_out_expired
from cairn.backends.heap.backend import empty_rows
from cairn.backends.journal import Journal
from cairn.backends.layout import ListLayout, MapLayout, live_column, make_layout, runs
from cairn.errors import FunctionError
from cairn.functions import EVENT_TIMERS, PROCESSING_TIMERS
from cairn.state import TTL, Declaration
from cairn.storage.manifest import Held
from cairn.types.codec import Codec, Datum, Key, codec, strict
from cairn.types.codec.core import Values
from cairn.types.codec.stamped import stamp_codec

BASE_BATCH_ROWS = 64 * 1024
COUNT_SAMPLE_KEYS = 64


class Table(ABC):
    """Rows of one state, by key group, and the overlay of the running epoch."""

    stored_kind: ClassVar[str | None] = None
    """Kind of the rows in a database; None: the declaration's layout."""

    def __init__(
        self, declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
    ) -> None:
        self.declaration = declaration
        self.name = declaration.name
        self.keys = codec(key_type)
        ttl = declaration.ttl
        self.values = codec(declaration.type) if ttl is None else stamp_codec(declaration.type)
        entry_type = declaration.entry_type
        entries = None if entry_type is None else codec(entry_type)
        kind = declaration.layout
        backend.open_state(self.name, self.stored_kind or kind, self.keys, self.values, entries)
        self.layout = make_layout(self.name, kind, self.keys, self.values, entries)
        self.backend = backend
        # Indexed by key group. Handles hold both lists, so they are never replaced.
        self.rows: list[Rows] = [empty_rows(kind) for _ in range(group_count)]
        self.changes: list[dict[Key, Change]] = [{} for _ in range(group_count)]
        self.groups = range(0)
        self.expiry = None if ttl is None else _make_expiry(self, ttl)
        self.journal: Journal | None = None
        """Undo log of the current row, if the epoch can go on without a row that fails."""

    @property
    def written(self) -> Codec:
        """Codec of the values that functions write."""
        return self._strict_if_journaled(codec(self.declaration.type))

    def _strict_if_journaled(self, written: Codec) -> Codec:
        """With a journal, a value that cannot be stored must fail in the row that writes it."""
        return written if self.journal is None else strict(written)

    def assign(self, groups: range) -> None:
        """Own these key groups: keep the rows of those owned before, drop the others."""
        for group in self.groups:
            if group not in groups:
                self.backend.drop(self.name, group)
                self.rows[group] = empty_rows(self.declaration.layout)
                self.changes[group] = {}
                if self.expiry is not None:
                    self.expiry.release(group)
        for group in groups:
            if group not in self.groups:
                self.rows[group] = self.backend.rows(self.name, group)
                if self.expiry is not None:
                    self.expiry.assign(group)
        self.groups = groups

    def forget(self, groups: range) -> None:
        """Drop the rows of these key groups, to load them again."""
        for group in groups:
            if group in self.groups:
                self.backend.drop(self.name, group)
                self.rows[group] = self.backend.rows(self.name, group)
                self.changes[group] = {}
                if self.expiry is not None:
                    self.expiry.release(group)
                    self.expiry.assign(group)

    def check_owned(self, keys: pa.Array, groups: npt.NDArray[np.integer[Any]]) -> None:
        """Refuse keys of key groups that belong to another subtask."""
        foreign = np.flatnonzero((groups < self.groups.start) | (groups >= self.groups.stop))
        if len(foreign):
            key = keys[int(foreign[0])].as_py()
            raise FunctionError(
                f"state {self.name!r}: key {key!r} belongs to another subtask\n"
                "  found: a key that no row of this batch has\n"
                "  expected: state is read and written under the keys of the rows (ctx.keys)\n"
                "  next: key_by() the column that these keys are taken from",
                state=self.name,
                key=key,
            )

    def promote(self) -> None:
        """Make the changes of the committed epoch part of the rows."""
        changed = {group: self.changes[group] for group in self.groups if self.changes[group]}
        if changed:
            self.backend.prepare_promote(self.name, changed)
        for group, changes in changed.items():
            # If a later one fails, this one is not promoted again.
            self._promote(group, changes)
            self.changes[group] = {}

    def rollback(self) -> None:
        """Drop the changes of the epoch."""
        for group in self.groups:
            if self.changes[group]:
                self.changes[group] = {}

    def look_up(self, places: Sequence[tuple[int, Key]], *, finished: bool) -> list[Content] | None:
        """Return copies of the contents of keys, each in its key group; None for nothing.

        As of the parent epoch; with `finished` as of the current epoch, which has finished. On
        any thread while an epoch runs, but not while it is promoted or rolled back. Returns None
        if the table needs more calls to prepare the answer.
        """
        if not finished:
            return [self.rows[group].peek(key) for group, key in places]
        return [
            self._after(self.rows[group].peek(key), self.changes[group][key])
            if key in self.changes[group]
            else self.rows[group].peek(key)
            for group, key in places
        ]

    def _after(self, held: Content, change: Change) -> Content:
        return change

    def dump(self) -> Iterator[pa.RecordBatch]:
        """Yield the committed rows by key, in batches of whole key groups."""
        groups: list[int] = []
        mappings: list[dict[Key, Content]] = []
        row_count = 0
        for group in self.groups:
            held = dict(self.rows[group].items())
            if not held:
                continue
            if groups and row_count + len(held) > BASE_BATCH_ROWS:
                yield self._dump(groups, mappings)
                groups, mappings, row_count = [], [], 0
            groups.append(group)
            mappings.append(sort_by_key(held))
            row_count += len(held)
        if groups:
            yield self._dump(groups, mappings)

    def freeze(self) -> Iterator[pa.RecordBatch] | None:
        """Return the present committed rows if the table holds them itself, not the backend.

        They are read on another thread, while later epochs run.
        """
        return None

    def delta(self) -> pa.RecordBatch | None:
        """Return the changes of the epoch; None if there are none."""
        groups = [group for group in self.groups if self.changes[group]]
        return self.layout.batch(groups, [self.changes[g] for g in groups]) if groups else None

    def sort_changes(self) -> None:
        """Put the epoch's changes into the order of the keys."""
        for group in self.groups:
            if len(self.changes[group]) > 1:
                self.changes[group] = sort_by_key(self.changes[group])

    def _dump(self, groups: list[int], mappings: list[dict[Key, Content]]) -> pa.RecordBatch:
        return self.layout.batch(groups, mappings)

    def leave_out_expired(
        self, batch: pa.RecordBatch, floor_ms: int | None = None, *, keep_rows: bool = False
    ) -> pa.RecordBatch:
        """Return stored rows that had not expired at `floor_ms`, or at the last epoch's floor."""
        ttl, expiry = self.declaration.ttl, self.expiry
        if ttl is None or expiry is None:
            return batch
        floor = expiry.floor_ms if floor_ms is None else floor_ms
        if floor is None:
            return batch
        kind = self.declaration.layout
        return leave_out_expired(batch, kind, floor - ttl.ms, keep_rows=keep_rows)

    @abstractmethod
    def keys_changed(self) -> int:
        """Return the number of keys (entries, for maps) that the epoch has changed."""

    @abstractmethod
    def count_held(self) -> Held:
        """Count keys and entries, the epoch's changes included.

        The figures are for people: the new keys of large epochs are estimated.
        """

    def pack_changes(self) -> pa.RecordBatch | None:
        """Return the overlay as `unpack_changes` takes it; None if packing would not pay."""
        return None

    def unpack_changes(self, batch: pa.RecordBatch) -> None:
        """Restore the overlay that was packed."""
        raise AssertionError(f"state {self.name!r}: nothing was packed")

    @abstractmethod
    def apply(self, batch: pa.RecordBatch) -> None:
        """Add the stored rows of a base or a delta to the committed rows."""

    def end_applying(self) -> None:
        """The rows of a version are applied: finish what was put off, and release memory."""

    def _add(self, changed: Mapping[int, Mapping[Key, Change]]) -> None:
        """Add stored changes of key groups to the rows."""
        if changed:
            self.backend.prepare_restore(self.name, changed)
        for group, changes in changed.items():
            self._restore(group, changes)

    def _restore(self, group: int, changes: Mapping[Key, Change]) -> None:
        if self.expiry is not None:
            self.expiry.note_new_keys(group, changes)
        self.rows[group].restore(changes)

    def _promote(self, group: int, changes: Mapping[Key, Change]) -> None:
        if self.expiry is not None:
            self.expiry.note_new_keys(group, changes)
        self.rows[group].promote(changes)

    @abstractmethod
    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        """Merge deltas, in order, into one: the last change of each key wins."""


class ValueTable(Table):
    """Value, reducing and aggregating state. An overlay value of None is a deletion."""

    @property
    def written_keys(self) -> Codec:
        """Codec of the keys that functions write, for broadcast state."""
        return self._strict_if_journaled(self.keys)

    def keys_changed(self) -> int:
        return sum(len(self.changes[group]) for group in self.groups)

    def count_held(self) -> Held:
        held = 0
        for group in self.groups:
            rows, changes = self.rows[group], self.changes[group]
            held += len(rows)
            if changes:
                held += _count_new(rows, changes)
                if None in changes.values():
                    held -= sum(value is None for value in changes.values())
        return Held(held, held)

    def pack_changes(self) -> pa.RecordBatch | None:
        return self.delta()

    def unpack_changes(self, batch: pa.RecordBatch) -> None:
        for group, changes in self._changes_of(batch):
            self.changes[group] = changes

    def apply(self, batch: pa.RecordBatch) -> None:
        changed: dict[int, dict[Key, Change]] = {}
        for group, changes in self._changes_of(batch):
            # A batch may have a key group in several places.
            changed.setdefault(group, {}).update(changes)
        self._add(changed)

    def _changes_of(self, batch: pa.RecordBatch) -> Iterator[tuple[int, dict[Key, Change]]]:
        values = self.values.decode(batch["value"])
        keys = self.keys.decode_keys(batch["key"])
        for group, start, stop in runs(batch["group"]):
            yield group, dict(zip(keys[start:stop], values[start:stop], strict=True))

    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        return _last_rows(batches, (self.keys.decode_keys(b["key"]) for b in batches))


class MapTable(Table):
    """Map state: a mapping of entries per key, in the rows and in the overlay.

    An overlay entry of ABSENT is a deletion; None is a value like any other.
    """

    layout: MapLayout

    @property
    def entries(self) -> Codec:
        return self.layout.entries

    @property
    def written_entries(self) -> Codec:
        """Codec of the map keys that functions write."""
        return self._strict_if_journaled(self.entries)

    def _after(self, held: Content, change: Change) -> Content:
        merged = {**(held or {}), **change}
        return {entry: value for entry, value in merged.items() if value is not ABSENT} or None

    def keys_changed(self) -> int:
        return sum(len(changed) for g in self.groups for changed in self.changes[g].values())

    def count_held(self) -> Held:
        keys = sum(len(self.rows[group]) for group in self.groups)
        total = sum(self.rows[group].entry_count() for group in self.groups)
        for group in self.groups:
            for key, changed in self.changes[group].items():
                entries = self.rows[group].get(key, {})
                added = 0
                for entry, value in changed.items():
                    added += (value is not ABSENT) - (entry in entries)
                before = len(entries)
                keys += (before + added > 0) - (before > 0)
                total += added
        return Held(keys, total)

    def _dump(self, groups: list[int], mappings: list[dict[Key, Content]]) -> pa.RecordBatch:
        inner = [{key: sort_by_key(held) for key, held in m.items()} for m in mappings]
        return self.layout.batch(groups, inner)

    def apply(self, batch: pa.RecordBatch) -> None:
        changes: dict[int, dict[Key, dict[Key, Datum]]] = {}
        for group, key, entry, value, live in zip(
            batch["group"].to_numpy().tolist(),
            self.keys.decode_keys(batch["key"]),
            self.entries.decode_keys(batch["entry"]),
            self.values.decode(batch["value"]),
            live_column(batch),
            strict=True,
        ):
            changed = changes.setdefault(group, {}).setdefault(key, {})
            changed[entry] = value if live else ABSENT
        self._add(changes)

    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        names = (
            list(
                zip(
                    self.keys.decode_keys(batch["key"]),
                    self.entries.decode_keys(batch["entry"]),
                    strict=True,
                )
            )
            for batch in batches
        )
        return _last_rows(batches, names)


class ListTable(Table):
    """List state: a sequence of items per key, and in the overlay (start, added)."""

    def _after(self, held: Content, change: Change) -> Content:
        start, added = change
        return [*(held or ())[:start], *added] or None

    def keys_changed(self) -> int:
        return sum(len(self.changes[group]) for group in self.groups)

    def count_held(self) -> Held:
        held = 0
        for group in self.groups:
            rows = self.rows[group]
            held += len(rows)
            for key, (start, added) in self.changes[group].items():
                held += (start > 0 or len(added) > 0) - (key in rows)
        return Held(held, held)

    layout: ListLayout

    def _dump(self, groups: list[int], mappings: list[dict[Key, Content]]) -> pa.RecordBatch:
        return self.layout.batch(
            groups, [{key: (0, items) for key, items in m.items()} for m in mappings]
        )

    def _rows_of(self, batch: pa.RecordBatch) -> Iterator[tuple[int, Key, int, Values]]:
        """Yield (group, key, start, items) of each row."""
        keys = self.keys.decode_keys(batch["key"])
        starts = batch["start"].to_numpy().tolist()
        ends = batch["value"].offsets.to_numpy().tolist()
        items = self.values.decode(batch["value"].flatten())
        first = ends[0] if ends else 0
        for at, group in enumerate(batch["group"].to_numpy().tolist()):
            yield group, keys[at], starts[at], items[ends[at] - first : ends[at + 1] - first]

    def apply(self, batch: pa.RecordBatch) -> None:
        changes: dict[int, dict[Key, tuple[int, Values]]] = {}
        for group, key, start, items in self._rows_of(batch):
            own = changes.setdefault(group, {})
            if key in own:
                # The next piece of a long list.
                self._restore(group, {key: own.pop(key)})
            own[key] = (start, items)
        self._add(changes)

    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        merged: dict[int, dict[Key, tuple[int, Values]]] = {}
        for batch in batches:
            for group, key, start, items in self._rows_of(batch):
                changes = merged.setdefault(group, {})
                held = changes.get(key)
                if held is not None and start >= held[0]:
                    changes[key] = (held[0], held[1][: start - held[0]] + items)
                else:
                    changes[key] = (start, items)
        groups = sorted(merged)
        return self.layout.batch(groups, [merged[group] for group in groups])


def _make_expiry(table: Table, ttl: TTL) -> Expiry:
    if not table.backend.orders_times:
        return Expiry(table, ttl)
    # Not at the top, as in `make_table`.
    from cairn.backends.stored_expiry import StoredExpiry

    return StoredExpiry(table, ttl)


MakeTable: TypeAlias = Callable[[Declaration, pa.DataType, Backend, int], Table]


def make_table(
    declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
) -> Table:
    if backend.orders_times and declaration.name in (EVENT_TIMERS, PROCESSING_TIMERS):
        # Not at the top: it is a table itself, and a slot with state in memory has none of it.
        from cairn.backends.timer_table import TimerTable

        return TimerTable(declaration, key_type, backend, group_count)
    kinds: dict[str, type[Table]] = {"map": MapTable, "list": ListTable}
    return kinds.get(declaration.layout, ValueTable)(declaration, key_type, backend, group_count)


def _count_new(rows: Rows, changes: dict[Key, Change]) -> int:
    """Estimate from a sample how many of the changed keys are not in the rows.

    Looking up each key would be a cache miss each, a tenth of what a large epoch costs.
    The rows themselves are counted exactly, so the error does not add up.
    """
    step = max(1, len(changes) // COUNT_SAMPLE_KEYS)
    sample = list(islice(changes, 0, None, step))
    known = sum(map(rows.__contains__, sample))
    return round(len(changes) * (len(sample) - known) / len(sample))


def in_order(names: Iterable[Key]) -> list[Datum]:
    """Sort keys by value, None first and NaN last at any depth.

    The insertion order of a mapping does not survive a restore.
    """
    found: list[Datum] = list(names)
    if set(map(type, found)) in _PLAINLY_ORDERED:
        return sorted(found)
    return sorted(found, key=_place)


_PLAINLY_ORDERED: tuple[set[type], ...] = ({int}, {str}, {bytes})


def _place(name: Datum) -> tuple[Datum, ...]:
    if name is None:
        return (0,)
    if isinstance(name, tuple):
        return 1, tuple(map(_place, name))
    return (2,) if name != name else (1, name)


def sort_by_key(rows: Mapping[Key, Content]) -> dict[Key, Content]:
    return {key: rows[key] for key in in_order(rows)}


def concat_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return all rows in one batch."""
    pieces = pa.Table.from_batches(batches).combine_chunks().to_batches()
    if len(pieces) > 1:
        # The files of the deltas stay as they are, so nothing is lost.
        raise OverflowError("deltas of more than 2 GiB of text or binary are not merged")
    return pieces[0]


def _last_rows(batches: Sequence[pa.RecordBatch], names: Iterable[Values]) -> pa.RecordBatch:
    """Return the last row of each group and name, sorted by group."""
    whole = concat_batches(batches)
    groups = whole["group"].to_numpy()
    flat = (name for batch in names for name in batch)
    last = {named: at for at, named in enumerate(zip(groups.tolist(), flat, strict=True))}
    rows = np.fromiter(last.values(), np.int64, len(last))
    order = np.argsort(groups[rows], kind="stable")
    return whole.take(pa.array(rows[order]))
