"""One state of an operator: the committed rows, and above them what the running epoch changed.

A function reads through the overlay and writes to it only. So the overlay is the delta
(what changed), dropping it is the rollback, and the rows below are the last committed
epoch for whoever asks. A backend never holds anything uncommitted.

How stored rows look is said in `layout`.

Always true here:
- `rows` is the parent epoch's state, until `promote` takes the overlay in;
- applying a base and then its deltas, in order, gives the state they were taken from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.backends.base import ABSENT as ABSENT
from cairn.backends.base import Backend, Rows
from cairn.backends.expiry import Expiry, leave_out_expired
from cairn.backends.heap.backend import empty_rows
from cairn.backends.journal import Journal
from cairn.backends.layout import ListLayout, MapLayout, live_column, make_layout, runs
from cairn.errors import FunctionError
from cairn.state import Declaration
from cairn.storage.manifest import Held
from cairn.types.codec import Codec, codec, strict
from cairn.types.codec.stamped import stamp_codec

BASE_BATCH_ROWS = 64 * 1024
COUNT_SAMPLE_KEYS = 64


class Table(ABC):
    """Rows of one state, by key group, and the overlay of the running epoch."""

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
        backend.open_state(self.name, kind, self.keys, self.values, entries)
        self.layout = make_layout(self.name, kind, self.keys, self.values, entries)
        self.backend = backend
        # Both lists are indexed by key group and keep their identity for life: handles hold them.
        self.rows: list[Rows] = [empty_rows(kind) for _ in range(group_count)]
        self.changes: list[dict[Any, Any]] = [{} for _ in range(group_count)]
        self.groups = range(0)
        self.expiry = None if ttl is None else Expiry(self, ttl)
        self.journal: Journal | None = None
        """Where who writes says how to undo it, if the epoch may go on without the row at hand."""

    @property
    def written(self) -> Codec:
        """The codec of the values that functions write."""
        return self._answerable(codec(self.declaration.type))

    def _answerable(self, written: Codec) -> Codec:
        """With a journal a row answers for all it writes: nothing may fail after it is done."""
        return written if self.journal is None else strict(written)

    def assign(self, groups: range) -> None:
        """Own these key groups: keep what is there already, drop what no longer belongs."""
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
        """Hold nothing of these key groups, to be loaded anew."""
        for group in groups:
            if group in self.groups:
                self.backend.drop(self.name, group)
                self.rows[group] = self.backend.rows(self.name, group)
                self.changes[group] = {}
                if self.expiry is not None:
                    self.expiry.assign(group)

    def check_owned(self, keys: pa.Array, groups: npt.NDArray[Any]) -> None:
        """Refuse keys of key groups that are not here: another subtask holds their state."""
        foreign = np.flatnonzero((groups < self.groups.start) | (groups >= self.groups.stop))
        if len(foreign):
            key = keys[int(foreign[0])].as_py()
            raise FunctionError(
                f"state {self.name!r}: key {key!r} is not one of this subtask\n"
                "  found: a key that is not the key of the rows at hand\n"
                "  expected: state is read and written under the key of the rows (ctx.keys)\n"
                "  next: key_by() the column that these keys are taken from",
                state=self.name,
                key=key,
            )

    def promote(self) -> None:
        """The epoch is committed: its changes are the state now."""
        for group in self.groups:
            changes = self.changes[group]
            if changes:
                if self.expiry is not None:
                    self.expiry.promoting(group, changes)
                self.rows[group].promote(changes)
                self.changes[group] = {}

    def rollback(self) -> None:
        """The epoch never happened."""
        for group in self.groups:
            if self.changes[group]:
                self.changes[group] = {}

    def look_up(self, places: Sequence[tuple[int, Any]], *, finished: bool) -> list[Any] | None:
        """What is held of keys, each in its key group: copies; None for nothing.

        No list at all: it is not ready yet, and nearer to it than before.

        As of the parent epoch; `finished`: as of the epoch at hand, which has finished. On any
        thread, while an epoch runs, but not while it is promoted or undone.
        """
        if not finished:
            return [self.rows[group].peek(key) for group, key in places]
        return [
            self._after(self.rows[group].peek(key), self.changes[group][key])
            if key in self.changes[group]
            else self.rows[group].peek(key)
            for group, key in places
        ]

    def _after(self, held: Any, change: Any) -> Any:
        """What is held of a key after a change of the overlay."""
        return change

    def dump(self) -> Iterator[pa.RecordBatch]:
        """The committed rows by key, in batches of whole key groups where they are small."""
        groups: list[int] = []
        mappings: list[dict[Any, Any]] = []
        row_count = 0
        for group in self.groups:
            held = dict(self.rows[group].items())
            if not held:
                continue
            if groups and row_count + len(held) > BASE_BATCH_ROWS:
                yield self._dump(groups, mappings)
                groups, mappings, row_count = [], [], 0
            groups.append(group)
            mappings.append(sorted_rows(held))
            row_count += len(held)
        if groups:
            yield self._dump(groups, mappings)

    def freeze(self) -> Iterator[pa.RecordBatch] | None:
        """The committed rows as of now, where the table holds them itself; None: the backend does.

        Read on another thread, while later epochs run.
        """
        return None

    def delta(self) -> pa.RecordBatch | None:
        """What the epoch changed."""
        groups = [group for group in self.groups if self.changes[group]]
        return self.layout.batch(groups, [self.changes[g] for g in groups]) if groups else None

    def sort_changes(self) -> None:
        """The epoch's changes in the order of the keys, not in that in which they were made."""
        for group in self.groups:
            if len(self.changes[group]) > 1:
                self.changes[group] = sorted_rows(self.changes[group])

    def _dump(self, groups: list[int], mappings: list[dict[Any, Any]]) -> pa.RecordBatch:
        return self.layout.batch(groups, mappings)

    def leave_out_expired(
        self, batch: pa.RecordBatch, floor_ms: int | None = None, *, keep_rows: bool = False
    ) -> pa.RecordBatch:
        """Stored rows that had not expired before `floor_ms`, or before that of the last epoch."""
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
        """How many keys (entries, for maps) the epoch has touched."""

    @abstractmethod
    def held(self) -> Held:
        """Count keys and entries, the epoch's changes included.

        Figures for people: of large epochs the keys that are new are estimated.
        """

    def packed_changes(self) -> pa.RecordBatch | None:
        """The overlay as `unpack_changes` takes it; None where that is not worth while."""
        return None

    def unpack_changes(self, batch: pa.RecordBatch) -> None:
        """Be the overlay that was packed."""
        raise AssertionError(f"state {self.name!r}: nothing was packed")

    @abstractmethod
    def apply(self, batch: pa.RecordBatch) -> None:
        """Load stored rows: of a base, or of a delta upon what is there."""

    @abstractmethod
    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        """Deltas in order, as one delta: of each key the last word. Looks at nothing else."""


class ValueTable(Table):
    """Value, reducing and aggregating state. An overlay value of None is a deletion."""

    @property
    def written_keys(self) -> Codec:
        """The codec of the keys that functions write, for broadcast state."""
        return self._answerable(self.keys)

    def keys_changed(self) -> int:
        return sum(len(self.changes[group]) for group in self.groups)

    def held(self) -> Held:
        held = 0
        for group in self.groups:
            rows, changes = self.rows[group], self.changes[group]
            held += len(rows)
            if changes:
                held += _count_new(rows, changes)
                if None in changes.values():
                    held -= sum(value is None for value in changes.values())
        return Held(held, held)

    def packed_changes(self) -> pa.RecordBatch | None:
        return self.delta()

    def unpack_changes(self, batch: pa.RecordBatch) -> None:
        for group, changes in self._changes_of(batch):
            self.changes[group] = changes

    def apply(self, batch: pa.RecordBatch) -> None:
        for group, changes in self._changes_of(batch):
            self.rows[group].promote(changes)

    def _changes_of(self, batch: pa.RecordBatch) -> Iterator[tuple[int, dict[Any, Any]]]:
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
        """The codec of the map keys that functions write."""
        return self._answerable(self.entries)

    def _after(self, held: Any, change: Any) -> Any:
        merged = {**(held or {}), **change}
        return {entry: value for entry, value in merged.items() if value is not ABSENT} or None

    def keys_changed(self) -> int:
        return sum(len(changed) for g in self.groups for changed in self.changes[g].values())

    def held(self) -> Held:
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

    def _dump(self, groups: list[int], mappings: list[dict[Any, Any]]) -> pa.RecordBatch:
        inner = [{key: sorted_rows(held) for key, held in m.items()} for m in mappings]
        return self.layout.batch(groups, inner)

    def apply(self, batch: pa.RecordBatch) -> None:
        changes: dict[int, dict[Any, dict[Any, Any]]] = {}
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
        for group, changed in changes.items():
            self.rows[group].promote(changed)

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
    """List state. The overlay holds (start, added): keep so many items, then these."""

    def _after(self, held: Any, change: Any) -> Any:
        start, added = change
        return [*(held or ())[:start], *added] or None

    def keys_changed(self) -> int:
        return sum(len(self.changes[group]) for group in self.groups)

    def held(self) -> Held:
        held = 0
        for group in self.groups:
            rows = self.rows[group]
            held += len(rows)
            for key, (start, added) in self.changes[group].items():
                held += (start > 0 or len(added) > 0) - (key in rows)
        return Held(held, held)

    layout: ListLayout

    def _dump(self, groups: list[int], mappings: list[dict[Any, Any]]) -> pa.RecordBatch:
        return self.layout.batch(
            groups, [{key: (0, items) for key, items in m.items()} for m in mappings]
        )

    def _stored(self, batch: pa.RecordBatch) -> Iterator[tuple[int, Any, int, list[Any]]]:
        """(group, key, start, items) of each row."""
        keys = self.keys.decode_keys(batch["key"])
        starts = batch["start"].to_numpy().tolist()
        ends = batch["value"].offsets.to_numpy().tolist()
        items = self.values.decode(batch["value"].flatten())
        first = ends[0] if ends else 0
        for at, group in enumerate(batch["group"].to_numpy().tolist()):
            yield group, keys[at], starts[at], items[ends[at] - first : ends[at + 1] - first]

    def apply(self, batch: pa.RecordBatch) -> None:
        words: dict[int, dict[Any, tuple[int, list[Any]]]] = {}
        for group, key, start, items in self._stored(batch):
            own = words.setdefault(group, {})
            if key in own:
                # The next piece of a long list.
                self.rows[group].promote({key: own.pop(key)})
            own[key] = (start, items)
        for group, own in words.items():
            self.rows[group].promote(own)

    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        merged: dict[int, dict[Any, tuple[int, list[Any]]]] = {}
        for batch in batches:
            for group, key, start, items in self._stored(batch):
                words = merged.setdefault(group, {})
                held = words.get(key)
                if held is not None and start >= held[0]:
                    words[key] = (held[0], held[1][: start - held[0]] + items)
                else:
                    words[key] = (start, items)
        groups = sorted(merged)
        return self.layout.batch(groups, [merged[group] for group in groups])


def make_table(
    declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
) -> Table:
    kinds: dict[str, type[Table]] = {"map": MapTable, "list": ListTable}
    return kinds.get(declaration.layout, ValueTable)(declaration, key_type, backend, group_count)


def _count_new(rows: Rows, changes: dict[Any, Any]) -> int:
    """How many of the changed keys are not in the rows, from a sample of them.

    Looking up each one would be a cache miss each, a tenth of what a large epoch costs.
    The rows themselves are counted exactly, so the error does not add up.
    """
    step = max(1, len(changes) // COUNT_SAMPLE_KEYS)
    sample = list(islice(changes, 0, None, step))
    known = sum(map(rows.__contains__, sample))
    return round(len(changes) * (len(sample) - known) / len(sample))


def in_order(names: Iterable[Any]) -> list[Any]:
    """Keys by value, None first and NaN last at any depth: the same wherever they come from.

    The order in which a mapping came to be does not survive a restore.
    """
    names = list(names)
    if set(map(type, names)) in _PLAINLY_ORDERED:
        return sorted(names)
    return sorted(names, key=_place)


_PLAINLY_ORDERED: tuple[set[type], ...] = ({int}, {str}, {bytes})


def _place(name: Any) -> tuple[Any, ...]:
    if name is None:
        return (0,)
    if isinstance(name, tuple):
        return 1, tuple(map(_place, name))
    return (2,) if name != name else (1, name)


def sorted_rows(rows: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: rows[key] for key in in_order(rows)}


def joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All rows in one batch."""
    pieces = pa.Table.from_batches(batches).combine_chunks().to_batches()
    if len(pieces) > 1:
        # Their files stay as they are, so nothing is lost.
        raise OverflowError("deltas of more than 2 GiB of text or binary are not merged")
    return pieces[0]


def _last_rows(batches: Sequence[pa.RecordBatch], names: Iterable[list[Any]]) -> pa.RecordBatch:
    """Of rows with the same group and name the last one, sorted by group."""
    whole = joined(batches)
    groups = whole["group"].to_numpy()
    flat = (name for batch in names for name in batch)
    last = {named: at for at, named in enumerate(zip(groups.tolist(), flat, strict=True))}
    rows = np.fromiter(last.values(), np.int64, len(last))
    order = np.argsort(groups[rows], kind="stable")
    return whole.take(pa.array(rows[order]))
