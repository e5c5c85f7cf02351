"""Stored rows: the rows of a state as Arrow batches, in deltas and bases alike.

    group, key, value, live            value, reducing and aggregating state
    group, key, entry, value, live     map state, a row per entry
    group, key, start, value, live     list state: the first `start` items stay, these follow

A row that is not live deletes.

Always true here:
- rows are sorted by group, and within a group stay in the given order;
- a state has one schema, with rows or without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from cairn.backends.contract import ABSENT, Change, Content
from cairn.errors import FunctionError
from cairn.types import type_ddl
from cairn.types.codec import Codec, Key, codec
from cairn.types.codec.core import Values

Keyed = Mapping[Key, Content | Change]
RowsByGroup = Iterable[tuple[int, Keyed]]
"""Key groups, ascending, each with (some of) its keys and their contents."""


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

    def batch(self, groups: Sequence[int], mappings: Sequence[Keyed]) -> pa.RecordBatch:
        """Return the stored form of rows that the overlay or the backend holds, by group."""
        keys: list[Key] = []
        values: Values = []
        for mapping in mappings:
            keys += mapping
            values += mapping.values()
        encoded = self._encode(self.values, keys, values)
        columns = {
            "key": self._encode(self.keys, keys, keys),
            "value": encoded,
            "live": encoded.is_valid(),
        }
        return self._batch(groups, [len(mapping) for mapping in mappings], columns)

    def pieces(self, held: RowsByGroup, rows_max: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of about `rows_max` rows."""
        groups: list[int] = []
        mappings: list[Keyed] = []
        count = 0
        for group, mapping in held:
            for part, size in self._parts(mapping, rows_max):
                groups.append(group)
                mappings.append(part)
                count += size
                if count >= rows_max:
                    yield self.batch(groups, mappings)
                    groups, mappings, count = [], [], 0
        if groups:
            yield self.batch(groups, mappings)

    def _parts(self, mapping: Keyed, rows_max: int) -> Iterator[tuple[Keyed, int]]:
        if len(mapping) <= rows_max:
            yield mapping, len(mapping)
            return
        keys, values = list(mapping), list(mapping.values())
        for at in range(0, len(keys), rows_max):
            part = dict(zip(keys[at : at + rows_max], values[at : at + rows_max], strict=True))
            yield part, len(part)

    def _batch(
        self, groups: Sequence[int], counts: Sequence[int], columns: dict[str, pa.Array]
    ) -> pa.RecordBatch:
        group = pa.array(np.repeat(np.asarray(groups, np.int32), np.asarray(counts, np.int64)))
        return pa.RecordBatch.from_pydict({"group": group, **columns})

    def encode_values(self, keys: pa.Array, values: Values) -> pa.Array:
        """Encode values of these keys; None deletes."""
        try:
            return self.values.encode(values)
        except (ValueError, OverflowError, TypeError):
            return self._encode(self.values, self.keys.decode_keys(keys), values)

    def _encode(self, values: Codec, keys: Sequence[Key], encoded: Values) -> pa.Array:
        """Encode stored values; the error of a value that does not fit names its key."""
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
                        "  next: check the value before writing it, or declare another type; with "
                        "on_error='dead-letter' the row becomes a dead letter",
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

    def batch(self, groups: Sequence[int], mappings: Sequence[Keyed]) -> pa.RecordBatch:
        keys: list[Key] = []
        entries: list[Key] = []
        values: Values = []
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

    def _parts(self, mapping: Keyed, rows_max: int) -> Iterator[tuple[Keyed, int]]:
        part: dict[Key, Change] = {}
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

    def batch(self, groups: Sequence[int], mappings: Sequence[Keyed]) -> pa.RecordBatch:
        rows = [(key, *change) for mapping in mappings for key, change in mapping.items()]
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(items) for _, _, items in rows], out=offsets[1:])
        flat = [item for _, _, items in rows for item in items]
        owners = [key for key, _, items in rows for _ in items]
        columns = {
            "key": self.keys.encode([key for key, _, _ in rows]),
            "start": pa.array([start for _, start, _ in rows], pa.int64()),
            "value": pa.ListArray.from_arrays(offsets, self._encode(self.values, owners, flat)),
            # A list without items is deleted.
            "live": pa.array([start > 0 or len(items) > 0 for _, start, items in rows], pa.bool_()),
        }
        return self._batch(groups, [len(mapping) for mapping in mappings], columns)

    def _parts(self, mapping: Keyed, rows_max: int) -> Iterator[tuple[Keyed, int]]:
        part: dict[Key, Change] = {}
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


LAYOUTS: dict[str, type[Layout]] = {"map": MapLayout, "list": ListLayout, "timers": MapLayout}


def make_layout(name: str, kind: str, keys: Codec, values: Codec, entries: Codec | None) -> Layout:
    return LAYOUTS.get(kind, Layout)(name, keys, values, entries)


def runs(groups: pa.Array) -> Iterator[tuple[int, int, int]]:
    """Yield (group, first row, row after the last) for each group of a sorted column."""
    values = groups.to_numpy()
    if not len(values):
        return
    cuts = (np.flatnonzero(np.diff(values)) + 1).tolist()
    starts = [0, *cuts]
    yield from zip(values[starts].tolist(), starts, [*cuts, len(values)], strict=True)


def live_column(batch: pa.RecordBatch) -> Values:
    return codec(pa.bool_()).decode(batch["live"])
