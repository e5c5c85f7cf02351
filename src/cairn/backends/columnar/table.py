"""State in typed arrays, for functions that work by the batch.

Every name (a key, or a key and an entry of its map) has a position, and values lie in arrays by
position: for a struct one array per field. The running epoch writes to the arrays directly. When
it first touches positions, their values are saved, in bulk; rollback writes them back.

A position stays with its name when the state is cleared. When too many positions are dead, all
are assigned again, between epochs.

Always true here:
- `committed` marks the positions that the parent epoch holds; their values are in the arrays, or
  saved if the epoch has touched them;
- writes that may overlap lookups of the parent epoch's state hold the lock;
- results of reads, and deltas, are ordered by input or by name, never by position: positions
  depend on history. Only a base goes by key group and then position: its rows are the same, its
  bytes need not be.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.backends.columnar.chains import Chains
from cairn.backends.columnar.entry_ranges import find_above, find_between
from cairn.backends.columnar.key_count import KeyCount
from cairn.backends.columnar.key_index import NameIndex
from cairn.backends.columnar.name_order import name_order
from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.spread import (
    Array,
    Arrays,
    Columns,
    Form,
    StructForm,
    form_of,
    grow,
)
from cairn.backends.columnar.stored_rows import make_rows, merge_names
from cairn.backends.columnar.texts import MOVED_ROWS
from cairn.backends.columnar.touched import Mark, Touched
from cairn.backends.contract import Backend, Content
from cairn.backends.journal import Journal
from cairn.backends.overlay import Table, concat_batches
from cairn.key_groups import key_groups
from cairn.state import Declaration
from cairn.storage.manifest import Held
from cairn.types.codec import Datum, Key, codec
from cairn.types.codec.core import cast_to

CHAINED_AT_ONCE = 100_000
"""Entries that are added to the lists of their keys at once; a lookup adds no more."""
PIECE_ROWS = 32 * 1024
DEAD_MIN = 4096
TEXT_BYTES_MIN = 16 << 20
"""Replaced texts are not looked for before there are this many bytes of text."""

Bools = npt.NDArray[np.bool_]


class ColumnTable(Table):
    """Value or map state in arrays."""

    def __init__(
        self, declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
    ) -> None:
        super().__init__(declaration, key_type, backend, group_count)
        self.is_map = declaration.kind == "map"
        types = [self.keys.arrow]
        if self.is_map:
            types.append(codec(declaration.entry_type).arrow)
        self._types = types
        self._group_count = group_count
        self._group_dtype = np.int16 if group_count <= 1 << 15 else np.int32
        self._lock = threading.Lock()
        self._clear(form_of(self.values.arrow))

    def _clear(self, form: Form) -> None:
        self._form = form
        self._index = NameIndex(self._types)
        self._values = Columns(form)
        self._texts_checked = form.text_bytes
        """Bytes of texts when all of them were last known to be in use, more or less."""
        self._default: tuple[pa.Array, Arrays] | None = None
        """The default that was last asked for, and its arrays."""
        self._groups: Array = np.empty(0, self._group_dtype)
        self._live: Bools = np.empty(0, np.bool_)
        self._committed: Bools = np.empty(0, np.bool_)
        self._touched = Touched()
        self._chains: Chains | None = None
        self._asked: tuple[Sequence[pa.Array], Ints] | None = None
        self._numbers: Array = np.empty(0, np.int32)
        """Room for `number`, by position: made once, because new memory costs more than its use."""
        self._key_count = KeyCount()

    # Reading and writing, by the batch

    def find(self, names: Sequence[pa.Array], likely: Ints | None = None) -> Ints:
        """Return positions, -1 for none; cached for the arrays of the last call.

        `likely` are the positions in another table, which may have got the same names.
        """
        asked = self._asked
        if asked is not None and all(a is b for a, b in zip(asked[0], names, strict=True)):
            return asked[1]
        positions = self._index.find(names, likely)
        self._asked = (names, positions)
        return positions

    def number(self, names: Sequence[pa.Array]) -> tuple[list[int], Ints]:
        """Number the distinct names by their first rows; return the numbers, and these rows."""
        positions = self.find(names)
        count = len(self._index)
        missing = np.flatnonzero(positions < 0)
        if len(missing):
            new, taken = NameIndex(self._types), pa.array(missing)
            positions = positions.copy()
            positions[missing] = count + new.place([array.take(taken) for array in names])[0]
            count += len(new)
        if count > len(self._numbers):
            self._numbers = np.empty(max(count, self._values.size), np.int32)
        numbers = self._numbers
        rows = np.arange(len(positions), dtype=np.int32)
        # Backwards, so that the first row of a name is left.
        numbers[positions[::-1]] = rows[::-1]
        distinct = np.flatnonzero(numbers[positions] == rows)
        numbers[positions[distinct]] = rows[: len(distinct)]
        return numbers[positions].tolist(), distinct

    def select(self, names: Sequence[pa.Array], rows: Ints) -> list[pa.Array]:
        """Return some of the names, whose positions need not be looked up again."""
        positions = self.find(names)[rows]
        taken = pa.array(rows)
        chosen = [array.take(taken) for array in names]
        self._asked = (chosen, positions)
        return chosen

    def read(self, positions: Ints, default: pa.Array | None = None) -> pa.Array:
        """Return the values at positions; null or the default where there is none."""
        if not len(self._index):
            form = zip(self._form.dtypes, self._form.is_validity, strict=True)
            arrays = [None if v else np.zeros(len(positions), dtype) for dtype, v in form]
            is_live = np.zeros(len(positions), np.bool_)
        else:
            arrays = self._values.take(positions)
            is_live = self._live[positions]
            is_live &= positions >= 0
        if not is_live.all():
            if default is None:
                valid = arrays[0]
                arrays[0] = is_live if valid is None else valid & is_live
            else:
                _fill(arrays, ~is_live, self._default_arrays(default))
        return self._form.join(arrays)

    def read_field(self, positions: Ints, name: str) -> pa.Array:
        """Return one field of the structs at positions; null where there is none."""
        assert isinstance(self._form, StructForm), "only structs have fields"
        form, part = self._form.field(name)
        if not len(self._index):
            return pa.nulls(len(positions), form.type)
        arrays = self._values.take(positions, part)
        is_live = self._live[positions] & (positions >= 0)
        if not is_live.all():
            arrays[0] = is_live if arrays[0] is None else arrays[0] & is_live
        return form.join(arrays)

    def write(
        self,
        names: Sequence[pa.Array],
        values: pa.Array,
        is_live: Bools | None,
        *,
        groups: Ints | None = None,
    ) -> None:
        """Set values, delete where not `is_live`. The last one wins if a name is given twice.

        `groups` are the key groups of the names, if they are known.
        """
        with self._lock:
            self._write(names, values, is_live, groups)

    def _write(
        self,
        names: Sequence[pa.Array],
        values: pa.Array,
        is_live: Bools | None,
        groups: Ints | None,
    ) -> None:
        positions = self.find(names)
        missing = positions < 0
        if is_live is not None:
            missing &= is_live
        if missing.any():
            positions = self._place(names, positions, np.flatnonzero(missing), groups)
            if is_live is not None:
                # A name may be set and then deleted in one call.
                positions = self._index.find(names)
            self._asked = (names, positions)
        arrays = self._form.split(values)
        if is_live is not None:
            kept = self._effective(positions, is_live)
            if not kept.all():
                positions, is_live = positions[kept], is_live[kept]
                arrays = [None if array is None else array[kept] for array in arrays]
        if self.journal is not None:
            self._keep(self.journal, positions)
        self._touched.add(positions, self._values, self._committed)
        self._values.put(positions, arrays)
        self._live[positions] = True if is_live is None else is_live

    def _effective(self, positions: Ints, is_live: Bools) -> Bools:
        """Mark the rows that change anything: not those that delete a missing name.

        A name may have a position from an earlier epoch and no value. That must not make a
        difference.
        """
        if not len(self._index):
            return is_live
        kept = (self._live[positions] | self._committed[positions]) & (positions >= 0)
        kept |= is_live
        idle = np.flatnonzero(~kept)
        if len(idle):
            kept[idle] = np.isin(positions[idle], positions[is_live])
        return kept

    def entries_of(self, keys: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
        """Return every entry of these keys: rows of `keys`, entries, values; in that order."""
        with self._lock:
            rows, positions = self._positions_of(keys)
        is_live = self._live[positions]
        rows, positions = rows[is_live], positions[is_live]
        entries = self._index.arrays(positions)[1]
        order = name_order([pa.array(rows), entries])
        rows, positions = rows[order], positions[order]
        taken = entries.take(pa.array(order))
        return pa.array(rows), taken, self.read(positions)

    def _positions_of(self, keys: pa.Array) -> tuple[Ints, Ints]:
        """Return the positions of all entries of these keys: row of `keys`, position."""
        while not self._extend_chains(CHAINED_AT_ONCE):
            pass
        assert self._chains is not None, "just made"
        return self._chains.positions(keys)

    def _extend_chains(self, count_max: int) -> bool:
        if self._chains is None:
            self._chains = Chains(self._types[0])
        return self._chains.extend(self._index, count_max)

    def entries_between(self, low: Datum, high: Datum) -> tuple[pa.Array, pa.Array, pa.Array]:
        """Return entries in (low, high]: keys, entries, values; by entry, then key."""
        live = self._live[: len(self._index)]
        keys, entries, positions = find_between(self._index, live, self._types[1], low, high)
        self._asked = ([keys, entries], positions)
        return keys, entries, self.read(positions)

    def set_in_epoch(self) -> tuple[pa.Array, pa.Array]:
        """Return the keys and values that the current epoch has set, by first touch."""
        touched = self._set_in_epoch()
        return self._index.arrays(touched)[0], self.read(touched)

    def pieces_set_in_epoch(self, rows_max: int) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Yield what `set_in_epoch` returns, in pieces."""
        touched = self._set_in_epoch()
        for start in range(0, len(touched), rows_max):
            piece = touched[start : start + rows_max]
            yield self._index.arrays(piece)[0], self.read(piece)

    def _set_in_epoch(self) -> Ints:
        touched = self._touched.positions()
        return touched[self._live[touched]]

    def entry_above(self, low: int | None) -> int | None:
        """Return the least entry above `low`, for entries that are integers."""
        live = self._live[: len(self._index)]
        return find_above(self._index, live, self._types[1], low)

    def _default_arrays(self, default: pa.Array) -> Arrays:
        if self._default is None or self._default[0] is not default:
            self._default = (default, self._form.split(default))
        return self._default[1]

    def groups_of(self, keys: pa.Array) -> Ints:
        """Return the key group of each key. FunctionError if another subtask owns one."""
        groups: Ints = key_groups(keys, self.keys.arrow, self._group_count)
        self.check_owned(keys, groups)
        return groups

    def _place(
        self, names: Sequence[pa.Array], positions: Ints, missing: Ints, groups: Ints | None
    ) -> Ints:
        """Add names that `find` has not found, and return all positions."""
        if len(missing) < len(positions):
            rows = pa.array(missing)
            names = [array.take(rows) for array in names]
            groups = None if groups is None else groups[missing]
        if groups is None:
            # Before they are added: a name that has a position is not checked again.
            groups = self.groups_of(names[0])
        placed, firsts = self._index.add(names)
        count = len(self._index)
        if len(firsts):
            self._reserve(count)
            self._groups[count - len(firsts) : count] = groups[firsts]
        if len(missing) == len(positions):
            return placed
        positions = positions.copy()
        positions[missing] = placed
        return positions

    def _reserve(self, count: int) -> None:
        self._values.reserve(count)
        size = self._values.size
        if size > len(self._groups):
            self._groups = grow(self._groups, size)
            self._live = grow(self._live, size)
            self._committed = grow(self._committed, size)
            self._touched.reserve(size)

    def _keep(self, journal: Journal, positions: Ints) -> None:
        """Record how to undo a write before it is made. New names keep their positions."""
        held = self._values.take(positions), self._live[positions]
        journal.call(self._undo, positions, *held, self._touched.mark())

    def _undo(self, positions: Ints, values: Arrays, is_live: Bools, mark: Mark) -> None:
        with self._lock:
            self._values.put(positions, values)
            self._live[positions] = is_live
            self._touched.back_to(mark)

    # Lookups, on other threads

    def look_up(self, places: Sequence[tuple[int, Key]], *, finished: bool) -> list[Content] | None:
        keys = self.keys.encode([key for _, key in places])
        found: list[Content] = [None] * len(places)
        with self._lock:
            if not len(self._index):
                return found
            if self.is_map:
                # A writer waits for the lock, but never for all of this.
                if not self._extend_chains(CHAINED_AT_ONCE):
                    return None
                rows, positions = self._positions_of(keys)
            else:
                positions = self._index.find([keys])
                rows = np.arange(len(positions))
            is_held = (self._live if finished else self._committed)[positions] & (positions >= 0)
            rows, positions = rows[is_held], positions[is_held]
            arrays = self._values.take(positions)
            if not finished:
                self._touched.look_back(positions, arrays)
            entries = self._index.arrays(positions)[1] if self.is_map else None
            form = self._form
        values = self.values.decode(form.join(arrays))
        if entries is None:
            for row, value in zip(rows.tolist(), values, strict=True):
                found[row] = value
            return found
        names = codec(self.declaration.entry_type).decode_keys(entries)
        for row, name, value in zip(rows.tolist(), names, values, strict=True):
            if found[row] is None:
                found[row] = {}
            found[row][name] = value
        return found

    # Epochs

    def assign(self, groups: range) -> None:
        if any(group not in groups for group in self.groups):
            self._drop_but(groups)
        self.groups = groups

    def forget(self, groups: range) -> None:
        count = len(self._index)
        held = self._groups[:count]
        self._drop((held >= groups.start) & (held < groups.stop))

    def _drop_but(self, groups: range) -> None:
        held = self._groups[: len(self._index)]
        self._drop((held < groups.start) | (held >= groups.stop))
        self._lay_out()

    def _drop(self, gone: Bools) -> None:
        """Delete these positions. Called between epochs, without pending changes."""
        self.rollback()
        count = len(self._index)
        self._live[:count] &= ~gone
        self._committed[:count] &= ~gone
        self._lay_out_if_sparse()

    def promote(self) -> None:
        touched = self._touched.positions()
        self._committed[touched] = self._live[touched]
        self._end_epoch()
        self._lay_out_if_sparse()

    def rollback(self) -> None:
        touched = self._touched.positions()
        self._touched.put_back(self._values)
        self._live[touched] = self._committed[touched]
        self._end_epoch()

    def _end_epoch(self) -> None:
        self._touched.clear()
        self._asked = None

    def _lay_out_if_sparse(self) -> None:
        count = len(self._index)
        held = int(np.count_nonzero(self._committed[:count]))
        if count - held > max(DEAD_MIN, held) or self._has_old_texts():
            self._lay_out()

    def _has_old_texts(self) -> bool:
        """True if more than half of the texts were replaced; looks when they have doubled."""
        text_bytes = self._form.text_bytes
        if text_bytes < max(TEXT_BYTES_MIN, 2 * self._texts_checked):
            return False
        held = np.flatnonzero(self._committed[: len(self._index)])
        used = self._form.text_bytes_of(self._values.take(held))
        self._texts_checked = text_bytes
        return 2 * used < text_bytes

    def _lay_out(self) -> None:
        """Assign positions again, to names that have a value only."""
        self._move(np.flatnonzero(self._committed[: len(self._index)]))

    def _move(self, held: Ints) -> Ints:
        """Assign positions again, to the names at these positions only; return the new ones."""
        index, groups, is_held = self._index, self._groups[held], self._committed[held]
        form, values = self._form.renew(self._values.take(held))
        self._clear(form)
        placed = [np.empty(0, np.int64)]
        # In pieces, because one array holds no more than 2 GB of text.
        for start in range(0, len(held), MOVED_ROWS):
            piece = slice(start, start + MOVED_ROWS)
            some = [None if array is None else array[piece] for array in values]
            names = index.arrays(held[piece])
            placed.append(self._load(names, some, groups[piece], is_held[piece]))
        return np.concatenate(placed)

    def _load(
        self, names: Sequence[pa.Array], values: Arrays, groups: Array, is_live: Bools
    ) -> Ints:
        """Write committed rows over the present ones, and return their positions."""
        positions, _ = self._index.place(names)
        self._reserve(len(self._index))
        self._groups[positions] = groups
        self._values.put(positions, values)
        self._live[positions] = is_live
        self._committed[positions] = is_live
        self._asked = None
        return positions

    # Stored rows

    def delta(self) -> pa.RecordBatch | None:
        touched = self._touched.positions()
        # A name that the epoch added and deleted again has not changed.
        changed = touched[self._live[touched] | self._committed[touched]]
        if not len(changed):
            return None
        order = np.argsort(self._groups[changed], kind="stable")
        return self._rows_at(changed[order])

    def _rows_at(self, positions: Ints) -> pa.RecordBatch:
        is_live = self._live[positions]
        arrays = self._values.take(positions)
        if not is_live.all():
            arrays[0] = is_live if arrays[0] is None else arrays[0] & is_live
        names, values = self._index.arrays(positions), self._form.join(arrays)
        return make_rows(self._groups[positions], names, values, is_live)

    def freeze(self) -> Iterator[pa.RecordBatch] | None:
        return self._freeze()

    def _freeze(self) -> Iterator[pa.RecordBatch]:
        """Return the present committed rows; later epochs do not change them."""
        count = len(self._index)
        held = np.flatnonzero(self._committed[:count])
        groups = self._groups[:count].copy()
        values = self._values.copy_first(count)
        self._touched.put_back(values)
        return self._pieces(self._index, values, held, groups)

    def _pieces(
        self, index: NameIndex, values: Columns, held: Ints, groups: Array
    ) -> Iterator[pa.RecordBatch]:
        held = held[np.argsort(groups[held], kind="stable")]
        for at in range(0, len(held), PIECE_ROWS):
            piece = held[at : at + PIECE_ROWS]
            yield make_rows(
                groups[piece], index.arrays(piece), values.form.join(values.take(piece))
            )

    def dump(self) -> Iterator[pa.RecordBatch]:
        return self._freeze()

    def apply(self, batch: pa.RecordBatch) -> None:
        is_live = batch["live"].to_numpy(zero_copy_only=False)
        values = self._form.split(cast_to(self.values.arrow, batch["value"]))
        self._load(self._names(batch), values, batch["group"].to_numpy(), is_live)

    def end_applying(self) -> None:
        self._lay_out_if_sparse()

    def _names(self, batch: pa.RecordBatch) -> list[pa.Array]:
        columns = zip(("key", "entry"), self._types, strict=False)
        return [cast_to(type, batch[name]) for name, type in columns]

    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        return merge_names(concat_batches(batches), NameIndex(self._types), self._names)

    def keys_changed(self) -> int:
        touched = self._touched.positions()
        return int(np.count_nonzero(self._live[touched] | self._committed[touched]))

    def count_held(self) -> Held:
        live = self._live[: len(self._index)]
        entries = int(np.count_nonzero(live))
        if not self.is_map:
            return Held(entries, entries)
        written = len(self._touched.positions())
        count_keys = self._index.count_distinct
        return self._key_count.update(entries, written, lambda: count_keys(np.flatnonzero(live)))


def _fill(arrays: Arrays, where: Bools, value: Arrays) -> None:
    for at, one in enumerate(value):
        held = arrays[at]
        if held is not None:
            # A slice, because an item may itself be a sequence.
            held[where] = True if one is None else one[:1]
        elif one is not None:
            arrays[at] = held = np.ones(len(where), np.bool_)
            held[where] = one[0]
