"""One state of an operator: the committed rows, and above them what the running epoch changed.

A function reads through the overlay and writes to it only. So the overlay is the delta
(what changed), dropping it is the rollback, and the rows below are the last committed
epoch for whoever asks. A backend never holds anything uncommitted.

Stored rows, in deltas and bases alike, are Arrow with the columns

    group, key, value, live            value, reducing and aggregating state
    group, key, entry, value, live     map state, a row per entry
    group, key, start, value, live     list state: keep the first `start` items, then these

sorted by group. A row that is not live deletes.

Always true here:
- `rows` is the parent epoch's state, until `promote` takes the overlay in;
- applying a base and then its deltas, in order, gives the state they were taken from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.backends.base import Backend, Rows
from cairn.codec import Codec, codec
from cairn.state import Declaration
from cairn.types import type_ddl

BASE_BATCH_ROWS = 64 * 1024
COUNT_SAMPLE_KEYS = 64


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()


class Table(ABC):
    """Rows of one state, by key group, and the overlay of the running epoch."""

    def __init__(
        self, declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
    ) -> None:
        self.declaration = declaration
        self.name = declaration.name
        self.keys = codec(key_type)
        self.values = codec(declaration.type)
        self.backend = backend
        # Both lists are indexed by key group and keep their identity for life: handles hold them.
        self.rows: list[Rows] = [{} for _ in range(group_count)]
        self.changes: list[dict[Any, Any]] = [{} for _ in range(group_count)]
        self.groups = range(0)

    def assign(self, groups: range) -> None:
        """Own these key groups: keep what is there already, drop what no longer belongs."""
        for group in self.groups:
            if group not in groups:
                self.backend.drop(self.name, group)
                self.rows[group] = {}
                self.changes[group] = {}
        for group in groups:
            if group not in self.groups:
                self.rows[group] = self.backend.rows(self.name, group)
        self.groups = groups

    def forget(self, groups: range) -> None:
        """Hold nothing of these key groups, to be loaded anew."""
        for group in groups:
            if group in self.groups:
                self.backend.drop(self.name, group)
                self.rows[group] = self.backend.rows(self.name, group)
                self.changes[group] = {}

    def reset(self) -> None:
        """Forget everything, to be loaded anew."""
        groups = self.groups
        self.assign(range(0))
        self.assign(groups)

    def promote(self) -> None:
        """The epoch is committed: its changes are the state now."""
        for group in self.groups:
            changes = self.changes[group]
            if changes:
                self._promote(self.rows[group], changes)
                self.changes[group] = {}

    def rollback(self) -> None:
        """The epoch never happened."""
        for group in self.groups:
            if self.changes[group]:
                self.changes[group] = {}

    def dump(self) -> Iterator[pa.RecordBatch]:
        """The committed rows, in batches of whole key groups where they are small."""
        groups: list[int] = []
        row_count = 0
        for group in self.groups:
            size = len(self.rows[group])
            if not size:
                continue
            if groups and row_count + size > BASE_BATCH_ROWS:
                yield self._dump(groups)
                groups, row_count = [], 0
            groups.append(group)
            row_count += size
        if groups:
            yield self._dump(groups)

    def delta(self) -> pa.RecordBatch | None:
        """What the epoch changed."""
        groups = [group for group in self.groups if self.changes[group]]
        return self._delta(groups) if groups else None

    def _batch(self, groups: list[int], counts: list[int], columns: dict[str, Any]) -> Any:
        group = pa.array(np.repeat(np.asarray(groups, np.int32), counts))
        return pa.RecordBatch.from_pydict({"group": group, **columns})

    @abstractmethod
    def keys_changed(self) -> int:
        """How many keys (entries, for maps) the epoch has touched."""

    @abstractmethod
    def keys_held(self) -> int:
        """How many keys (entries, for maps) there are, the epoch's changes included.

        A figure for people: of large epochs the keys that are new are estimated.
        """

    @abstractmethod
    def apply(self, batch: pa.RecordBatch) -> None:
        """Load stored rows: of a base, or of a delta upon what is there."""

    @abstractmethod
    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        """Deltas in order, as one delta: of each key the last word."""

    @abstractmethod
    def _promote(self, rows: Rows, changes: dict[Any, Any]) -> None: ...

    @abstractmethod
    def _delta(self, groups: list[int]) -> pa.RecordBatch: ...

    @abstractmethod
    def _dump(self, groups: list[int]) -> pa.RecordBatch: ...


class ValueTable(Table):
    """Value, reducing and aggregating state. An overlay value of None is a deletion."""

    def keys_changed(self) -> int:
        return sum(len(self.changes[group]) for group in self.groups)

    def keys_held(self) -> int:
        held = 0
        for group in self.groups:
            rows, changes = self.rows[group], self.changes[group]
            held += len(rows)
            if changes:
                held += _count_new(rows, changes)
                if None in changes.values():
                    held -= sum(value is None for value in changes.values())
        return held

    def _promote(self, rows: Rows, changes: dict[Any, Any]) -> None:
        rows.update(changes)
        if None in changes.values():
            for key, value in changes.items():
                if value is None:
                    del rows[key]

    def _delta(self, groups: list[int]) -> pa.RecordBatch:
        return self._collect([self.changes[group] for group in groups], groups)

    def _dump(self, groups: list[int]) -> pa.RecordBatch:
        return self._collect([sorted_rows(self.rows[group]) for group in groups], groups)

    def _collect(self, mappings: Sequence[Rows], groups: list[int]) -> pa.RecordBatch:
        keys: list[Any] = []
        values: list[Any] = []
        for mapping in mappings:
            keys += mapping
            values += mapping.values()
        encoded = encode_values(self, self.values, keys, values)
        columns = {"key": self.keys.encode(keys), "value": encoded, "live": encoded.is_valid()}
        return self._batch(groups, [len(mapping) for mapping in mappings], columns)

    def apply(self, batch: pa.RecordBatch) -> None:
        values = self.values.decode(batch["value"])
        keys = self.keys.decode_keys(batch["key"])
        for group, start, stop in _runs(batch["group"]):
            changes = dict(zip(keys[start:stop], values[start:stop], strict=True))
            rows = self.rows[group]
            rows.update(changes)
            if None in changes.values():
                for key, value in changes.items():
                    if value is None:
                        rows.pop(key, None)

    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        return _last_rows(batches, (self.keys.decode_keys(b["key"]) for b in batches))


class MapTable(Table):
    """Map state: a mapping of entries per key, in the rows and in the overlay.

    An overlay entry of ABSENT is a deletion; None is a value like any other.
    """

    def __init__(
        self, declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
    ) -> None:
        super().__init__(declaration, key_type, backend, group_count)
        self.entries = codec(declaration.entry_type)

    def keys_changed(self) -> int:
        return sum(len(changed) for g in self.groups for changed in self.changes[g].values())

    def keys_held(self) -> int:
        held = sum(len(entries) for g in self.groups for entries in self.rows[g].values())
        for group in self.groups:
            for key, changed in self.changes[group].items():
                entries = self.rows[group].get(key, {})
                for entry, value in changed.items():
                    held += (value is not ABSENT) - (entry in entries)
        return held

    def _promote(self, rows: Rows, changes: dict[Any, Any]) -> None:
        for key, changed in changes.items():
            entries = rows.setdefault(key, {})
            for entry, value in changed.items():
                if value is ABSENT:
                    entries.pop(entry, None)
                else:
                    entries[entry] = value
            if not entries:
                del rows[key]

    def _delta(self, groups: list[int]) -> pa.RecordBatch:
        return self._collect([self.changes[group] for group in groups], groups)

    def _dump(self, groups: list[int]) -> pa.RecordBatch:
        mappings = [
            {key: sorted_rows(held) for key, held in sorted_rows(self.rows[group]).items()}
            for group in groups
        ]
        return self._collect(mappings, groups)

    def _collect(self, mappings: Sequence[Rows], groups: list[int]) -> pa.RecordBatch:
        keys: list[Any] = []
        entries: list[Any] = []
        values: list[Any] = []
        counts: list[int] = []
        for mapping in mappings:
            size = len(keys)
            for key, held in mapping.items():
                keys += [key] * len(held)
                entries += held
                values += held.values()
            counts.append(len(keys) - size)
        columns = {
            "key": self.keys.encode(keys),
            "entry": encode_values(self, self.entries, keys, entries),
            "value": encode_values(
                self, self.values, keys, [None if v is ABSENT else v for v in values]
            ),
            "live": pa.array([value is not ABSENT for value in values], pa.bool_()),
        }
        return self._batch(groups, counts, columns)

    def apply(self, batch: pa.RecordBatch) -> None:
        changes: dict[int, dict[Any, dict[Any, Any]]] = {}
        for group, key, entry, value, live in zip(
            batch["group"].to_numpy().tolist(),
            self.keys.decode_keys(batch["key"]),
            self.entries.decode_keys(batch["entry"]),
            self.values.decode(batch["value"]),
            codec(pa.bool_()).decode(batch["live"]),
            strict=True,
        ):
            changed = changes.setdefault(group, {}).setdefault(key, {})
            changed[entry] = value if live else ABSENT
        for group, changed in changes.items():
            self._promote(self.rows[group], changed)

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

    def keys_changed(self) -> int:
        return sum(len(self.changes[group]) for group in self.groups)

    def keys_held(self) -> int:
        held = 0
        for group in self.groups:
            rows = self.rows[group]
            held += len(rows)
            for key, (start, added) in self.changes[group].items():
                held += (start > 0 or len(added) > 0) - (key in rows)
        return held

    def _promote(self, rows: Rows, changes: dict[Any, Any]) -> None:
        for key, (start, added) in changes.items():
            items = rows.setdefault(key, [])
            del items[start:]
            items += added
            if not items:
                del rows[key]

    def _delta(self, groups: list[int]) -> pa.RecordBatch:
        rows = [
            (key, start, added)
            for group in groups
            for key, (start, added) in self.changes[group].items()
        ]
        return self._collect(groups, [len(self.changes[g]) for g in groups], rows)

    def _dump(self, groups: list[int]) -> pa.RecordBatch:
        rows = [(key, 0, items) for g in groups for key, items in sorted_rows(self.rows[g]).items()]
        return self._collect(groups, [len(self.rows[g]) for g in groups], rows)

    def _collect(
        self, groups: list[int], counts: list[int], rows: Sequence[tuple[Any, int, Sequence[Any]]]
    ) -> pa.RecordBatch:
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(items) for _, _, items in rows], out=offsets[1:])
        flat = [item for _, _, items in rows for item in items]
        owners = [key for key, _, items in rows for _ in items]
        columns = {
            "key": self.keys.encode([key for key, _, _ in rows]),
            "start": pa.array([start for _, start, _ in rows], pa.int64()),
            "value": pa.ListArray.from_arrays(
                offsets, encode_values(self, self.values, owners, flat)
            ),
            # An empty list is no list: nothing is kept and nothing follows.
            "live": pa.array([start > 0 or len(items) > 0 for _, start, items in rows], pa.bool_()),
        }
        return self._batch(groups, counts, columns)

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
        for group, key, start, items in self._stored(batch):
            self._promote(self.rows[group], {key: (start, items)})

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
        rows = [(k, start, items) for g in groups for k, (start, items) in merged[g].items()]
        return self._collect(groups, [len(merged[g]) for g in groups], rows)


def make_table(
    declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
) -> Table:
    kinds: dict[str, type[Table]] = {"map": MapTable, "list": ListTable}
    return kinds.get(declaration.kind, ValueTable)(declaration, key_type, backend, group_count)


def _count_new(rows: Rows, changes: dict[Any, Any]) -> int:
    """How many of the changed keys are not in the rows, from a sample of them.

    Looking up each one would be a cache miss each, a tenth of what a large epoch costs.
    The rows themselves are counted exactly, so the error does not add up.
    """
    step = max(1, len(changes) // COUNT_SAMPLE_KEYS)
    sample = list(islice(changes, 0, None, step))
    known = sum(map(rows.__contains__, sample))
    return round(len(changes) * (len(sample) - known) / len(sample))


def encode_values(table: Table, values: Codec, keys: Sequence[Any], encoded: list[Any]) -> Any:
    """Encode stored values; where one does not fit, say whose it is."""
    try:
        return values.encode(encoded)
    except (ValueError, OverflowError, TypeError) as error:
        for key, value in zip(keys, encoded, strict=True):
            try:
                values.encode([value])
            except (ValueError, OverflowError, TypeError) as cause:
                raise ValueError(
                    f"state {table.name!r} of key {key!r}: {value!r} does not fit "
                    f"{type_ddl(values.type)} ({cause})"
                ) from cause
        raise error


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


def sorted_rows(rows: Rows) -> dict[Any, Any]:
    return {key: rows[key] for key in in_order(rows)}


def _last_rows(batches: Sequence[pa.RecordBatch], names: Iterable[list[Any]]) -> pa.RecordBatch:
    """Of rows with the same group and name the last one, sorted by group."""
    whole = pa.Table.from_batches(batches).combine_chunks()
    groups = whole["group"].to_numpy()
    flat = (name for batch in names for name in batch)
    last = {named: at for at, named in enumerate(zip(groups.tolist(), flat, strict=True))}
    rows = np.fromiter(last.values(), np.int64, len(last))
    order = np.argsort(groups[rows], kind="stable")
    return whole.take(pa.array(rows[order])).combine_chunks().to_batches()[0]


def _runs(groups: pa.Array) -> Iterator[tuple[int, int, int]]:
    """(group, first row, row after the last) of each run in a sorted column."""
    values = groups.to_numpy()
    if not len(values):
        return
    cuts = (np.flatnonzero(np.diff(values)) + 1).tolist()
    starts = [0, *cuts]
    yield from zip(values[starts].tolist(), starts, [*cuts, len(values)], strict=True)
