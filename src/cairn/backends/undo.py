"""One state of an operator, with what the running epoch changed and what was there before.

That one structure gives the delta (what changed), rollback (put it back) and
committed reads (what was there before); nothing is written twice. Functions reach
it through the handles in `backends.handles`.

Stored rows, in deltas and bases alike, are Arrow with the columns

    group, key, value, live            value, reducing and aggregating state
    group, key, entry, value, live     map state, a row per entry
    group, key, start, value, live     list state: keep the first `start` items, then these

sorted by group. A row that is not live deletes.

Always true here:
- `before` holds each changed key's value as of the parent epoch, once;
- `rollback` leaves exactly the parent's state; `promote` forgets the way back;
- applying a base and then its deltas, in order, gives the state they were taken from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.backends.base import Backend, Rows
from cairn.codec import Codec, codec
from cairn.state import Declaration

BASE_BATCH_ROWS = 64 * 1024


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()


class Table(ABC):
    """Rows of one state, by key group, above a backend."""

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
        self.before: list[dict[Any, Any]] = [{} for _ in range(group_count)]
        self.groups = range(0)

    def assign(self, groups: range) -> None:
        """Own these key groups: keep what is there already, drop what no longer belongs."""
        for group in self.groups:
            if group not in groups:
                self.backend.drop(self.name, group)
                self.rows[group] = {}
                self.before[group] = {}
        for group in groups:
            if group not in self.groups:
                self.rows[group] = self.backend.rows(self.name, group)
        self.groups = groups

    def reset(self) -> None:
        """Forget everything, to be loaded anew."""
        groups = self.groups
        self.assign(range(0))
        self.assign(groups)

    def promote(self) -> None:
        """The epoch is committed: its changes are the state now."""
        for group in self.groups:
            if self.before[group]:
                self.before[group] = {}

    def rollback(self) -> None:
        """The epoch never happened: put back what was there before."""
        for group in self.groups:
            before = self.before[group]
            if before:
                rows = self.rows[group]
                for key, value in before.items():
                    self._put_back(rows, key, value)
                self.before[group] = {}

    def keys_changed(self) -> int:
        return sum(len(self.before[group]) for group in self.groups)

    def keys_held(self) -> int:
        return sum(len(self.rows[group]) for group in self.groups)

    def _batch(self, groups: list[int], counts: list[int], columns: dict[str, Any]) -> Any:
        group = pa.array(np.repeat(np.asarray(groups, np.int32), counts))
        return pa.RecordBatch.from_pydict({"group": group, **columns})

    def dump(self) -> Iterator[pa.RecordBatch]:
        """Everything, as of now, in batches of whole key groups where they are small."""
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

    @abstractmethod
    def delta(self) -> pa.RecordBatch | None:
        """What changed since the parent epoch."""

    @abstractmethod
    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        """Deltas in order, as one delta: of each key the last word."""

    @abstractmethod
    def apply(self, batch: pa.RecordBatch) -> None:
        """Load stored rows: of a base, or of a delta upon what is there."""

    @abstractmethod
    def _dump(self, groups: list[int]) -> pa.RecordBatch: ...

    @abstractmethod
    def _put_back(self, rows: Rows, key: Any, value: Any) -> None: ...


def _last_rows(batches: Sequence[pa.RecordBatch], names: Iterable[list[Any]]) -> pa.RecordBatch:
    """Of rows with the same group and name the last one, sorted by group."""
    whole = pa.Table.from_batches(batches).combine_chunks()
    groups = whole["group"].to_numpy().tolist()
    flat = (name for batch in names for name in batch)
    last = {(g, name): at for at, (g, name) in enumerate(zip(groups, flat, strict=True))}
    rows = np.fromiter(last.values(), np.int64, len(last))
    order = np.argsort(whole["group"].to_numpy()[rows], kind="stable")
    return whole.take(pa.array(rows[order])).combine_chunks().to_batches()[0]


class ValueTable(Table):
    """Value, reducing and aggregating state: one stored value per key."""

    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        return _last_rows(batches, (self.keys.decode_keys(b["key"]) for b in batches))

    def _put_back(self, rows: Rows, key: Any, value: Any) -> None:
        if value is ABSENT:
            rows.pop(key, None)
        else:
            rows[key] = value

    def _collect(self, per_group: Iterable[tuple[int, list[Any], list[Any]]]) -> Any:
        groups: list[int] = []
        counts: list[int] = []
        keys: list[Any] = []
        values: list[Any] = []
        for group, group_keys, group_values in per_group:
            groups.append(group)
            counts.append(len(group_keys))
            keys += group_keys
            values += group_values
        encoded = encode_values(self, self.values, keys, values)
        return self._batch(
            groups,
            counts,
            {"key": self.keys.encode(keys), "value": encoded, "live": encoded.is_valid()},
        )

    def delta(self) -> pa.RecordBatch | None:
        changed = [
            (group, list(self.before[group]), list(map(self.rows[group].get, self.before[group])))
            for group in self.groups
            if self.before[group]
        ]
        return self._collect(changed) if changed else None

    def _dump(self, groups: list[int]) -> pa.RecordBatch:
        return self._collect((g, list(self.rows[g]), list(self.rows[g].values())) for g in groups)

    def apply(self, batch: pa.RecordBatch) -> None:
        values = self.values.decode(batch["value"])
        for group, start, stop in _runs(batch["group"]):
            rows = self.rows[group]
            keys = self.keys.decode_keys(batch["key"].slice(start, stop - start))
            rows.update(zip(keys, values[start:stop], strict=True))
            if batch["live"].slice(start, stop - start).true_count != stop - start:
                for key, value in zip(keys, values[start:stop], strict=True):
                    if value is None:
                        rows.pop(key, None)


class MapTable(Table):
    """Map state: a mapping of entries per key; `before` is by (key, entry)."""

    def __init__(
        self, declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
    ) -> None:
        super().__init__(declaration, key_type, backend, group_count)
        self.entries = codec(declaration.entry_type)

    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        names = (
            list(
                zip(
                    self.keys.decode_keys(b["key"]),
                    self.entries.decode_keys(b["entry"]),
                    strict=True,
                )
            )
            for b in batches
        )
        return _last_rows(batches, names)

    def keys_held(self) -> int:
        return sum(len(entries) for g in self.groups for entries in self.rows[g].values())

    def _put_back(self, rows: Rows, key: Any, value: Any) -> None:
        key, entry = key
        if value is ABSENT:
            entries = rows.get(key)
            if entries is not None:
                entries.pop(entry, None)
                if not entries:
                    del rows[key]
        else:
            rows.setdefault(key, {})[entry] = value

    def _collect(
        self, groups: list[int], counts: list[int], rows: list[tuple[Any, Any, Any]]
    ) -> pa.RecordBatch:
        keys, entries, values = (list(c) for c in zip(*rows, strict=True)) if rows else ([],) * 3
        live = pa.array([value is not ABSENT for value in values], pa.bool_())
        values = [None if value is ABSENT else value for value in values]
        return self._batch(
            groups,
            counts,
            {
                "key": self.keys.encode(keys),
                "entry": self.entries.encode(entries),
                "value": encode_values(self, self.values, keys, values),
                "live": live,
            },
        )

    def delta(self) -> pa.RecordBatch | None:
        groups: list[int] = []
        counts: list[int] = []
        rows: list[tuple[Any, Any, Any]] = []
        for group in self.groups:
            before = self.before[group]
            if before:
                held = self.rows[group]
                rows += [(k, e, held.get(k, {}).get(e, ABSENT)) for k, e in before]
                groups.append(group)
                counts.append(len(before))
        return self._collect(groups, counts, rows) if rows else None

    def _dump(self, groups: list[int]) -> pa.RecordBatch:
        rows: list[tuple[Any, Any, Any]] = []
        counts = []
        for group in groups:
            size = len(rows)
            for key, entries in self.rows[group].items():
                rows += [(key, entry, value) for entry, value in entries.items()]
            counts.append(len(rows) - size)
        return self._collect(groups, counts, rows)

    def apply(self, batch: pa.RecordBatch) -> None:
        keys = self.keys.decode_keys(batch["key"])
        entries = self.entries.decode_keys(batch["entry"])
        values = self.values.decode(batch["value"])
        live = codec(pa.bool_()).decode(batch["live"])
        for group, start, stop in _runs(batch["group"]):
            rows = self.rows[group]
            for at in range(start, stop):
                value = values[at] if live[at] else ABSENT
                self._put_back(rows, (keys[at], entries[at]), value)


class ListTable(Table):
    """List state. `before` holds (the list, its length): appending copies nothing."""

    def _put_back(self, rows: Rows, key: Any, value: Any) -> None:
        if value is ABSENT:
            rows.pop(key, None)
        else:
            items, length = value
            del items[length:]
            rows[key] = items

    def _collect(
        self, groups: list[int], counts: list[int], rows: Sequence[tuple[Any, int, Sequence[Any]]]
    ) -> pa.RecordBatch:
        keys = [row[0] for row in rows]
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(row[2]) for row in rows], out=offsets[1:])
        flat = [item for row in rows for item in row[2]]
        at_key = [row[0] for row in rows for _ in row[2]]
        return self._batch(
            groups,
            counts,
            {
                "key": self.keys.encode(keys),
                "start": pa.array([row[1] for row in rows], pa.int64()),
                "value": pa.ListArray.from_arrays(
                    offsets, encode_values(self, self.values, at_key, flat)
                ),
                # An empty list is no list: nothing is kept and nothing follows.
                "live": pa.array([row[1] > 0 or len(row[2]) > 0 for row in rows], pa.bool_()),
            },
        )

    def delta(self) -> pa.RecordBatch | None:
        groups: list[int] = []
        counts: list[int] = []
        rows: list[tuple[Any, int, Sequence[Any]]] = []
        for group in self.groups:
            before = self.before[group]
            if not before:
                continue
            held = self.rows[group]
            for key, old in before.items():
                items = held.get(key, ())
                appended = old is not ABSENT and items is old[0]
                start = old[1] if appended else 0
                rows.append((key, start, items[start:]))
            groups.append(group)
            counts.append(len(before))
        return self._collect(groups, counts, rows) if rows else None

    def _dump(self, groups: list[int]) -> pa.RecordBatch:
        rows = [(key, 0, items) for g in groups for key, items in self.rows[g].items()]
        return self._collect(groups, [len(self.rows[g]) for g in groups], rows)

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
            rows = self.rows[group]
            held = rows.setdefault(key, [])
            del held[start:]
            held += items
            if not held:
                del rows[key]

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
                    f"{table.declaration.ddl} ({cause})"
                ) from cause
        raise error


def _runs(groups: pa.Array) -> Iterator[tuple[int, int, int]]:
    """(group, first row, row after the last) of each run in a sorted column."""
    values = groups.to_numpy()
    if not len(values):
        return
    cuts = np.flatnonzero(np.diff(values)) + 1
    starts = [0, *cuts.tolist()]
    stops = [*cuts.tolist(), len(values)]
    yield from zip(values[starts].tolist(), starts, stops, strict=True)


def make_table(
    declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
) -> Table:
    kinds: dict[str, type[Table]] = {"map": MapTable, "list": ListTable}
    return kinds.get(declaration.kind, ValueTable)(declaration, key_type, backend, group_count)


__all__ = ["ABSENT", "ListTable", "MapTable", "Table", "ValueTable", "make_table"]
