"""The handle of timed rows (`backends/timed_rows`), by the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import pyarrow as pa

from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.row_table import RowTable
from cairn.backends.columnar.runs import Bools, Found, newest, search
from cairn.backends.timed_rows import TimedRows
from cairn.state import Declaration, Map
from cairn.types.codec.core import cast_to


class RowsHandle(Map[Any, Any]):
    """Rows of many keys at once. Keys are never null; times are whole numbers."""

    reads = "{}.match(keys, low, high)"
    writes = "{}.append(keys, times, rows)"

    def __init__(self, declaration: TimedRows, table: RowTable) -> None:
        self._table = table
        self._key_type = table.keys.arrow
        self.name = declaration.name
        self.row_type = declaration.row_type
        self._declaration = declaration

    def make_keys(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Return keys of these columns in the type of the state's."""
        if len(columns) == 1:
            return cast_to(self._key_type, columns[0])
        fields = list(self._key_type)
        parts = [cast_to(field.type, each) for field, each in zip(fields, columns, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=fields)

    def places(self, found: Found) -> list[tuple[int, int]]:
        """Return the names of rows of a key: pane and number."""
        panes = self._declaration.panes(found.times).tolist()
        return list(zip(panes, found.numbers.tolist(), strict=True))

    def append(self, keys: pa.Array, times: Ints, rows: pa.Array, waiting: Bools) -> None:
        """Add rows. `waiting` marks those that have found no match."""
        self._table.append(keys, times, rows, waiting)

    def match(self, keys: pa.Array, low: Ints, high: Ints) -> Iterator[Found]:
        """Yield the rows of each key from time `low` to `high`, in pieces, in the order of keys.

        Rows of one key come by time, then in the order in which they were added.
        """
        return search(self._table.runs(), self._table.find(keys), low, high)

    def as_of(self, keys: pa.Array, times: Ints) -> Found:
        """Return the newest row of each key at a time, the last added of several.

        Where rows of a key were removed, all older ones must be gone too.
        """
        return newest(self._table.runs(), self._table.find(keys), times)

    def before(self, time: int) -> Found:
        """Return the rows of before a time, in no particular order."""
        return self._table.before(time)

    def in_order(self, found: Found) -> Found:
        """Return the same rows by time, then in the order in which they were added, then by key."""
        return self._table.in_order(found)

    def keys_between(self, low: int, high: int) -> pa.Array:
        """Return the keys that have a row from time `low` to `high`, each once."""
        return self._table.keys_between(low, high)

    def keys_of(self, found: Found) -> pa.Array:
        """Return the key of each row."""
        return self._table.key_array(found.keys)

    def remove(self, found: Found) -> None:
        """Delete rows."""
        self._table.remove(found)

    def set_waiting(self, found: Found, *, waits: bool) -> None:
        """Record that rows wait for a match, or have found one."""
        self._table.set_waiting(found, waits=waits)

    def first_time(self) -> int | None:
        """Return the earliest time of a row."""
        return self._table.first_time()

    def of_keys(self, keys: Any) -> tuple[pa.Array, pa.Array, pa.Array]:
        """Return every entry of these keys: rows of `keys`, entries, values."""
        return self._table.entries_of(keys)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"state {self.name!r} is used by the batch")

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = clear = _refuse
    __hash__ = Declaration.__hash__
    __eq__ = Declaration.__eq__
