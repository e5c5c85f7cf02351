"""State in typed arrays, for functions that work by the batch.

Every name (a key, or a key and an entry of its map) has a position, and values lie in arrays by
position: of a struct one array per field. The running epoch writes to them at once. When it
first touches a position, what lay there is put aside, in bulk; rollback puts it back.

A position stays with its name when the state is cleared, until so many are dead that everything
is laid out anew, between epochs.

Always true here:
- `committed` says which positions the parent epoch holds; their values are in the arrays, or put
  aside if the epoch has touched them;
- what is read or stored is ordered by input or by name, never by position: positions depend
  on history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.base import Backend
from cairn.backends.key_index import Ints, NameIndex
from cairn.backends.overlay import Table, in_order
from cairn.backends.spread import Array, Arrays, Form, form_of, is_fixed
from cairn.codec import codec
from cairn.plan.keygroups import key_groups
from cairn.state import Declaration

PIECE_ROWS = 32 * 1024
DEAD_MIN = 4096
_UNTOUCHED = -1

Bools = npt.NDArray[np.bool_]


class Columns:
    """Values of one type by position, in arrays that grow."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.size = 0
        self._arrays: Arrays = [
            None if is_validity else np.empty(0, dtype)
            for dtype, is_validity in zip(form.dtypes, form.is_validity, strict=True)
        ]

    def reserve(self, size: int) -> None:
        if size > self.size:
            self.size = max(1024, size, self.size * 3 // 2)
            self._arrays = [grown(array, self.size) for array in self._arrays]

    def take(self, positions: Ints) -> Arrays:
        return [None if array is None else array[positions] for array in self._arrays]

    def put(self, positions: Ints, arrays: Arrays) -> None:
        """Of a position that is given twice the last values count."""
        for at, values in enumerate(arrays):
            held = self._arrays[at]
            if values is None:
                if held is not None:
                    held[positions] = True
                continue
            if held is None:
                if values.all():
                    continue
                held = self._arrays[at] = np.ones(self.size, np.bool_)
            held[positions] = values

    def frozen(self, count: int) -> Columns:
        """A copy of the first so many."""
        copy = Columns(self.form)
        copy.size = count
        copy._arrays = [None if array is None else array[:count].copy() for array in self._arrays]
        return copy


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
        self._form = form_of(self.values.arrow)
        self._clear()

    def _clear(self) -> None:
        self._index = NameIndex(self._types)
        self._values = Columns(self._form)
        self._groups: Array = np.empty(0, self._group_dtype)
        self._live: Bools = np.empty(0, np.bool_)
        self._committed: Bools = np.empty(0, np.bool_)
        self._touched_at = np.empty(0, np.int32)
        """When in this epoch a position was first touched, as a number."""
        self._touched: list[Ints] = []
        self._touched_count = 0
        self._aside: list[tuple[Ints, Arrays]] = []
        self._chains: Chains | None = None
        self._asked: tuple[Sequence[pa.Array], Ints] | None = None

    # Reading and writing, by the batch

    def find(self, names: Sequence[pa.Array]) -> Ints:
        """Positions, -1 for none. Asked again for the same arrays, it is remembered."""
        asked = self._asked
        if asked is not None and all(a is b for a, b in zip(asked[0], names, strict=True)):
            return asked[1]
        positions = self._index.find(names)
        self._asked = (names, positions)
        return positions

    def read(self, positions: Ints, default: Arrays | None = None) -> pa.Array:
        """Values; null, or the default, where there is none."""
        if not len(self._index):
            arrays = [None if v else np.zeros(len(positions), d) for d, v in self._shape()]
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
                _fill(arrays, ~is_live, default)
        return self._form.join(arrays)

    def write(self, names: Sequence[pa.Array], values: pa.Array, is_live: Bools | None) -> None:
        """Set values; where `is_live` says no, delete. Of a name given twice the last counts."""
        positions = self.find(names)
        missing = positions < 0
        if is_live is not None:
            missing &= is_live
        if missing.any():
            positions = self._placed(names, positions, np.flatnonzero(missing))
            if is_live is not None:
                # A name may be set and then deleted in one call.
                positions = self._index.find(names)
            self._asked = (names, positions)
        arrays = self._form.split(values)
        if is_live is not None and (positions < 0).any():
            known = np.flatnonzero(positions >= 0)
            positions, is_live = positions[known], is_live[known]
            arrays = [None if array is None else array[known] for array in arrays]
        self._touch(positions)
        self._values.put(positions, arrays)
        self._live[positions] = True if is_live is None else is_live

    def entries_of(self, keys: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
        """Every entry of these keys: rows of `keys`, entries, values; in that order."""
        if self._chains is None:
            self._chains = Chains(self._types[0])
        self._chains.extend(self._index)
        rows, positions = self._chains.positions(keys)
        is_live = self._live[positions]
        rows, positions = rows[is_live], positions[is_live]
        entries = self._index.arrays(positions)[1]
        order = name_order([pa.array(rows), entries])
        rows, positions = rows[order], positions[order]
        taken = entries.take(pa.array(order))
        return pa.array(rows), taken, self.read(positions)

    def entries_between(self, low: Any, high: Any) -> tuple[pa.Array, pa.Array, pa.Array]:
        """Every entry above `low` and up to `high`: keys, entries, values; by entry, then key."""
        positions = np.flatnonzero(self._live[: len(self._index)])
        entry_type = self._types[1]
        if is_fixed(entry_type) and _is_ordered_as_integers(entry_type):
            ints, bit = self._index.column(1)
            ints = ints[positions]
            within = np.ones(len(positions), np.bool_)
            for bound, compare in ((low, np.greater), (high, np.less_equal)):
                if bound is not None:
                    within &= compare(ints, _as_integer(bound, entry_type))
            nulls = self._index.nulls()
            if nulls is not None:
                within &= (nulls[positions] >> bit) & 1 == 0
            positions = positions[within]
            keys, entries = self._index.arrays(positions)
        else:
            keys, entries = self._index.arrays(positions)
            inside = entries.is_valid()
            if low is not None:
                inside = pc.and_(inside, pc.greater(entries, pa.scalar(low, entry_type)))
            if high is not None:
                inside = pc.and_(inside, pc.less_equal(entries, pa.scalar(high, entry_type)))
            inside = inside.fill_null(False)
            keys, entries = keys.filter(inside), entries.filter(inside)
            positions = positions[inside.to_numpy(zero_copy_only=False)]
        order = name_order([entries, keys])
        at, positions = pa.array(order), positions[order]
        keys, entries = keys.take(at), entries.take(at)
        self._asked = ([keys, entries], positions)
        return keys, entries, self.read(positions)

    def set_in_epoch(self) -> tuple[pa.Array, pa.Array]:
        """Keys and values that the epoch at hand has set, in the order it first came to them."""
        touched = self._all_touched()
        touched = touched[self._live[touched]]
        return self._index.arrays(touched)[0], self.read(touched)

    def entry_above(self, low: Any) -> int | None:
        """The least entry above `low`, for entries that are integers."""
        assert is_fixed(self._types[1]) and _is_ordered_as_integers(self._types[1])
        ints, _ = self._index.column(1)
        ints = ints[: len(self._index)][self._live[: len(self._index)]]
        if low is not None:
            ints = ints[ints > low]
        return int(ints.min()) if len(ints) else None

    def defaults(self, value: Any) -> Arrays:
        """A declared default, to be given to `read`."""
        return self._form.split(self.values.encode([self.values.normalise(value)]))

    def _shape(self) -> Iterator[tuple[np.dtype[Any], bool]]:
        return zip(self._form.dtypes, self._form.is_validity, strict=True)

    def _placed(self, names: Sequence[pa.Array], positions: Ints, missing: Ints) -> Ints:
        """Positions for names that have just not been found."""
        if len(missing) < len(positions):
            rows = pa.array(missing)
            names = [array.take(rows) for array in names]
        placed, firsts = self._index.add(names)
        count = len(self._index)
        if len(firsts):
            self._reserve(count)
            fresh = names[0].take(pa.array(firsts))
            new = slice(count - len(firsts), count)
            self._groups[new] = key_groups(fresh, self.keys.arrow, self._group_count)
        if len(missing) == len(positions):
            return placed
        positions = positions.copy()
        positions[missing] = placed
        return positions

    def _reserve(self, count: int) -> None:
        self._values.reserve(count)
        size = self._values.size
        if size > len(self._groups):
            self._groups = grown(self._groups, size)
            self._live = grown(self._live, size)
            self._committed = grown(self._committed, size)
            touched = grown(self._touched_at, size)
            touched[len(self._touched_at) :] = _UNTOUCHED
            self._touched_at = touched

    def _touch(self, positions: Ints) -> None:
        """Put aside what lies there, the first time in an epoch."""
        first = positions[self._touched_at[positions] < 0]
        if not len(first):
            return
        # Backwards, so that of a name given twice the first touch stays.
        numbers = np.arange(self._touched_count, self._touched_count + len(first), dtype=np.int32)
        self._touched_at[first[::-1]] = numbers[::-1]
        first = first[self._touched_at[first] == numbers]
        self._touched.append(first)
        self._touched_count += len(numbers)
        before = first[self._committed[first]]
        if len(before):
            self._aside.append((before, self._values.take(before)))

    def _all_touched(self) -> Ints:
        """In the order in which the epoch came to them: a function of its input."""
        if not self._touched:
            return np.empty(0, np.int64)
        if len(self._touched) > 1:
            self._touched = [np.concatenate(self._touched)]
        return self._touched[0]

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

    def _drop(self, gone: Bools) -> None:
        """Hold nothing at these positions. Between epochs: nothing is pending."""
        self.rollback()
        count = len(self._index)
        self._live[:count] &= ~gone
        self._committed[:count] &= ~gone
        self._lay_out_if_sparse()

    def promote(self) -> None:
        touched = self._all_touched()
        self._committed[touched] = self._live[touched]
        self._end_epoch(touched)
        self._lay_out_if_sparse()

    def rollback(self) -> None:
        touched = self._all_touched()
        for positions, values in self._aside:
            self._values.put(positions, values)
        self._live[touched] = self._committed[touched]
        self._end_epoch(touched)

    def _end_epoch(self, touched: Ints) -> None:
        self._touched_at[touched] = _UNTOUCHED
        self._touched, self._touched_count, self._aside = [], 0, []
        self._asked = None

    def _lay_out_if_sparse(self) -> None:
        count = len(self._index)
        held = np.flatnonzero(self._committed[:count])
        if count - len(held) > max(DEAD_MIN, len(held)):
            names, values = self._index.arrays(held), self._values.take(held)
            groups = self._groups[held]
            self._clear()
            self._load(names, values, groups, np.ones(len(held), np.bool_))

    def _load(
        self, names: Sequence[pa.Array], values: Arrays, groups: Array, is_live: Bools
    ) -> None:
        """Committed rows, upon what is there."""
        positions, _ = self._index.place(names)
        self._reserve(len(self._index))
        self._groups[positions] = groups
        self._values.put(positions, values)
        self._live[positions] = is_live
        self._committed[positions] = is_live
        self._asked = None

    # Stored rows

    def delta(self) -> pa.RecordBatch | None:
        touched = self._all_touched()
        # What came and went within the epoch is no change.
        changed = touched[self._live[touched] | self._committed[touched]]
        if not len(changed):
            return None
        order = np.argsort(self._groups[changed], kind="stable")
        return self._stored(self._index, self._values, changed[order])

    def _stored(
        self, index: NameIndex, values: Columns, positions: Ints, is_live: Bools | None = None
    ) -> pa.RecordBatch:
        if is_live is None:
            is_live = self._live[positions]
        arrays = values.take(positions)
        if not is_live.all():
            arrays[0] = is_live if arrays[0] is None else arrays[0] & is_live
        names = dict(zip(("key", "entry"), index.arrays(positions), strict=False))
        columns = {
            "group": pa.array(self._groups[positions].astype(np.int32)),
            **names,
            "value": self._form.join(arrays),
            "live": pa.array(is_live),
        }
        return pa.RecordBatch.from_pydict(columns)

    def freeze(self) -> Iterator[pa.RecordBatch]:
        """The committed rows as of now, to be written while later epochs come and go."""
        count = len(self._index)
        held = np.flatnonzero(self._committed[:count])
        groups = self._groups[:count].copy()
        values = self._values.frozen(count)
        for positions, aside in self._aside:
            values.put(positions, aside)
        return self._pieces(self._index, values, held, groups)

    def _pieces(
        self, index: NameIndex, values: Columns, held: Ints, groups: Array
    ) -> Iterator[pa.RecordBatch]:
        held = held[np.argsort(groups[held], kind="stable")]
        for at in range(0, len(held), PIECE_ROWS):
            piece = held[at : at + PIECE_ROWS]
            names = dict(zip(("key", "entry"), index.arrays(piece), strict=False))
            yield pa.RecordBatch.from_pydict(
                {
                    "group": pa.array(groups[piece].astype(np.int32)),
                    **names,
                    "value": self._form.join(values.take(piece)),
                    "live": pa.array(np.ones(len(piece), np.bool_)),
                }
            )

    def dump(self) -> Iterator[pa.RecordBatch]:
        return self.freeze()

    def apply(self, batch: pa.RecordBatch) -> None:
        is_live = batch["live"].to_numpy(zero_copy_only=False)
        values = self._form.split(_cast(batch["value"], self.values.arrow))
        self._load(self._names(batch), values, batch["group"].to_numpy(), is_live)

    def _names(self, batch: pa.RecordBatch) -> list[pa.Array]:
        columns = zip(("key", "entry"), self._types, strict=False)
        return [_cast(batch[name], type) for name, type in columns]

    def merge(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        whole = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
        index = NameIndex(self._types)
        positions, _ = index.place(self._names(whole))
        last = np.empty(len(index), np.int64)
        last[positions] = np.arange(len(positions))
        order = np.argsort(whole["group"].to_numpy()[last], kind="stable")
        return whole.take(pa.array(last[order]))

    def keys_changed(self) -> int:
        touched = self._all_touched()
        return int(np.count_nonzero(self._live[touched] | self._committed[touched]))

    def keys_held(self) -> int:
        return int(np.count_nonzero(self._live[: len(self._index)]))


class Chains:
    """Which positions belong to a key: a linked list of them per key, in arrays."""

    def __init__(self, key_type: pa.DataType) -> None:
        self._keys = NameIndex([key_type])
        self._heads = np.empty(0, np.int64)
        self._next = np.empty(0, np.int64)
        self._count = 0

    def extend(self, index: NameIndex) -> None:
        """Take in the positions that have come since."""
        new = np.arange(self._count, len(index))
        if not len(new):
            return
        owners, _ = self._keys.place([index.arrays(new)[0]])
        if len(self._keys) > len(self._heads):
            size = len(self._heads)
            self._heads = grown(self._heads, max(len(self._keys), size * 3 // 2))
            self._heads[size:] = -1
        if len(index) > len(self._next):
            self._next = grown(self._next, max(len(index), len(self._next) * 3 // 2))
        # Those of one key side by side: each points at the one before, the first at the old head.
        order = np.argsort(owners, kind="stable")
        owners, new = owners[order], new[order]
        is_first = np.ones(len(new), np.bool_)
        is_first[1:] = owners[1:] != owners[:-1]
        before = np.empty(len(new), np.int64)
        before[1:] = new[:-1]
        before[is_first] = self._heads[owners[is_first]]
        self._next[new] = before
        self._heads[owners] = new
        self._count = len(index)

    def positions(self, keys: pa.Array) -> tuple[Ints, Ints]:
        """(row of `keys`, position) of every name of these keys."""
        owners = self._keys.find([keys])
        rows = np.flatnonzero(owners >= 0)
        at = self._heads[owners[rows]]
        found_rows, found = [rows], [at]
        while len(at):
            at = self._next[at]
            more = np.flatnonzero(at >= 0)
            rows, at = rows[more], at[more]
            found_rows.append(rows)
            found.append(at)
        return np.concatenate(found_rows), np.concatenate(found)


def grown(array: Any, size: int) -> Any:
    """A longer copy; what is new is zero, False or None."""
    if array is None:
        return None
    longer = np.empty(size, object) if array.dtype == object else np.zeros(size, array.dtype)
    longer[: len(array)] = array
    return longer


def _cast(array: pa.Array, type: pa.DataType) -> pa.Array:
    # Files that others wrote may hold the same values in another Arrow type.
    return array if array.type == type else array.cast(type)


def name_order(columns: Sequence[pa.Array]) -> Ints:
    """The order by these columns, as `in_order` has it: null first, NaN last, at any depth."""
    flat: list[pa.Array] = []
    for column in columns:
        flat += _flat(column)
    if any(pa.types.is_nested(column.type) for column in flat):
        rows = list(zip(*(codec(column.type).decode_keys(column) for column in flat), strict=True))
        places: dict[Any, list[int]] = {}
        for at, row in enumerate(rows):
            places.setdefault(row, []).append(at)
        ordered = [at for row in in_order(places) for at in places[row]]
        return np.asarray(ordered, np.int64)
    if all(is_fixed(column.type) and _is_ordered_as_integers(column.type) for column in flat):
        if not any(column.null_count for column in flat):
            return _integer_order([form_of(column.type).split(column)[1] for column in flat])
    table = pa.table(flat, names=[str(at) for at in range(len(flat))])
    keys = [(name, "ascending") for name in table.column_names]
    order: Ints = pc.sort_indices(table, sort_keys=keys).to_numpy()
    return order.astype(np.int64)


def _integer_order(columns: Sequence[Array | None]) -> Ints:
    """Like Arrow's, several times faster."""
    order: Ints | None = None
    for column in reversed(columns):
        assert column is not None
        if order is None:
            order = np.argsort(column, kind="stable")
        elif (column != column[:1]).any():
            order = order[np.argsort(column[order], kind="stable")]
    assert order is not None
    return order


def _flat(column: pa.Array) -> list[pa.Array]:
    # Arrow has nulls and NaN last; this brings the nulls to the front.
    before = [column.is_valid()] if column.null_count else []
    if not pa.types.is_struct(column.type):
        return [*before, column]
    return before + [leaf for field in column.flatten() for leaf in _flat(field)]


def _fill(arrays: Arrays, where: Bools, value: Arrays) -> None:
    for at, one in enumerate(value):
        held = arrays[at]
        if held is not None:
            held[where] = True if one is None else one[0]
        elif one is not None:
            arrays[at] = held = np.ones(len(where), np.bool_)
            held[where] = one[0]


def _is_ordered_as_integers(type: pa.DataType) -> bool:
    return not pa.types.is_floating(type) and not pa.types.is_decimal(type)


def _as_integer(bound: Any, type: pa.DataType) -> int:
    """A bound as the index holds entries. A plain number is taken for what is stored."""
    if isinstance(bound, int):
        return bound
    _, numbers = form_of(type).split(pa.array([bound], type))
    assert numbers is not None
    return int(numbers[0])
