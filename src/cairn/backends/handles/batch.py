"""What a BatchProcess sees of its state: many keys at once, as Arrow arrays.

Over tables in arrays (`columns`) all of it is numpy. Over any other backend keys and values are
decoded, looked up in overlay and rows as the handles of single keys do it, and encoded again.

Always true here:
- both kinds give the same answers in the same order, but for `set_in_epoch`: in arrays it goes by
  first touch, in rows by key group and then first touch;
- arrays of another type are cast, or refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from cairn.backends.base import ABSENT, Backend
from cairn.backends.columnar.name_order import name_order
from cairn.backends.columnar.table import ColumnTable
from cairn.backends.entry_index import IndexedMapTable
from cairn.backends.journal import Journal
from cairn.backends.overlay import Table, ValueTable, make_table
from cairn.key_groups import key_groups
from cairn.state import Declaration, Map, Value
from cairn.types import format_type


class _Typed:
    """Arrays of the types that a state has."""

    def __init__(self, table: Table) -> None:
        self.name = table.name
        self._key_type = table.keys.arrow
        self._value_type = table.values.arrow
        entry_type = table.declaration.entry_type
        self._entry_type = entry_type

    def keys(self, array: Any) -> pa.Array:
        return self._fitted(array, self._key_type, "keys")

    def entries(self, array: Any, count: int) -> pa.Array:
        return self._counted(self._fitted(array, self._entry_type, "entries"), count, "entries")

    def values(self, array: Any, count: int) -> pa.Array:
        return self._counted(self._fitted(array, self._value_type, "values"), count, "values")

    def bounds(self, low: Any, high: Any) -> tuple[Any, Any]:
        """Bounds of a range of entries; of integers none that an entry cannot be."""
        if pa.types.is_nested(self._entry_type) and not low is high is None:
            raise TypeError(
                f"state {self.name!r}: a range of entries of {format_type(self._entry_type)}; "
                "nested entries have no bounds: use between(None, None) and choose among what it "
                "gives"
            )
        are_numbers = all(bound is None or isinstance(bound, int) for bound in (low, high))
        if not pa.types.is_integer(self._entry_type) or not are_numbers:
            return low, high
        most = (1 << (self._entry_type.bit_width - 1)) - 1
        least = -most - 1
        if high is not None and high < least:
            low = most  # Nothing is above it.
        if low is not None and low < least:
            low = None
        return (
            low if low is None else min(low, most),
            high if high is None else min(max(high, least), most),
        )

    def _fitted(self, array: Any, type: pa.DataType, what: str) -> pa.Array:
        if isinstance(array, pa.Array) and array.type == type:
            return array
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        try:
            if not isinstance(array, pa.Array):
                return pa.array(array, type)
            return array if array.type == type else array.cast(type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            found = getattr(array, "type", None)
            shown = array.__class__.__name__ if found is None else format_type(found)
            raise TypeError(
                f"state {self.name!r}: {what} of {shown}; expected {format_type(type)} ({error})"
            ) from None

    def _counted(self, array: pa.Array, count: int, what: str) -> pa.Array:
        if len(array) != count:
            raise ValueError(f"state {self.name!r}: {len(array)} {what} for {count} keys")
        return array


class _ByBatch:
    """What both kinds of handles refuse: there is no key at hand."""

    name: str
    reads = "{}.get_many(keys)"
    writes = "{}.put_many(keys, ...)"
    removes = "{}.put_many(keys, ...) with nulls"

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"state {self.name!r}: in a BatchProcess there is no single key at hand; "
            "use get_many(keys) and put_many(keys, ...)"
        )


class ColumnValueHandle(_ByBatch, Value[Any]):
    """Value state in arrays."""

    def __init__(self, declaration: Value[Any], table: ColumnTable) -> None:
        self.name = declaration.name
        self._table = table
        self._typed = _Typed(table)
        default = declaration.default
        self._default = None if default is None else table.defaults(default)

    def get_many(self, keys: Any) -> pa.Array:
        table = self._table
        return table.read(table.find([self._typed.keys(keys)]), self._default)

    def put_many(self, keys: Any, values: Any) -> None:
        keys = self._typed.keys(keys)
        values = self._typed.values(values, len(keys))
        self._table.write([keys], values, _is_live(values))

    def set_in_epoch(self) -> tuple[pa.Array, pa.Array]:
        """Keys and values that the epoch at hand has set."""
        return self._table.set_in_epoch()

    get: Any = _ByBatch._refuse
    set: Any = _ByBatch._refuse
    clear: Any = _ByBatch._refuse


class ColumnMapHandle(_ByBatch, Map[Any, Any]):
    """Map state in arrays."""

    def __init__(self, declaration: Map[Any, Any], table: ColumnTable) -> None:
        self.name = declaration.name
        self._table = table
        self._typed = _Typed(table)

    def get_many(self, keys: Any, entries: Any) -> pa.Array:
        keys = self._typed.keys(keys)
        table = self._table
        return table.read(table.find([keys, self._typed.entries(entries, len(keys))]))

    def put_many(self, keys: Any, entries: Any, values: Any) -> None:
        keys = self._typed.keys(keys)
        entries = self._typed.entries(entries, len(keys))
        values = self._typed.values(values, len(keys))
        self._table.write([keys, entries], values, _is_live(values))

    def of_keys(self, keys: Any) -> tuple[pa.Array, pa.Array, pa.Array]:
        return self._table.entries_of(self._typed.keys(keys))

    def between(self, low: Any, high: Any) -> tuple[pa.Array, pa.Array, pa.Array]:
        return self._table.entries_between(*self._typed.bounds(low, high))

    def entry_above(self, low: Any) -> int | None:
        """The least entry above `low`, of any key here."""
        return self._table.entry_above(self._typed.bounds(low, None)[0])

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = clear = _ByBatch._refuse
    __hash__ = Declaration.__hash__
    __eq__ = Declaration.__eq__


def _is_live(values: pa.Array) -> Any:
    return values.is_valid().to_numpy(zero_copy_only=False) if values.null_count else None


class _Scattered:
    """Overlay and rows of a table by key, for many keys."""

    def __init__(self, table: Table, group_count: int) -> None:
        self._table = table
        self._group_count = group_count
        self._asked: tuple[pa.Array, list[int], list[Any]] | None = None

    def located(self, keys: pa.Array) -> tuple[list[int], list[Any]]:
        """Group and dict key of each, remembered for the array asked last."""
        if self._asked is None or self._asked[0] is not keys:
            table = self._table
            found = key_groups(keys, table.keys.arrow, self._group_count)
            table.check_owned(keys, found)
            groups, names = found.tolist(), table.keys.decode_keys(keys)
            table.backend.prefetch(groups, names)
            self._asked = (keys, groups, names)
        return self._asked[1], self._asked[2]

    def forget(self) -> None:
        self._asked = None


class RowValueHandle(_ByBatch, Value[Any]):
    """Value state in the rows of a backend."""

    def __init__(self, declaration: Value[Any], table: ValueTable, group_count: int) -> None:
        self.name = declaration.name
        self._table = table
        self._typed = _Typed(table)
        self._scattered = _Scattered(table, group_count)
        default = declaration.default
        self._default = None if default is None else table.values.normalise(default)

    def get_many(self, keys: Any) -> pa.Array:
        table, default = self._table, self._default
        found = []
        for group, key in zip(*self._scattered.located(self._typed.keys(keys)), strict=True):
            value = table.changes[group].get(key, ABSENT)
            if value is ABSENT:
                value = table.rows[group].get(key)
            found.append(default if value is None else value)
        return table.values.encode(found)

    def put_many(self, keys: Any, values: Any) -> None:
        keys = self._typed.keys(keys)
        values = self._typed.values(values, len(keys))
        table = self._table
        decoded = table.values.decode(values)
        if table.journal is not None:
            for group, key in zip(*self._scattered.located(keys), strict=True):
                table.journal.keep(table.changes[group], key)
        located = zip(*self._scattered.located(keys), strict=True)
        for (group, key), value in zip(located, decoded, strict=True):
            if value is None and key not in table.rows[group]:
                table.changes[group].pop(key, None)
            else:
                table.changes[group][key] = value

    def set_in_epoch(self) -> tuple[pa.Array, pa.Array]:
        """Keys and values that the epoch at hand has set."""
        table = self._table
        changed = [
            pair
            for group in table.groups
            for pair in table.changes[group].items()
            if pair[1] is not None
        ]
        keys, values = zip(*changed, strict=True) if changed else ((), ())
        return table.keys.encode(list(keys)), table.values.encode(list(values))

    get: Any = _ByBatch._refuse
    set: Any = _ByBatch._refuse
    clear: Any = _ByBatch._refuse


class RowMapHandle(_ByBatch, Map[Any, Any]):
    """Map state in the rows of a backend."""

    def __init__(
        self, declaration: Map[Any, Any], table: IndexedMapTable, group_count: int
    ) -> None:
        self.name = declaration.name
        self._table = table
        self._typed = _Typed(table)
        self._scattered = _Scattered(table, group_count)

    def get_many(self, keys: Any, entries: Any) -> pa.Array:
        keys = self._typed.keys(keys)
        names = self._table.entries.decode_keys(self._typed.entries(entries, len(keys)))
        table = self._table
        found = []
        located = zip(*self._scattered.located(keys), strict=True)
        for (group, key), entry in zip(located, names, strict=True):
            value = table.changes[group].get(key, {}).get(entry, ABSENT)
            if value is ABSENT and entry not in table.changes[group].get(key, {}):
                held = table.rows[group].get(key)
                value = None if held is None else held.get(entry)
            found.append(None if value is ABSENT else value)
        return table.values.encode(found)

    def put_many(self, keys: Any, entries: Any, values: Any) -> None:
        keys = self._typed.keys(keys)
        entries = self._typed.entries(entries, len(keys))
        values = self._typed.values(values, len(keys))
        table = self._table
        names = table.entries.decode_keys(entries)
        decoded = table.values.decode(values)
        if table.journal is not None:
            self._keep(table.journal, keys, names)
        located = zip(*self._scattered.located(keys), strict=True)
        for (group, key), entry, value in zip(located, names, decoded, strict=True):
            changes = table.changes[group]
            if value is not None:
                changes.setdefault(key, {})[entry] = value
                continue
            held = table.rows[group].get(key)
            if held is not None and entry in held:
                changes.setdefault(key, {})[entry] = ABSENT
            elif key in changes:
                changes[key].pop(entry, None)
                if not changes[key]:
                    del changes[key]

    def _keep(self, journal: Journal, keys: pa.Array, entries: list[Any]) -> None:
        located = zip(*self._scattered.located(keys), strict=True)
        for (group, key), entry in zip(located, entries, strict=True):
            changes = self._table.changes[group]
            # Both: what a key has left of changes may go altogether.
            journal.keep(changes, key)
            if key in changes:
                journal.keep(changes[key], entry)

    def of_keys(self, keys: Any) -> tuple[pa.Array, pa.Array, pa.Array]:
        rows: list[int] = []
        entries: list[Any] = []
        values: list[Any] = []
        located = zip(*self._scattered.located(self._typed.keys(keys)), strict=True)
        for at, (group, key) in enumerate(located):
            for entry, value in self._entries(group, key):
                rows.append(at)
                entries.append(entry)
                values.append(value)
        table = self._table
        found = pa.array(rows, pa.int64()), table.entries.encode(entries)
        order = pa.array(name_order(found))
        return (*(column.take(order) for column in found), table.values.encode(values).take(order))

    def between(self, low: Any, high: Any) -> tuple[pa.Array, pa.Array, pa.Array]:
        table = self._table
        low, high = self._typed.bounds(low, high)
        found = table.between(self._bound(low), self._bound(high))
        keys, entries, values = zip(*found, strict=True) if found else ((), (), ())
        names = [table.entries.encode(list(entries)), table.keys.encode(list(keys))]
        order = pa.array(name_order(names))
        encoded = table.values.encode(list(values))
        return names[1].take(order), names[0].take(order), encoded.take(order)

    def entry_above(self, low: Any) -> int | None:
        """The least entry above `low`, of any key here."""
        low, _ = self._typed.bounds(low, None)
        entry: int | None = self._table.first_above(self._bound(low))
        return entry

    def _bound(self, bound: Any) -> Any:
        """A bound as entries are held; a plain number may stand for a time."""
        if bound is None:
            return None
        entries = self._table.entries
        if isinstance(bound, int) and pa.types.is_temporal(entries.arrow):
            width = pa.int32() if entries.arrow.bit_width == 32 else pa.int64()
            return entries.decode_keys(pa.array([bound], width).view(entries.arrow))[0]
        return entries.normalise_key(bound)

    def _entries(self, group: int, key: Any) -> Iterator[tuple[Any, Any]]:
        table = self._table
        changed = table.changes[group].get(key, {})
        held = table.rows[group].get(key)
        if held is not None:
            for entry, value in held.items():
                if entry not in changed:
                    yield entry, value
        for entry, value in changed.items():
            if value is not ABSENT:
                yield entry, value

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = clear = _ByBatch._refuse
    __hash__ = Declaration.__hash__
    __eq__ = Declaration.__eq__


def make_batch_table(
    declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
) -> Table:
    """The table of a state that is used by the batch."""
    if backend.takes_columns:
        return ColumnTable(declaration, key_type, backend, group_count)
    if declaration.kind == "map":
        return IndexedMapTable(declaration, key_type, backend, group_count)
    return make_table(declaration, key_type, backend, group_count)


def make_batch_handle(table: Table, group_count: int) -> Declaration:
    declaration = table.declaration
    if isinstance(table, ColumnTable):
        if isinstance(declaration, Map):
            return ColumnMapHandle(declaration, table)
        assert isinstance(declaration, Value)
        return ColumnValueHandle(declaration, table)
    if isinstance(table, IndexedMapTable):
        assert isinstance(declaration, Map)
        return RowMapHandle(declaration, table, group_count)
    assert isinstance(table, ValueTable) and isinstance(declaration, Value)
    return RowValueHandle(declaration, table, group_count)
