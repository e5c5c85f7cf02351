"""Handles of a BatchProcess: state of many keys at once, as Arrow arrays.

State of batches is in tables in arrays (`columnar`), with every backend: numpy does all work.

Always true here:
- arrays of another type are cast, or refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import pyarrow as pa

from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.row_table import RowTable
from cairn.backends.columnar.table import Bools, ColumnTable
from cairn.backends.contract import Backend
from cairn.backends.handles.rows import RowsHandle
from cairn.backends.overlay import Table
from cairn.backends.timed_rows import TimedRows
from cairn.state import Declaration, Map, Value
from cairn.types import format_type
from cairn.types.codec import Datum

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

    def put_many(
        self, keys: Input, entries: Input, values: Input, groups: Ints | None = None
    ) -> None:
        """Set entries; null deletes. `groups` are the key groups, from `groups_of`, if known."""
        keys = self._typed.keys(keys)
        entries = self._typed.entries(entries, len(keys))
        values = self._typed.values(values, len(keys))
        self._table.write([keys, entries], values, _is_live(values), groups=groups)

    def groups_of(self, keys: Input) -> Ints:
        """Return the key group of each key; FunctionError if another subtask owns one."""
        return self._table.groups_of(self._typed.keys(keys))

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


def stores_times(declaration: Declaration) -> bool:
    """True if a database is to store the entries by time too."""
    return isinstance(declaration, Map) and declaration.by_time


def make_batch_table(
    declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
) -> Table:
    """Return the table of a state that a BatchProcess uses."""
    is_timed = isinstance(declaration, TimedRows)
    if backend.spills_columns:
        # Not at the top: a slot with state in memory does not load RocksDB.
        from cairn.backends.cached.columns import SpillTable
        from cairn.backends.cached.mapped_rows import MappedRowTable
        from cairn.backends.cached.timed_columns import TimedSpillTable

        if stores_times(declaration):
            return TimedSpillTable(declaration, key_type, backend, group_count)
        spilling = MappedRowTable if is_timed else SpillTable
        return spilling(declaration, key_type, backend, group_count)
    make = RowTable if is_timed else ColumnTable
    return make(declaration, key_type, backend, group_count)


def make_batch_handle(table: Table) -> Declaration:
    declaration = table.declaration
    if isinstance(table, RowTable):
        return RowsHandle(table.declaration, table)
    assert isinstance(table, ColumnTable), "state of batches is in arrays"
    if isinstance(declaration, Map):
        return ColumnMapHandle(declaration, table)
    assert isinstance(declaration, Value)
    return ColumnValueHandle(declaration, table)
