"""Handles of timed rows (`backends/timed_rows`): by the batch, over runs or over a backend's rows.

Always true here:
- both kinds find the same rows in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from cairn.backends.columnar.name_order import name_order
from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.pages import Pages
from cairn.backends.columnar.row_table import RowTable
from cairn.backends.columnar.runs import Bools, Found, Rows, Run, newest, search
from cairn.backends.pane_table import Owner, PaneTable, Place
from cairn.backends.timed_rows import TimedRows
from cairn.key_groups import key_groups
from cairn.state import Declaration, Map
from cairn.types.codec import Datum, Key
from cairn.types.codec.core import cast_to


class RowsHandle(ABC, Map[Any, Any]):
    """Rows of many keys at once. Keys are never null; times are whole numbers."""

    reads = "{}.match(keys, low, high)"
    writes = "{}.append(keys, times, rows)"

    def __init__(self, declaration: TimedRows, key_type: pa.DataType) -> None:
        self._key_type = key_type
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

    def places(self, found: Found) -> list[Place]:
        """Return the names of rows of a key: pane and number."""
        panes = self._declaration.panes(found.times).tolist()
        return list(zip(panes, found.numbers.tolist(), strict=True))

    @abstractmethod
    def append(self, keys: pa.Array, times: Ints, rows: pa.Array, waiting: Bools) -> None:
        """Add rows. `waiting` marks those that have found no match."""

    @abstractmethod
    def match(self, keys: pa.Array, low: Ints, high: Ints) -> Iterator[Found]:
        """Yield the rows of each key from time `low` to `high`, in pieces, in the order of keys.

        Rows of one key come by time, then in the order in which they were added.
        """

    @abstractmethod
    def as_of(self, keys: pa.Array, times: Ints) -> Found:
        """Return the newest row of each key at a time, the last added of several.

        Where rows of a key were removed, all older ones must be gone too.
        """

    @abstractmethod
    def before(self, time: int) -> Found:
        """Return the rows of before a time, in no particular order."""

    @abstractmethod
    def in_order(self, found: Found) -> Found:
        """Return the same rows by time, then in the order in which they were added, then by key."""

    @abstractmethod
    def keys_between(self, low: int, high: int) -> pa.Array:
        """Return the keys that have a row from time `low` to `high`, each once."""

    @abstractmethod
    def keys_of(self, found: Found) -> pa.Array:
        """Return the key of each row."""

    @abstractmethod
    def remove(self, found: Found) -> None:
        """Delete rows."""

    @abstractmethod
    def set_waiting(self, found: Found, *, waits: bool) -> None:
        """Record that rows wait for a match, or have found one."""

    @abstractmethod
    def first_time(self) -> int | None:
        """Return the earliest time of a row."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"state {self.name!r} is used by the batch")

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = clear = _refuse
    __hash__ = Declaration.__hash__
    __eq__ = Declaration.__eq__


class RunRowsHandle(RowsHandle):
    """Rows in sorted runs, in memory."""

    def __init__(self, declaration: TimedRows, table: RowTable) -> None:
        super().__init__(declaration, table.keys.arrow)
        self._table = table

    def append(self, keys: pa.Array, times: Ints, rows: pa.Array, waiting: Bools) -> None:
        self._table.append(keys, times, rows, waiting)

    def match(self, keys: pa.Array, low: Ints, high: Ints) -> Iterator[Found]:
        return search(self._table.runs(), self._table.find(keys), low, high)

    def as_of(self, keys: pa.Array, times: Ints) -> Found:
        return newest(self._table.runs(), self._table.find(keys), times)

    def before(self, time: int) -> Found:
        return self._table.before(time)

    def in_order(self, found: Found) -> Found:
        return self._table.in_order(found)

    def keys_between(self, low: int, high: int) -> pa.Array:
        return self._table.keys_between(low, high)

    def keys_of(self, found: Found) -> pa.Array:
        return self._table.key_array(found.keys)

    def remove(self, found: Found) -> None:
        self._table.remove(found)

    def set_waiting(self, found: Found, *, waits: bool) -> None:
        self._table.set_waiting(found, waits=waits)

    def first_time(self) -> int | None:
        return self._table.first_time()

    def of_keys(self, keys: Any) -> tuple[pa.Array, pa.Array, pa.Array]:
        return self._table.entries_of(keys)


class _Loaded(Run):
    """Rows of a backend, read for one call."""

    def __init__(self, rows: Rows, owners: list[Owner]) -> None:
        self.owners = owners
        super().__init__(rows, is_committed=True)


class PaneRowsHandle(RowsHandle):
    """Rows in a backend. The rows of the keys of a call are read into a run for that call."""

    def __init__(self, declaration: TimedRows, table: PaneTable, group_count: int) -> None:
        super().__init__(declaration, table.keys.arrow)
        self._table = table
        self._group_count = group_count

    def _locate(self, keys: pa.Array) -> list[Owner]:
        table = self._table
        groups = key_groups(keys, table.keys.arrow, self._group_count)
        table.check_owned(keys, groups)
        return list(zip(groups.tolist(), table.keys.decode_keys(keys), strict=True))

    def append(self, keys: pa.Array, times: Ints, rows: pa.Array, waiting: Bools) -> None:
        values = self._declaration.make_values(times, waiting, rows)
        decoded = self._table.values.decode(values)
        panes = self._declaration.panes(times).tolist()
        owners = self._locate(keys)
        self._table.backend.prefetch([group for group, _ in owners], [key for _, key in owners])
        for owner, pane, time, value in zip(owners, panes, times.tolist(), decoded, strict=True):
            self._table.add(owner, pane, time, value)

    def _load(self, owners: Iterable[Owner]) -> list[_Loaded]:
        """Return the rows of these keys; the number of a key is its index."""
        table, known = self._table, list(owners)
        table.backend.prefetch([group for group, _ in known], [key for _, key in known])
        numbers: list[int] = []
        names: list[Any] = []
        values: list[Datum] = []
        for at, owner in enumerate(known):
            for name, value in table.entries_of(owner):
                numbers.append(at)
                names.append(name)
                values.append(value)
        if not values:
            return []
        column = table.values.encode(values)
        rows = Rows(
            np.array(numbers, np.int64),
            column.field("time").to_numpy(),
            np.array([number for _, number in names], np.int64),
            self._declaration.read_waiting(column),
            np.arange(len(values)),
            Pages([column.field("row")]),
        )
        return [_Loaded(rows, known)]

    def _numbers(self, keys: pa.Array) -> tuple[list[Owner], Ints]:
        """Return the distinct keys, and the index of each row's key among them."""
        owners = self._locate(keys)
        places = {owner: at for at, owner in enumerate(dict.fromkeys(owners))}
        numbers = np.fromiter(map(places.__getitem__, owners), np.int64, len(owners))
        return list(places), numbers

    def match(self, keys: pa.Array, low: Ints, high: Ints) -> Iterator[Found]:
        owners, numbers = self._numbers(keys)
        return search(self._load(owners), numbers, low, high)

    def as_of(self, keys: pa.Array, times: Ints) -> Found:
        owners, numbers = self._numbers(keys)
        return newest(self._load(owners), numbers, times)

    def before(self, time: int) -> Found:
        owners = self._find_owners(None, time - 1)
        runs = [(run, run.before(time)) for run in self._load(owners)]
        return Found([(run, at, np.zeros(len(at), np.int64)) for run, at in runs])

    def in_order(self, found: Found) -> Found:
        names = [pa.array(found.times), pa.array(found.numbers), self.keys_of(found)]
        return found.pick(name_order(names))

    def keys_of(self, found: Found) -> pa.Array:
        return self._table.keys.encode([key for _, key in self._owners(found)])

    def _owners(self, found: Found) -> list[Owner]:
        owners: list[Owner] = []
        for run, at, _ in found.split():
            assert isinstance(run, _Loaded)
            owners += [run.owners[key] for key in run.all.keys[at].tolist()]
        return owners

    def _find_owners(self, low: int | None, high: int) -> list[Owner]:
        """Return the keys that may have rows of these times, in an order without a history."""
        owners = list(dict.fromkeys(owner for _, owner in self._table.panes(low, high)))
        keys = self._table.keys.encode([key for _, key in owners])
        return [owners[at] for at in name_order([keys]).tolist()]

    def keys_between(self, low: int, high: int) -> pa.Array:
        owners = self._find_owners(low, high)
        found = set()
        for run in self._load(owners):
            times = run.all.times
            found.update(run.all.keys[(times >= low) & (times <= high)].tolist())
        return self._table.keys.encode([owners[at][1] for at in sorted(found)])

    def remove(self, found: Found) -> None:
        names = []
        for run, at, _ in found.split():
            names += self._names(run, at)
            run.remove(at)
        self._table.remove(names)

    def set_waiting(self, found: Found, *, waits: bool) -> None:
        for run, at, _ in found.split():
            changed = np.flatnonzero(np.bincount(at[run.waiting[at] != waits], minlength=1))
            for owner, place in self._names(run, changed):
                self._table.set_waiting(owner, place, waits=waits)
            run.set_waiting(changed, waits=waits)

    def _names(self, run: Run, at: Ints) -> list[tuple[Owner, Place]]:
        assert isinstance(run, _Loaded)
        owners = [run.owners[key] for key in run.all.keys[at].tolist()]
        panes = self._declaration.panes(run.all.times[at]).tolist()
        numbers = run.all.numbers[at].tolist()
        return list(zip(owners, zip(panes, numbers, strict=True), strict=True))

    def first_time(self) -> int | None:
        return self._table.first_time()

    def of_keys(self, keys: Any) -> tuple[pa.Array, pa.Array, pa.Array]:
        rows: list[int] = []
        entries: list[Key] = []
        values: list[Datum] = []
        for at, owner in enumerate(self._locate(keys)):
            for entry, value in sorted(self._table.entries_of(owner)):
                rows.append(at)
                entries.append(entry)
                values.append(value)
        table = self._table
        return (
            pa.array(rows, pa.int64()),
            table.entries.encode(entries),
            table.values.encode(values),
        )
