"""Handles of a BatchProcess: state of many keys at once, as Arrow arrays.

Over tables in arrays (`columnar`) all work is done by numpy. Over any other backend keys and values
are decoded, looked up in overlay and rows like single keys, and encoded again.

Always true here:
- both kinds return the same rows in the same order, except `set_in_epoch`: in arrays it goes by
  first touch, in rows by key group and then first touch;
- arrays of another type are cast, or refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import pyarrow as pa

from cairn.backends.columnar.name_order import name_order
from cairn.backends.columnar.row_table import RowTable
from cairn.backends.columnar.table import Bools, ColumnTable
from cairn.backends.contract import ABSENT, Backend
from cairn.backends.entry_index import IndexedMapTable
from cairn.backends.handles.rows import PaneRowsHandle, RunRowsHandle
from cairn.backends.journal import Journal
from cairn.backends.overlay import Table, ValueTable, make_table
from cairn.backends.pane_table import PaneTable
from cairn.backends.timed_rows import TimedRows
from cairn.key_groups import key_groups
from cairn.state import Declaration, Map, Value
from cairn.types import format_type
from cairn.types.codec import Datum, Key, codec
from cairn.types.codec.core import Values

Input: TypeAlias = "pa.Array | pa.ChunkedArray | Sequence[object]"
"""An array as functions pass it."""


class _Typed:
    """Casts arrays to the types of a state."""

    def __init__(self, table: Table) -> None:
        self.name = table.name
        self._key_type = table.keys.arrow
        self._value_type = table.values.arrow
        self._entry_type = table.declaration.entry_type

    def keys(self, array: Input) -> pa.Array:
        return self._cast(array, self._key_type, "keys")

    def entries(self, array: Input, count: int) -> pa.Array:
        return self._cast(array, self._entry_type, "entries", count)

    def values(self, array: Input, count: int) -> pa.Array:
        return self._cast(array, self._value_type, "values", count)

    def bounds(self, low: Datum, high: Datum) -> tuple[Datum, Datum]:
        """Return the bounds of a range of entries; integers are limited to the entry type."""
        if pa.types.is_nested(self._entry_type) and not low is high is None:
            raise TypeError(
                f"state {self.name!r}: a range of entries of {format_type(self._entry_type)}; "
                "nested entries have no bounds: use between(None, None) and filter the result"
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

    def _cast(
        self, array: Input, type: pa.DataType, what: str, count: int | None = None
    ) -> pa.Array:
        if not isinstance(array, pa.Array) or array.type != type:
            array = self._convert(array, type, what)
        if count is not None and len(array) != count:
            raise ValueError(f"state {self.name!r}: {len(array)} {what} for {count} keys")
        return array

    def _convert(self, array: Input, type: pa.DataType, what: str) -> pa.Array:
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        try:
            return array.cast(type) if isinstance(array, pa.Array) else pa.array(array, type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            found = getattr(array, "type", None)
            shown = array.__class__.__name__ if found is None else format_type(found)
            raise TypeError(
                f"state {self.name!r}: {what} of {shown}; expected {format_type(type)} ({error})"
            ) from None


class _ByBatch:
    """Methods for a single key, which handles of batches refuse."""

    name: str
    reads = "{}.get_many(keys)"
    writes = "{}.put_many(keys, ...)"
    removes = "{}.put_many(keys, ...) with nulls"

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            f"state {self.name!r}: a BatchProcess has no current key; "
            "use get_many(keys) and put_many(keys, ...)"
        )


class ColumnValueHandle(_ByBatch, Value[Any]):
    """Value state in arrays."""

    def __init__(self, declaration: Value[Any], table: ColumnTable) -> None:
        self.name = declaration.name
        self._table = table
        self._typed = _Typed(table)
        default = declaration.default
        values = table.values
        self._default = None if default is None else values.encode([values.normalise(default)])

    def get_many(self, keys: Input) -> pa.Array:
        table = self._table
        return table.read(table.find([self._typed.keys(keys)]), self._default)

    def get_field(self, keys: Input, name: str) -> pa.Array:
        """Return one field of the struct of each key, null where there is none."""
        table = self._table
        return table.read_field(table.find([self._typed.keys(keys)]), name)

    def put_many(self, keys: Input, values: Input) -> None:
        keys = self._typed.keys(keys)
        values = self._typed.values(values, len(keys))
        self._table.write([keys], values, _is_live(values))

    def set_in_epoch(self) -> tuple[pa.Array, pa.Array]:
        """Return the keys and values that the current epoch has set."""
        return self._table.set_in_epoch()

    def pieces_set_in_epoch(self, rows_max: int) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Yield what `set_in_epoch` returns, in pieces."""
        return self._table.pieces_set_in_epoch(rows_max)

    get: Any = _ByBatch._refuse
    set: Any = _ByBatch._refuse
    clear: Any = _ByBatch._refuse


class ColumnMapHandle(_ByBatch, Map[Any, Any]):
    """Map state in arrays."""

    def __init__(self, declaration: Map[Any, Any], table: ColumnTable) -> None:
        self.name = declaration.name
        self._table = table
        self._typed = _Typed(table)

    def get_many(self, keys: Input, entries: Input) -> pa.Array:
        keys = self._typed.keys(keys)
        table = self._table
        return table.read(table.find([keys, self._typed.entries(entries, len(keys))]))

    def put_many(self, keys: Input, entries: Input, values: Input) -> None:
        keys = self._typed.keys(keys)
        entries = self._typed.entries(entries, len(keys))
        values = self._typed.values(values, len(keys))
        self._table.write([keys, entries], values, _is_live(values))

    def of_keys(self, keys: Input) -> tuple[pa.Array, pa.Array, pa.Array]:
        return self._table.entries_of(self._typed.keys(keys))

    def between(self, low: Datum, high: Datum) -> tuple[pa.Array, pa.Array, pa.Array]:
        return self._table.entries_between(*self._typed.bounds(low, high))

    def entry_above(self, low: Datum) -> int | None:
        """Return the least entry above `low`, over all keys of the subtask."""
        return self._table.entry_above(self._typed.bounds(low, None)[0])

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = clear = _ByBatch._refuse
    __hash__ = Declaration.__hash__
    __eq__ = Declaration.__eq__


def _is_live(values: pa.Array) -> Bools | None:
    if not values.null_count:
        return None
    valid: Bools = values.is_valid().to_numpy(zero_copy_only=False)
    return valid


class _Locator:
    """Finds the key groups of many keys."""

    def __init__(self, table: Table, group_count: int) -> None:
        self._table = table
        self._group_count = group_count
        self._last: tuple[pa.Array, list[int], list[Key]] | None = None

    def locate(self, keys: pa.Array) -> Iterator[tuple[int, Key]]:
        """Iterate over (group, dict key) of each key; cached for the last array."""
        if self._last is None or self._last[0] is not keys:
            table = self._table
            found = key_groups(keys, table.keys.arrow, self._group_count)
            table.check_owned(keys, found)
            groups, names = found.tolist(), table.keys.decode_keys(keys)
            table.backend.prefetch(groups, names)
            self._last = (keys, groups, names)
        return zip(self._last[1], self._last[2], strict=True)


class RowValueHandle(_ByBatch, Value[Any]):
    """Value state in the rows of a backend."""

    def __init__(self, declaration: Value[Any], table: ValueTable, group_count: int) -> None:
        self.name = declaration.name
        self._table = table
        self._typed = _Typed(table)
        self._locate = _Locator(table, group_count).locate
        default = declaration.default
        self._default = None if default is None else table.values.normalise(default)

    def get_many(self, keys: Input) -> pa.Array:
        default = self._default
        found = [default if value is None else value for value in self._read(keys)]
        return self._table.values.encode(found)

    def get_field(self, keys: Input, name: str) -> pa.Array:
        """Return one field of the struct of each key, null where there is none."""
        struct = self._table.values.arrow
        at = struct.get_field_index(name)
        found = [None if value is None else value[at] for value in self._read(keys)]
        return codec(struct.field(at).type).encode(found)

    def _read(self, keys: Input) -> Iterator[Datum]:
        table = self._table
        for group, key in self._locate(self._typed.keys(keys)):
            value = table.changes[group].get(key, ABSENT)
            yield table.rows[group].get(key) if value is ABSENT else value

    def put_many(self, keys: Input, values: Input) -> None:
        keys = self._typed.keys(keys)
        values = self._typed.values(values, len(keys))
        table = self._table
        decoded = table.values.decode(values)
        if table.journal is not None:
            for group, key in self._locate(keys):
                table.journal.keep(table.changes[group], key)
        for (group, key), value in zip(self._locate(keys), decoded, strict=True):
            if value is None and key not in table.rows[group]:
                table.changes[group].pop(key, None)
            else:
                table.changes[group][key] = value

    def set_in_epoch(self) -> tuple[pa.Array, pa.Array]:
        """Return the keys and values that the current epoch has set."""
        return self._encode(self._set_in_epoch())

    def pieces_set_in_epoch(self, rows_max: int) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Yield what `set_in_epoch` returns, in pieces."""
        changed = self._set_in_epoch()
        for start in range(0, len(changed), rows_max):
            yield self._encode(changed[start : start + rows_max])

    def _set_in_epoch(self) -> list[tuple[Key, Datum]]:
        table = self._table
        return [
            pair
            for group in table.groups
            for pair in table.changes[group].items()
            if pair[1] is not None
        ]

    def _encode(self, pairs: list[tuple[Key, Datum]]) -> tuple[pa.Array, pa.Array]:
        table = self._table
        keys, values = zip(*pairs, strict=True) if pairs else ((), ())
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
        self._locate = _Locator(table, group_count).locate

    def get_many(self, keys: Input, entries: Input) -> pa.Array:
        keys = self._typed.keys(keys)
        names = self._table.entries.decode_keys(self._typed.entries(entries, len(keys)))
        table = self._table
        found = []
        for (group, key), entry in zip(self._locate(keys), names, strict=True):
            changed = table.changes[group].get(key, {})
            if entry in changed:
                value = changed[entry]
            else:
                held = table.rows[group].get(key)
                value = None if held is None else held.get(entry)
            found.append(None if value is ABSENT else value)
        return table.values.encode(found)

    def put_many(self, keys: Input, entries: Input, values: Input) -> None:
        keys = self._typed.keys(keys)
        entries = self._typed.entries(entries, len(keys))
        values = self._typed.values(values, len(keys))
        table = self._table
        names = table.entries.decode_keys(entries)
        decoded = table.values.decode(values)
        if table.journal is not None:
            self._keep(table.journal, keys, names)
        for (group, key), entry, value in zip(self._locate(keys), names, decoded, strict=True):
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

    def _keep(self, journal: Journal, keys: pa.Array, entries: list[Key]) -> None:
        for (group, key), entry in zip(self._locate(keys), entries, strict=True):
            changes = self._table.changes[group]
            # Both: the write may remove the last change of the key.
            journal.keep(changes, key)
            if key in changes:
                journal.keep(changes[key], entry)

    def of_keys(self, keys: Input) -> tuple[pa.Array, pa.Array, pa.Array]:
        rows: list[int] = []
        entries: list[Key] = []
        values: Values = []
        for at, (group, key) in enumerate(self._locate(self._typed.keys(keys))):
            for entry, value in self._entries(group, key):
                rows.append(at)
                entries.append(entry)
                values.append(value)
        table = self._table
        found = pa.array(rows, pa.int64()), table.entries.encode(entries)
        order = pa.array(name_order(found))
        return (*(column.take(order) for column in found), table.values.encode(values).take(order))

    def between(self, low: Datum, high: Datum) -> tuple[pa.Array, pa.Array, pa.Array]:
        table = self._table
        low, high = self._typed.bounds(low, high)
        found = table.between(self._bound(low), self._bound(high))
        keys, entries, values = zip(*found, strict=True) if found else ((), (), ())
        names = [table.entries.encode(list(entries)), table.keys.encode(list(keys))]
        order = pa.array(name_order(names))
        encoded = table.values.encode(list(values))
        return names[1].take(order), names[0].take(order), encoded.take(order)

    def entry_above(self, low: Datum) -> int | None:
        """Return the least entry above `low`, over all keys of the subtask."""
        low, _ = self._typed.bounds(low, None)
        entry: int | None = self._table.first_above(self._bound(low))
        return entry

    def _bound(self, bound: Datum) -> Datum:
        """Return a bound in the form of entries; a plain number may stand for a time."""
        if bound is None:
            return None
        entries = self._table.entries
        if isinstance(bound, int) and pa.types.is_temporal(entries.arrow):
            width = pa.int32() if entries.arrow.bit_width == 32 else pa.int64()
            return entries.decode_keys(pa.array([bound], width).view(entries.arrow))[0]
        return entries.normalise_key(bound)

    def _entries(self, group: int, key: Key) -> Iterator[tuple[Key, Datum]]:
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
    """Return the table of a state that a BatchProcess uses."""
    if isinstance(declaration, TimedRows):
        make = RowTable if backend.takes_columns else PaneTable
        return make(declaration, key_type, backend, group_count)
    if backend.takes_columns:
        return ColumnTable(declaration, key_type, backend, group_count)
    if declaration.kind == "map":
        return IndexedMapTable(declaration, key_type, backend, group_count)
    return make_table(declaration, key_type, backend, group_count)


def make_batch_handle(table: Table, group_count: int) -> Declaration:
    declaration = table.declaration
    if isinstance(declaration, TimedRows):
        if isinstance(table, RowTable):
            return RunRowsHandle(declaration, table)
        assert isinstance(table, PaneTable)
        return PaneRowsHandle(declaration, table, group_count)
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
