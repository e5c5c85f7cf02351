"""State of batches in arrays, as far as memory goes; the other rows are in a database.

As long as all of a state fits, the arrays have all of it. When it does not fit, its rows are
written to the database, and those that were used least recently leave the arrays. From then on the
arrays are a cache: names that are not in them are read from the database, a batch at a time, and
rows that changed are written when a base begins, or when memory is short if the database takes
them at any time.

Always true here:
- a name that has a position is newest there, whether it has a value or not; the database is asked
  for all others, unless the table is whole;
- `dirty` marks the positions whose committed content the database lacks and is not being given,
  `stored` those of which the database has a row;
- rows leave the arrays between epochs only, when the database has them, and none leave while
  rows are being written;
- a table that is read by ranges of entries is whole: the database's rows are ordered by key, unless
  they have a time index (`timed_columns`). So are the tables beside rows of joins (`mapped_rows`),
  of which no database has any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from cairn.backends.cached.database import Database
from cairn.backends.cached.stored_columns import Stored, StoredColumns, Unwritten
from cairn.backends.columnar.key_index import NameIndex
from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.spread import Array, Arrays, Columns, Form, grow
from cairn.backends.columnar.table import PIECE_ROWS, Bools, ColumnTable
from cairn.backends.contract import Backend, Content
from cairn.backends.heap.backend import empty_rows
from cairn.backends.layout import MapLayout
from cairn.key_groups import key_groups
from cairn.state import Declaration
from cairn.storage.manifest import Held
from cairn.types.codec import Codec, Datum, Key

if TYPE_CHECKING:
    from cairn.backends.cached.backend import CachedBackend

_POSITION_BYTES = 48
"""Flags, key group, number of the last use, and the places in the list of a key."""


class SpillTable(ColumnTable):
    """Value or map state in arrays over a database."""

    backend: CachedBackend

    def __init__(
        self, declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
    ) -> None:
        super().__init__(declaration, key_type, backend, group_count)
        # A write reads names that are not here, and both hold the lock.
        self._lock = threading.RLock()  # type: ignore[assignment]
        self.is_whole = True
        """The arrays have all rows."""
        self._is_ranged = False
        self._below = StoredColumns(self, self.backend, self._types)
        self._writing: Unwritten | None = None
        """Rows that a base is writing."""
        self._tick = 0
        """Number of the running epoch, as far as the order of uses goes."""
        self.backend.columns[self.name] = self

    def _clear(self, form: Form) -> None:
        super()._clear(form)
        self._dirty: Bools = np.empty(0, np.bool_)
        self._stored: Bools = np.empty(0, np.bool_)
        self._unsettled: Bools = np.empty(0, np.bool_)
        """Rows that were restored without a look at the database; `stored` is a guess."""
        self._used = np.empty(0, np.int32)
        self._known_keys = NameIndex(self._types[:1])
        """Keys whose entries are all here."""

    def _reserve(self, count: int) -> None:
        super()._reserve(count)
        if self._values.size > len(self._dirty):
            self._dirty = grow(self._dirty, self._values.size)
            self._stored = grow(self._stored, self._values.size)
            self._unsettled = grow(self._unsettled, self._values.size)
            self._used = grow(self._used, self._values.size)

    @property
    def nbytes(self) -> int:
        """Estimate of the memory that names and values take."""
        width = sum(dtype.itemsize for dtype in self._form.dtypes) + _POSITION_BYTES
        names = self._index.nbytes + self._known_keys.nbytes
        return len(self._index) * width + names + self._form.text_bytes

    # Reading

    def find(self, names: Sequence[pa.Array], likely: Ints | None = None) -> Ints:
        positions = super().find(names, likely)
        if self.is_whole:
            return positions
        missing = np.flatnonzero(positions < 0)
        if len(missing) and self._recall([array.take(pa.array(missing)) for array in names]):
            self._asked = None
            positions = super().find(names)
        if len(self._used):
            self._used[positions] = self._tick
        return positions

    def _recall(self, names: list[pa.Array]) -> bool:
        """Read names without a position from the database; False if all are of other subtasks."""
        _, firsts = NameIndex(self._types).place(names)
        names = [array.take(pa.array(firsts)) for array in names]
        groups = key_groups(names[0], self.keys.arrow, self._group_count)
        owned = (groups >= self.groups.start) & (groups < self.groups.stop)
        if not owned.all():
            names = [array.filter(pa.array(owned)) for array in names]
            groups = groups[owned]
        if not len(groups):
            return False
        column, is_held = self._below.read(names, groups)
        self._take_in(names, column, is_held, groups)
        return True

    def _take_in(
        self, names: Sequence[pa.Array], column: pa.Array, is_held: Bools, groups: Array
    ) -> None:
        """Give new names the content that the database has of them."""
        with self._lock:
            positions = self._load(names, self._form.split(column), groups, is_held)
            self._dirty[positions] = False
            self._stored[positions] = is_held
            self._used[positions] = self._tick

    def entries_of(self, keys: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
        if not self.is_whole:
            self._recall_maps(keys)
        return super().entries_of(keys)

    def _recall_maps(self, keys: pa.Array) -> None:
        """Read all entries of keys from the database."""
        unknown = np.flatnonzero(self._known_keys.find([keys]) < 0)
        if not len(unknown):
            return
        keys = keys.take(pa.array(unknown))
        _, firsts = NameIndex(self._types[:1]).place([keys])
        keys = keys.take(pa.array(firsts))
        groups = key_groups(keys, self.keys.arrow, self._group_count)
        owned = (groups >= self.groups.start) & (groups < self.groups.stop)
        keys, groups = keys.filter(pa.array(owned)), groups[owned]
        at, entries, column = self._below.read_maps(keys, groups)
        if len(at):
            self._take_in_new([keys.take(pa.array(at)), entries], column, groups[at])
        self._known_keys.place([keys])

    def _take_in_new(self, names: list[pa.Array], column: pa.Array, groups: Array) -> None:
        """Give those of the names that are not here the values that the database has."""
        new = np.flatnonzero(self._index.find(names) < 0)
        if len(new):
            taken = pa.array(new)
            names = [array.take(taken) for array in names]
            self._take_in(names, column.take(taken), np.ones(len(new), np.bool_), groups[new])

    @property
    def _entry_codec(self) -> Codec:
        assert isinstance(self.layout, MapLayout)
        return self.layout.entries

    def entries_between(self, low: Datum, high: Datum) -> tuple[pa.Array, pa.Array, pa.Array]:
        self._make_whole()
        return super().entries_between(low, high)

    def entry_above(self, low: int | None) -> int | None:
        self._make_whole()
        return super().entry_above(low)

    def _make_whole(self) -> None:
        """Read all rows, and keep them from now on."""
        self._is_ranged = True
        self._read_all()

    def _read_all(self) -> None:
        """Read all rows that are not here."""
        if self.is_whole:
            return
        for group in self.groups:
            rows = self._below.rows(group).items()
            if self.is_map:
                found = [(key, e, value) for key, held in rows for e, value in held.items()]
            else:
                found = [(key, None, held) for key, held in rows]
            for start in range(0, len(found), PIECE_ROWS):
                keys, entries, values = zip(*found[start : start + PIECE_ROWS], strict=True)
                names = [self.keys.encode(list(keys))]
                if self.is_map:
                    names.append(self._entry_codec.encode(list(entries)))
                column = self.values.encode(list(values))
                self._take_in_new(names, column, np.full(len(keys), group))
        self.is_whole = True

    # Rows that the database lacks

    def collect(self) -> None:
        """Write the committed rows that the database lacks."""
        for database, at, pieces in self._unwritten():
            self._below.write(database, pieces)
            self._note_written(at)

    def hand_over(self) -> Unwritten:
        """Return the committed rows that the database lacks, for a base to write them."""
        self._settle_writer()
        assert self._writing is None, "one base at a time"
        writing = self._writing = Unwritten(self._below)
        for database, at, pieces in self._unwritten():
            writing.parts.append((database, list(pieces)))
            self._note_written(at)
        return writing

    def _unwritten(self) -> Iterator[tuple[Database, Ints, Iterator[Stored]]]:
        """Yield the rows that the database lacks: their database, their positions, themselves."""
        count = len(self._index)
        dirty = np.flatnonzero(self._dirty[:count])
        if not len(dirty):
            return
        values = self._values
        if len(self._touched.positions()):
            values = values.copy_first(count)
            self._touched.put_back(values)
        dirty = dirty[np.argsort(self._groups[dirty], kind="stable")]
        groups = self._groups[dirty].astype(np.int64)
        for database, places in self._below.prepare(groups, is_first=self.is_whole):
            at = dirty[places]
            yield database, at, self._pieces_to_store(at, values)

    def _note_written(self, at: Ints) -> None:
        self._dirty[at] = False
        self._stored[at] = self._committed[at]

    def _settle_writer(self) -> None:
        """See whether a base has written the rows that it was handed."""
        writing = self._writing
        if writing is None or not writing.is_over:
            return
        self._writing = None
        if writing.is_written:
            return
        self._below.take_back(writing.counted)
        for _, pieces in writing.parts:
            for piece in pieces:
                positions = self._index.find(piece.names)
                self._dirty[positions] = True
                self._stored[positions] = piece.was_held

    def _pieces_to_store(self, at: Ints, values: Columns) -> Iterator[Stored]:
        """Yield positions, which are by key group, in pieces of whole groups."""
        ends = np.flatnonzero(np.diff(self._groups[at], append=-1)) + 1
        start = 0
        for end in ends.tolist():
            if end - start >= PIECE_ROWS or end == len(at):
                piece, start = at[start:end], end
                yield Stored(
                    self._index.arrays(piece),
                    self._groups[piece].astype(np.int64),
                    self._form.join(values.take(piece)),
                    self._committed[piece],
                    self._stored[piece],
                )

    @property
    def is_too_large(self) -> bool:
        """True if rows are to leave the arrays."""
        if self._is_ranged or self.backend.run_tables:
            return False
        return self.nbytes > self.backend.table_bytes_max

    def unwritten_bytes(self, *, with_frozen: bool) -> int:
        """Estimate the memory of rows that are to leave the arrays, and must be written first.

        `with_frozen`: those too that a base is writing. Called between epochs.
        """
        self._settle_writer()
        count = len(self._index)
        if not count or not self.is_too_large:
            return 0
        unwritten = int(np.count_nonzero(self._dirty[:count]))
        if with_frozen and self._writing is not None:
            unwritten += self._writing.row_count
        size = self.nbytes
        return min(size - self.backend.table_bytes_max, size * unwritten // count)

    def spill_if_full(self) -> None:
        """Keep the rows in memory that were used last. Called between epochs."""
        self._settle_writer()
        if not self.is_too_large:
            return
        size, size_max = self.nbytes, self.backend.table_bytes_max
        if self.backend.writes_at_once:
            self.collect()
        elif self._writing is not None or not self._below.is_used():
            return  # The next base makes rows free to leave.
        count = len(self._index)
        kept_count = count * size_max // (2 * size)
        used = self._used[:count]
        is_kept = self._dirty[:count].copy()
        if kept_count:
            is_kept[np.argpartition(used, count - kept_count)[count - kept_count :]] = True
        if is_kept.all():
            return
        with self._lock:
            self.is_whole = False
            self._retain(is_kept)

    # Epochs

    def assign(self, groups: range) -> None:
        leaving = [group for group in self.groups if group not in groups]
        if leaving:
            self._remove(lambda held: (held < groups.start) | (held >= groups.stop))
        for group in leaving:
            self.backend.drop(self.name, group)
            self.rows[group] = empty_rows(self.declaration.layout)
        for group in groups:
            if group not in self.groups:
                self.rows[group] = self.backend.rows(self.name, group)
        self.groups = groups
        self._note_rows()

    def forget(self, groups: range) -> None:
        self._remove(lambda held: (held >= groups.start) & (held < groups.stop))
        for group in groups:
            if group in self.groups:
                self.backend.drop(self.name, group)
                self.rows[group] = self.backend.rows(self.name, group)
        self._note_rows()

    def _remove(self, is_gone: Callable[[Array], Array]) -> None:
        """Drop the rows of some key groups. Called between epochs, without pending changes."""
        self.backend.cancel_base()
        self._settle_writer()
        self.rollback()
        with self._lock:
            self._retain(~is_gone(self._groups[: len(self._index)]))

    def _note_rows(self) -> None:
        """See whether the database has rows of the table."""
        if not self._below.is_used():
            self.is_whole = True
            self._below.forget_filter()

    def note_loaded(self, groups: range) -> None:
        """The database has rows of key groups that were not read here, if these have any."""
        if not self._below.is_used():
            return
        self.is_whole = False
        self._below.forget_filter()

    def promote(self) -> None:
        touched = self._touched.positions()
        self._dirty[touched] = True
        self._used[touched] = self._tick
        self._tick += 1
        super().promote()
        self.spill_if_full()

    def apply(self, batch: pa.RecordBatch) -> None:
        if self.is_whole:
            super().apply(batch)
        elif not self.backend.settles_later:
            self.find(self._names(batch))
            super().apply(batch)
        else:
            names = self._names(batch)
            bound = [g for g in self.groups if self._below.rows(g).database is not None]
            may_be_stored = np.isin(batch["group"].to_numpy(), bound)
            is_new = self._index.find(names) < 0
            super().apply(batch)
            positions = self._index.find(names)
            self._used[positions] = self._tick
            added = positions[is_new & may_be_stored]
            # If it is a deletion, it must be written.
            self._stored[added] = self._unsettled[added] = True
        self.spill_if_full()

    @property
    def is_settled(self) -> bool:
        return not self._unsettled[: len(self._index)].any()

    def settle(self) -> None:
        """Look up which of the restored rows the database has."""
        places = np.flatnonzero(self._unsettled[: len(self._index)])
        for start in range(0, len(places), PIECE_ROWS):
            at = places[start : start + PIECE_ROWS]
            names = list(self._index.arrays(at))
            _, self._stored[at] = self._below.read(names, self._groups[at].astype(np.int64))
            self._unsettled[at] = False

    def _load(
        self, names: Sequence[pa.Array], values: Arrays, groups: Array, is_live: Bools
    ) -> Ints:
        positions = super()._load(names, values, groups, is_live)
        self._dirty[positions] = True
        return positions

    def _lay_out(self) -> None:
        self._settle_writer()
        if self._writing is None:
            self._retain(np.ones(len(self._index), np.bool_))

    def _retain(self, is_kept: Bools) -> None:
        """Assign positions again, to these names: with a value, or for the database to delete."""
        count = len(self._index)
        is_needed = self._committed[:count] | (self._dirty[:count] & self._stored[:count])
        held = np.flatnonzero(is_kept & is_needed)
        before = self._dirty, self._stored, self._unsettled, self._used
        flags = [each[held] for each in before]
        positions = self._move(held)
        for each, moved in zip(
            (self._dirty, self._stored, self._unsettled, self._used), flags, strict=True
        ):
            each[positions] = moved

    # Stored rows

    def freeze(self) -> Iterator[pa.RecordBatch] | None:
        return self._freeze() if self.is_whole else None

    def dump(self) -> Iterator[pa.RecordBatch]:
        if not self.backend.writes_at_once:
            self._read_all()
        if self.is_whole:
            return self._freeze()
        self.collect()
        return self._dump_rows()

    def _dump_rows(self) -> Iterator[pa.RecordBatch]:
        for group in self.groups:
            held = dict(self._below.rows(group).items())
            if held:
                yield self.layout.batch([group], [held])

    def count_held(self) -> Held:
        if self.is_whole:
            return super().count_held()
        count = len(self._index)
        live, stored = self._live[:count], self._stored[:count]
        more = int(np.count_nonzero(live & ~stored)) - int(np.count_nonzero(stored & ~live))
        writing = self._writing
        if writing is not None:
            more += writing.uncounted
        keys, entries = self._below.count()
        # The entries per key are assumed to be those of the database's rows.
        keys_now = round(keys * (entries + more) / entries) if entries else more
        return Held(keys_now, entries + more)

    # Lookups, on other threads

    def look_up(self, places: Sequence[tuple[int, Key]], *, finished: bool) -> list[Content] | None:
        # All of it: the running epoch may read a name from the database meanwhile.
        with self._lock:
            found = super().look_up(places, finished=finished)
            if self.is_whole or found is None:
                return found
            keys = self.keys.encode([key for _, key in places])
            if not self.is_map:
                for at in np.flatnonzero(self._index.find([keys]) < 0).tolist():
                    group, key = places[at]
                    found[at] = self._below.rows(group).peek(key)
                return found
            below = [self._below.rows(group).peek(key) or {} for group, key in places]
            if len(self._index):
                rows, positions = self._positions_of(keys)
                entries = self._entry_codec.decode_keys(self._index.arrays(positions)[1])
                for row, entry in zip(rows.tolist(), entries, strict=True):
                    below[row].pop(entry, None)
        merged = [{**less, **(held or {})} for less, held in zip(below, found, strict=True)]
        return [held or None for held in merged]
