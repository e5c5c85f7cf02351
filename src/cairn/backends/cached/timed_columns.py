"""Map state of batches whose entries are times, such as the ends of windows, and are read in order.

The rows are those of any map in arrays (`columns`), ordered by key. Beside them the database has a
time index with a name `time | key` for each of them. So what is due is found without the others:
its names are read from the index, its rows are read into the arrays, and there the range is taken.

Always true here:
- a row in the database has its name in the index, and no other name is there: both are written
  together;
- a row that is not in the arrays is not before `_from` of its key group;
- of a base without an index all rows are read once, and written again with one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.cached.columns import SpillTable
from cairn.backends.cached.database import Database
from cairn.backends.cached.ordered import IndexRows, read_next
from cairn.backends.cached.packed_columns import is_packable, pack_columns, unpack_column
from cairn.backends.cached.stored_columns import Bools, Stored, StoredColumns
from cairn.backends.cached.timer_names import (
    INDEX_KIND,
    TIME_BYTES,
    index_name,
    pack_time,
    pack_times,
    unpack_times,
)
from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.table import ColumnTable
from cairn.backends.contract import Backend
from cairn.state import Declaration
from cairn.types.codec import Datum, codec

if TYPE_CHECKING:
    from cairn.backends.cached.backend import CachedBackend

PAGE_NAMES: Final = 256
"""Names read at a time, per key group. Each time that this is not enough, more are."""
PEEKED_NAMES: Final = 16
_NAMES_MAX: Final = 128 * 1024
"""Names read at a time, of all key groups."""
_GROWTH: Final = 4
_BEGIN: Final = b""
_END: Final = b"\xff"
"""Before and after all names."""
_AFTER_KEYS: Final = b"\xff\xff"
_TRUE: Final = pa.scalar(b"\xc3", pa.binary())
_NULL: Final = pa.scalar(None, pa.binary())


class TimedColumns(StoredColumns):
    """The rows in the database, and their index."""

    def __init__(self, table: TimedSpillTable, backend: CachedBackend) -> None:
        super().__init__(table, backend, table.name_types)
        self._index_name = index_name(table.name)
        index_types = codec(pa.bool_()), codec(pa.int64())
        backend.open_state(self._index_name, INDEX_KIND, table.keys, *index_types)

    def index(self, group: int) -> IndexRows:
        return cast(IndexRows, self._backend.rows(self._index_name, group))

    def drop_index(self, group: int) -> None:
        self._backend.drop(self._index_name, group)

    def prepare(self, groups: Ints, *, is_first: bool) -> list[tuple[Database, Ints]]:
        databases = super().prepare(groups, is_first=is_first)
        for group in np.unique(groups).tolist():
            index = self.index(group)
            if index.database is None:
                index.bind(self._backend.database_of(group))
        return databases

    def _pack(self, database: Database, piece: Stored) -> tuple[pa.Array, pa.Array]:
        keys, contents = super()._pack(database, piece)
        names = self._pack_index(database, piece.names, piece.groups)
        entries = pc.if_else(pa.array(piece.is_held), _TRUE, _NULL)
        return pa.concat_arrays([keys, names]), pa.concat_arrays([contents, entries])

    def _pack_index(self, database: Database, names: Sequence[pa.Array], groups: Ints) -> pa.Array:
        prefix = database.prefix(self._index_name, 0)
        head = np.empty((len(groups), len(prefix) + TIME_BYTES), np.uint8)
        head[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
        # The key group is in the first two bytes.
        head[:, :2] = groups.astype(">u2").view(np.uint8).reshape(-1, 2)
        times = names[1].fill_null(0).to_numpy(zero_copy_only=False)
        head[:, len(prefix) :] = pack_times(times)
        if is_packable(self._types[0]):
            return pack_columns(names[:1], head=head, are_keys=True)
        keys = map(self._packing.key, self._packing.keys.decode_keys(names[0]))
        return pa.array([bytes(h) + key for h, key in zip(head, keys, strict=True)], pa.binary())

    def read_names(
        self, places: Sequence[tuple[int, bytes]], count: int
    ) -> list[tuple[list[bytes], bytes]]:
        """Return the next names of key groups, and the place after them."""
        wanted = [(self.index(group), place) for group, place in places]
        return [
            (names, _END if last is None else last + b"\0")
            for names, last in read_next(self._backend, wanted, count)
        ]

    def unpack_index(self, names: Sequence[bytes]) -> list[pa.Array]:
        """Return keys and times."""
        times = unpack_times(b"".join([name[:TIME_BYTES] for name in names]))
        raws = [name[TIME_BYTES:] for name in names]
        if is_packable(self._types[0]):
            keys = unpack_column(pa.array(raws, pa.binary()), self._types[0])
        else:
            keys = self._packing.keys.encode([self._packing.key_of(raw) for raw in raws])
        return [keys, pa.array(times)]


class TimedSpillTable(SpillTable):
    """Map state in arrays over a database that has its rows by time too."""

    _below: TimedColumns

    def __init__(
        self, declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
    ) -> None:
        self._from: dict[int, bytes] = {}
        super().__init__(declaration, key_type, backend, group_count)
        assert pa.types.is_int64(self._types[1]), "times are integers"
        self._below = TimedColumns(self, self.backend)

    @property
    def name_types(self) -> Sequence[pa.DataType]:
        return self._types

    # Reading by time

    def entries_between(self, low: Datum, high: Datum) -> tuple[pa.Array, pa.Array, pa.Array]:
        if high is None:
            self._read_all()
        elif not self.is_whole:
            self._recall_until(pack_time(high) + _AFTER_KEYS)
        return ColumnTable.entries_between(self, low, high)

    def _recall_until(self, end: bytes) -> None:
        """Read the rows up to a time into the arrays."""
        count = PAGE_NAMES
        while places := [place for place in self._from.items() if place[1] < end]:
            self._recall_next(places, end, count)
            count = max(1, min(count * _GROWTH, _NAMES_MAX // len(places)))

    def entry_above(self, low: int | None) -> int | None:
        count = PEEKED_NAMES
        while True:
            least = ColumnTable.entry_above(self, low)
            end = _END if least is None else pack_time(least)
            # A row of the same time makes no difference.
            places = [place for place in self._from.items() if place[1][:TIME_BYTES] < end]
            if self.is_whole or not places:
                return least
            self._recall_next(places, _END, count)
            count = max(1, min(count * _GROWTH, _NAMES_MAX // len(places)))

    def _recall_next(self, places: Sequence[tuple[int, bytes]], end: bytes, count: int) -> None:
        """Read the next rows of key groups into the arrays, those before the end."""
        due: list[bytes] = []
        following: dict[int, bytes] = {}
        pages = self._below.read_names(places, count)
        for (group, _), (names, after) in zip(places, pages, strict=True):
            cut = bisect_left(names, end)
            due += names[:cut]
            following[group] = names[cut] if cut < len(names) else after
        if due:
            names_due = self._below.unpack_index(due)
            missing = np.flatnonzero(self._index.find(names_due) < 0)
            if len(missing):
                self._recall([array.take(pa.array(missing)) for array in names_due])
                self._asked = None
        self._from |= following

    def _read_all(self) -> None:
        super()._read_all()
        self._from = dict.fromkeys(self._from, _END)

    # Rows that leave

    def _retain(self, is_kept: Bools) -> None:
        count = len(self._index)
        leaving = np.flatnonzero(self._committed[:count] & ~is_kept)
        if len(leaving):
            groups, (times, _) = self._groups[leaving], self._index.column(1)
            first = np.full(self._group_count, np.iinfo(np.int64).max)
            np.minimum.at(first, groups, times[leaving])
            for group in np.unique(groups).tolist():
                if group in self._from:
                    place = pack_time(int(first[group]))
                    self._from[group] = min(self._from[group], place)
        super()._retain(is_kept)

    # Key groups

    def assign(self, groups: range) -> None:
        leaving = [group for group in self.groups if group not in groups]
        super().assign(groups)
        for group in leaving:
            self._below.drop_index(group)
        self._from = {group: self._from.get(group, _END) for group in groups}

    def forget(self, groups: range) -> None:
        super().forget(groups)
        for group in groups:
            if group in self._from:
                self._below.drop_index(group)
                self._from[group] = _END

    def note_loaded(self, groups: range) -> None:
        super().note_loaded(groups)
        owned = [group for group in groups if group in self._from]
        self._from |= dict.fromkeys(owned, _BEGIN)
        if not all(self._below.index(group).is_complete for group in owned):
            self._index_again(owned)

    def _index_again(self, groups: Sequence[int]) -> None:
        """The base has no index: the next one gets it, with all rows."""
        self._read_all()
        count = len(self._index)
        self._dirty[:count] |= self._stored[:count]
        for group in groups:
            self._below.index(group).is_complete = True
