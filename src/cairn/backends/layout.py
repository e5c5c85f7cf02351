"""Stored rows: how the rows of a state look in Arrow, in deltas and bases alike.

    group, key, value, live            value, reducing and aggregating state
    group, key, entry, value, live     map state, a row per entry
    group, key, start, value, live     list state: keep the first `start` items, then these

A row that is not live deletes.

Always true here:
- rows are sorted by group, in the order in which they were given within one;
- a state has one schema, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.backends.base import ABSENT
from cairn.errors import FunctionError
from cairn.types import type_ddl
from cairn.types.codec import Codec, codec

Held = Iterable[tuple[int, Mapping[Any, Any]]]
"""Key groups, ascending, each with (some of) its keys and what is held of them."""


class Layout:
    """Value, reducing and aggregating state."""

    def __init__(self, name: str, keys: Codec, values: Codec, entries: Codec | None = None) -> None:
        self.name = name
        self.keys = keys
        self.values = values

    @property
    def schema(self) -> pa.Schema:
        schema: pa.Schema = self.batch([], []).schema
        return schema

    def batch(self, groups: Sequence[int], mappings: Sequence[Mapping[Any, Any]]) -> pa.RecordBatch:
        """Rows as the overlay or the backend holds them, by group."""
        keys: list[Any] = []
        values: list[Any] = []
        for mapping in mappings:
            keys += mapping
            values += mapping.values()
        return self.rows(groups, [len(mapping) for mapping in mappings], keys, values)

    def rows(
        self, groups: Sequence[int], counts: Sequence[int], keys: list[Any], values: list[Any]
    ) -> pa.RecordBatch:
        encoded = self._encode(self.values, keys, values)
        columns = {
            "key": self._encode(self.keys, keys, keys),
            "value": encoded,
            "live": encoded.is_valid(),
        }
        return self._batch(groups, counts, columns)

    def pieces(self, held: Held, rows_max: int) -> Iterator[pa.RecordBatch]:
        """Everything that is held, in batches of about `rows_max` rows."""
        groups: list[int] = []
        mappings: list[Mapping[Any, Any]] = []
        count = 0
        for group, mapping in held:
            for part, size in self._parts(mapping, rows_max):
                groups.append(group)
                mappings.append(part)
                count += size
                if count >= rows_max:
                    yield self._piece(groups, mappings)
                    groups, mappings, count = [], [], 0
        if groups:
            yield self._piece(groups, mappings)

    def _parts(
        self, mapping: Mapping[Any, Any], rows_max: int
    ) -> Iterator[tuple[Mapping[Any, Any], int]]:
        if len(mapping) <= rows_max:
            yield mapping, len(mapping)
            return
        keys, values = list(mapping), list(mapping.values())
        for at in range(0, len(keys), rows_max):
            part = dict(zip(keys[at : at + rows_max], values[at : at + rows_max], strict=True))
            yield part, len(part)

    def _piece(self, groups: list[int], mappings: list[Mapping[Any, Any]]) -> pa.RecordBatch:
        return self.batch(groups, mappings)

    def _batch(
        self, groups: Sequence[int], counts: Sequence[int], columns: dict[str, Any]
    ) -> pa.RecordBatch:
        group = pa.array(np.repeat(np.asarray(groups, np.int32), np.asarray(counts, np.int64)))
        return pa.RecordBatch.from_pydict({"group": group, **columns})

    def _encode(self, values: Codec, keys: Sequence[Any], encoded: list[Any]) -> Any:
        """Encode stored values; where one does not fit, say whose it is."""
        try:
            return values.encode(encoded)
        except (ValueError, OverflowError, TypeError) as error:
            for key, value in zip(keys, encoded, strict=True):
                try:
                    values.encode([value])
                except (ValueError, OverflowError, TypeError) as cause:
                    raise FunctionError(
                        f"state {self.name!r} of key {key!r}: {value!r} does not fit "
                        f"{type_ddl(values.type)} ({cause})\n"
                        "  next: check it before it is written, or declare another type; with "
                        "on_error='dead-letter' the row that writes it is put aside",
                        state=self.name,
                        key=repr(key),
                    ) from cause
            raise error


class MapLayout(Layout):
    """Map state: a mapping of entries per key."""

    def __init__(self, name: str, keys: Codec, values: Codec, entries: Codec | None = None) -> None:
        super().__init__(name, keys, values)
        assert entries is not None
        self.entries = entries

    def batch(self, groups: Sequence[int], mappings: Sequence[Mapping[Any, Any]]) -> pa.RecordBatch:
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
            "entry": self._encode(self.entries, keys, entries),
            "value": self._encode(self.values, keys, [None if v is ABSENT else v for v in values]),
            "live": pa.array([value is not ABSENT for value in values], pa.bool_()),
        }
        return self._batch(groups, counts, columns)

    def _parts(
        self, mapping: Mapping[Any, Any], rows_max: int
    ) -> Iterator[tuple[Mapping[Any, Any], int]]:
        part: dict[Any, Any] = {}
        count = 0
        for key, held in mapping.items():
            for cut, size in super()._parts(held, rows_max):
                if count and count + size > rows_max:
                    yield part, count
                    part, count = {}, 0
                part[key] = cut
                count += size
        if part:
            yield part, count


class ListLayout(Layout):
    """List state: (start, items) per key."""

    def batch(self, groups: Sequence[int], mappings: Sequence[Mapping[Any, Any]]) -> pa.RecordBatch:
        rows = [(key, *word) for mapping in mappings for key, word in mapping.items()]
        return self.lists(groups, [len(mapping) for mapping in mappings], rows)

    @property
    def schema(self) -> pa.Schema:
        schema: pa.Schema = self.lists([], [], []).schema
        return schema

    def lists(
        self,
        groups: Sequence[int],
        counts: Sequence[int],
        rows: Sequence[tuple[Any, int, Sequence[Any]]],
    ) -> pa.RecordBatch:
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(items) for _, _, items in rows], out=offsets[1:])
        flat = [item for _, _, items in rows for item in items]
        owners = [key for key, _, items in rows for _ in items]
        columns = {
            "key": self.keys.encode([key for key, _, _ in rows]),
            "start": pa.array([start for _, start, _ in rows], pa.int64()),
            "value": pa.ListArray.from_arrays(offsets, self._encode(self.values, owners, flat)),
            # An empty list is no list: nothing is kept and nothing follows.
            "live": pa.array([start > 0 or len(items) > 0 for _, start, items in rows], pa.bool_()),
        }
        return self._batch(groups, counts, columns)

    def _parts(
        self, mapping: Mapping[Any, Any], rows_max: int
    ) -> Iterator[tuple[Mapping[Any, Any], int]]:
        part: dict[Any, Any] = {}
        count = 0
        for key, items in mapping.items():
            for at in range(0, len(items), rows_max):
                cut = items[at : at + rows_max]
                if count and (count + len(cut) > rows_max or key in part):
                    yield part, count
                    part, count = {}, 0
                part[key] = (at, cut)
                count += len(cut)
        if part:
            yield part, count


LAYOUTS: dict[str, type[Layout]] = {"map": MapLayout, "list": ListLayout}


def make_layout(name: str, kind: str, keys: Codec, values: Codec, entries: Codec | None) -> Layout:
    return LAYOUTS.get(kind, Layout)(name, keys, values, entries)


def runs(groups: pa.Array) -> Iterator[tuple[int, int, int]]:
    """(group, first row, row after the last) of each run in a sorted column."""
    values = groups.to_numpy()
    if not len(values):
        return
    cuts = (np.flatnonzero(np.diff(values)) + 1).tolist()
    starts = [0, *cuts]
    yield from zip(values[starts].tolist(), starts, [*cuts, len(values)], strict=True)


def live_column(batch: pa.RecordBatch) -> list[Any]:
    return codec(pa.bool_()).decode(batch["live"])
