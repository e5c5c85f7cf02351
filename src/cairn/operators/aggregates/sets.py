"""Parts that need every value of a key: count(DISTINCT x), and extremes of rows taken back.

    <column>__seen   per key: a value of the column -> the counts that have seen it
    <name>__values   the same of an expression, for one count
    <name>__counts   a value -> the number of its rows, where rows can be taken back

In windows an entry is the start of a window and a value. The accumulator holds the result, and a
map state the values. Only the values of the rows at hand are looked up. Counts of one column, with
several conditions, share a map: a value is looked up once for all of them.

Always true here:
- a value is in the map if and only if some row of the key (and window) that counts has it, and it
  is not null;
- a map entry is written only if it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from cairn.operators.aggregates.edges import choose_rows
from cairn.operators.aggregates.grouping import first_rows, number_pairs, number_values
from cairn.operators.aggregates.ordering import rank_values
from cairn.operators.aggregates.parts import (
    Array,
    Bools,
    Columns,
    Count,
    Ints,
    Part,
    join_rows,
    plain,
    validity,
)
from cairn.state import Declaration, Map

if TYPE_CHECKING:
    from cairn.backends.handles.batch import ColumnMapHandle

    MapHandle = ColumnMapHandle

GROUPS_SHARE_MAX = 0.75
"""Groups of rows are counted up to this share of the rows: more of them are not worth grouping."""
SAMPLED_MIN = 1024
"""With fewer values in the first column, all groups are counted."""
SAMPLED_ONE_IN = 8


class Bag(NamedTuple):
    """Values of numbered keys, each once per key."""

    at: Ints
    values: pa.Array
    counts: Ints
    """For each part that shares the map, in turn: rows that have the value, less those taken back.
    Where none are taken back, only whether there are any matters."""


class Change(NamedTuple):
    """A bag, and which of its values the keys had before and have now."""

    at: Ints
    values: pa.Array
    before: Bools
    after: Bools


class SetPart(Part):
    """A part whose accumulator follows from the values in a map state."""

    def __init__(self, type_: pa.DataType) -> None:
        self.type = type_
        """Type of the values."""

    @property
    def partial_types(self) -> tuple[pa.DataType, ...]:
        return (self.type,)

    def read(self, arrays: list[pa.Array]) -> Columns:
        # The values go through the map.
        return self.zeros(len(arrays[0]))

    def update(self, held: Columns, change: Change, find_all: Callable[[Ints], Bag]) -> None:
        """Bring accumulators up to date; `find_all` returns the present values of some keys."""
        raise NotImplementedError


class DistinctCount(SetPart, Count):
    """Number of values."""

    def update(self, held: Columns, change: Change, find_all: Callable[[Ints], Bag]) -> None:
        rows = np.flatnonzero(change.before != change.after)
        np.add.at(held[0], change.at[rows], np.where(change.after[rows], 1, -1))


class HeldExtreme(SetPart):
    """Minimum or maximum of values that can be taken back."""

    def __init__(self, type_: pa.DataType, *, is_max: bool) -> None:
        super().__init__(type_)
        self.is_max = is_max
        self.names = ("max" if is_max else "min",)

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (self.type,)

    def zeros(self, count: int) -> Columns:
        return [pa.nulls(count, self.type)]

    def load(self, arrays: list[pa.Array]) -> Columns:
        return [arrays[0].cast(self.type)]

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        self._raise_to(into, at, columns[0])

    def store(self, columns: Columns) -> list[pa.Array]:
        return columns

    def update(self, held: Columns, change: Change, find_all: Callable[[Ints], Bag]) -> None:
        lost = np.flatnonzero(change.before & ~change.after)
        stale = np.zeros(len(held[0]), np.bool_)
        if len(lost):
            at = change.at[lost]
            both = join_rows(held[0].take(pa.array(at)), change.values.take(pa.array(lost)))
            ranks = rank_values(both)
            stale[at[ranks[: len(lost)] == ranks[len(lost) :]]] = True
        if stale.any():
            held[0] = held[0].take(pa.array(np.arange(len(stale)), mask=stale))
            rest = find_all(np.flatnonzero(stale))
            self._raise_to(held, rest.at, rest.values)
        fresh = np.flatnonzero(change.after)
        self._raise_to(held, change.at[fresh], change.values.take(pa.array(fresh)))

    def _raise_to(self, held: Columns, at: Ints, values: pa.Array) -> None:
        count = len(held[0])
        both = join_rows(held[0], values)
        numbers = np.concatenate([np.arange(count), at])
        rows = np.flatnonzero(both.is_valid().to_numpy(zero_copy_only=False))
        chosen = choose_rows(numbers, rows, rank_values(both), both, count, is_last=self.is_max)
        held[0] = both.take(pa.array(chosen, mask=chosen < 0))


class _Kept(NamedTuple):
    """A map state, and the parts that read the column of the partials whose values it keeps."""

    name: str
    column: str
    parts: list[tuple[int, SetPart, str, str | None]]
    """The place of each part, the part, its name, and the column of the condition for it."""

    @property
    def type(self) -> pa.DataType:
        return self.parts[0][1].type


class ValueSets:
    """The map states of an aggregation."""

    def __init__(
        self,
        parts: Sequence[tuple[str, Part]],
        columns: Sequence[tuple[str, str | None]],
        *,
        sources: Mapping[str, str],
        weight: str | None,
        in_windows: bool,
    ) -> None:
        """`parts` with the names of their aggregates, `columns` those of the partial stream.

        With each column comes that of the condition for it, None if all rows count. `sources` has
        the stream's columns that columns of partials are equal to. `weight` is the column with the
        number of rows that a partial adds; None: rows are never taken back.
        """
        rest = iter(columns)
        self._weight = weight
        self._in_windows = in_windows
        found: dict[str, _Kept] = {}
        for index, (name, part) in enumerate(parts):
            (column, condition), *_ = [next(rest) for _ in part.names]
            if isinstance(part, SetPart):
                if weight is not None:
                    state = f"{name}__counts"
                else:
                    source = sources.get(column)
                    state = f"{name}__values" if source is None else f"{source}__seen"
                kept = found.setdefault(state, _Kept(state, column, []))
                kept.parts.append((index, part, name, condition))
        self._kept = list(found.values())
        self._handles: dict[str, MapHandle] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def declare_state(self) -> dict[str, Declaration]:
        states: dict[str, Declaration] = {}
        for kept in self._kept:
            entry = kept.type
            if self._in_windows:
                entry = pa.struct([pa.field("start", pa.int64()), pa.field("value", kept.type)])
            value = pa.int64() if self._weight is not None else pa.struct(_flags(kept))
            states[kept.name] = Map(entry, value)
            states[kept.name].name = kept.name
        return states

    def bind(self, function: object) -> None:
        """Find the states of the function that runs."""
        self._handles = {kept.name: getattr(function, kept.name) for kept in self._kept}

    def collect(self, batch: pa.RecordBatch, at: Ints, count: int) -> tuple[list[Bag], int]:
        """Return the values of partials, row i for key at[i].

        And about the number of distinct (key, value, value, ...): those that Spark would group to,
        or fewer, if grouping leaves most of the rows anyway.
        """
        weights = None if self._weight is None else plain(batch[self._weight])
        bags = []
        pairs: dict[str, tuple[Ints, int]] = {}
        grouped: list[tuple[Array, int]] = []
        rows: dict[str | None, Ints | None] = {None: None}
        for kept in self._kept:
            values = batch[kept.column]
            if kept.column not in pairs:
                found = number_values(values)
                pairs[kept.column] = number_pairs(at, count, *found)
                grouped.append(found if grouped else pairs[kept.column])
            conditions = [condition for *_, condition in kept.parts]
            for name in conditions:
                if name is not None and name not in rows:
                    rows[name] = np.flatnonzero(batch[name].to_numpy(zero_copy_only=False))
            taken = [rows[name] for name in conditions]
            bags.append(_make_bag(at, values, weights, *pairs[kept.column], taken))
        grouped += [(plain(batch[name]), 2) for name in rows if name is not None]
        return bags, _count_groups(grouped) if grouped else count

    def add(
        self, bags: Sequence[Bag], keys: pa.Array, starts: Ints | None, held: list[Columns]
    ) -> None:
        """Add bags of numbered keys (of windows that start then) to state and accumulators."""
        groups: Ints | None = None
        for kept, bag in zip(self._kept, bags, strict=True):
            if len(bag.at):
                if groups is None:
                    # A key has many values, and there are several maps: it is hashed once.
                    groups = self._handles[kept.name].groups_of(keys)
                before, after = self._write(kept, bag, keys, groups, starts)
                find_all = _Finder(self, kept, keys, starts).find
                for (index, part, *_), was, is_ in zip(kept.parts, before, after, strict=True):
                    part.update(held[index], Change(bag.at, bag.values, was, is_), find_all)

    def _write(
        self, kept: _Kept, bag: Bag, keys: pa.Array, groups: Ints, starts: Ints | None
    ) -> tuple[Sequence[Bools], Sequence[Bools]]:
        """Write a bag; return, for each part, which values it had before and has now."""
        handle = self._handles[kept.name]
        names = keys.take(pa.array(bag.at))
        entries = bag.values
        if starts is not None:
            entries = _window_entries(starts[bag.at], bag.values)
        before = self._counts(handle.get_many(names, entries))
        after = before + bag.counts if self._weight is not None else before | (bag.counts > 0)
        changed = (after != before).any(axis=0)
        if changed.any():
            groups, now = groups[bag.at], after
            if not changed.all():
                rows = np.flatnonzero(changed)
                taken = pa.array(rows)
                names, entries, groups = names.take(taken), entries.take(taken), groups[rows]
                now = after[:, rows]
            if self._weight is not None:
                values = pa.array(now[0], mask=now[0] == 0)
            else:
                values = pa.StructArray.from_arrays([pa.array(f) for f in now], fields=_flags(kept))
            handle.put_many(names, entries, values, groups)
        return list(before > 0), list(after > 0)

    def _counts(self, values: pa.Array) -> Ints:
        """Return the values of a map: for each part, in turn, the rows that have the entry."""
        if self._weight is not None:
            return plain(values)[np.newaxis]
        return np.stack([plain(flags.fill_null(False)) for flags in values.flatten()])

    def find_all(
        self, kept: _Kept, keys: pa.Array, starts: Ints | None, numbers: Ints
    ) -> tuple[Bag, pa.Array, pa.Array]:
        """Return the values of these keys and windows, and their names in state."""
        keys = keys.take(pa.array(numbers))
        handle = self._handles[kept.name]
        if starts is None:
            rows, entries, values = handle.of_keys(keys)
            at = plain(rows)
            return Bag(numbers[at], entries, self._counts(values)), keys.take(rows), entries
        # A key may have several of the windows, and others.
        key_at, key_count = number_values(keys)
        keys = keys.take(pa.array(first_rows(key_at, key_count)))
        rows, entries, values = handle.of_keys(keys)
        held_at, held_starts = plain(rows), plain(entries.field("start"))
        both_starts = number_values(pa.array(np.concatenate([starts[numbers], held_starts])))
        pairs, _ = number_pairs(np.concatenate([key_at, held_at]), key_count, *both_starts)
        wanted, found = pairs[: len(numbers)], pairs[len(numbers) :]
        place = np.full(int(pairs.max(initial=-1)) + 1, -1, np.int64)
        place[wanted] = numbers
        within = np.flatnonzero(place[found] >= 0)
        taken = pa.array(within)
        entries = entries.take(taken)
        counts = self._counts(values.take(taken))
        bag = Bag(place[found[within]], entries.field("value"), counts)
        return bag, keys.take(rows.take(taken)), entries

    def remove(self, keys: pa.Array, starts: Ints) -> list[Bag]:
        """Remove the values of windows, and return them by the window's row."""
        bags = []
        for kept in self._kept:
            handle = self._handles[kept.name]
            if not len(starts):
                none = np.zeros(0, np.int64)
                nothing = np.zeros((len(kept.parts), 0), np.int64)
                bags.append(Bag(none, pa.nulls(0, kept.type), nothing))
                continue
            bag, names, entries = self.find_all(kept, keys, starts, np.arange(len(starts)))
            value = pa.int64() if self._weight is not None else pa.struct(_flags(kept))
            handle.put_many(names, entries, pa.nulls(len(entries), value))
            bags.append(bag)
        return bags

    def forget(self, held: list[Columns], rows: Ints) -> None:
        """Clear accumulators whose values come again, as those of a bag."""
        for index, part, *_ in (each for kept in self._kept for each in kept.parts):
            is_left = np.ones(len(held[index][0]), np.bool_)
            is_left[rows] = False
            zero = part.concat(held[index], part.zeros(1))
            held[index] = part.take(zero, np.where(is_left, np.arange(len(is_left)), len(is_left)))


class _Finder:
    """Finds all values of some of the keys at hand."""

    def __init__(self, sets: ValueSets, kept: _Kept, keys: pa.Array, starts: Ints | None) -> None:
        self._sets, self._kept, self._keys, self._starts = sets, kept, keys, starts

    def find(self, numbers: Ints) -> Bag:
        bag, _, _ = self._sets.find_all(self._kept, self._keys, self._starts, numbers)
        held = np.flatnonzero((bag.counts > 0).any(axis=0))
        return Bag(bag.at[held], bag.values.take(pa.array(held)), bag.counts[:, held])


def renumber(bags: Sequence[Bag], rows: Sequence[Ints] | None, at: Sequence[Ints]) -> list[Bag]:
    """Return bags with other numbers: those of `rows` (None: all), under the numbers `at`."""
    found = []
    for place, bag in enumerate(bags):
        values, counts = bag.values, bag.counts
        if rows is not None:
            values, counts = values.take(pa.array(rows[place])), counts[:, rows[place]]
        # Some numbers may have no values: they are numbered again, without gaps.
        dense = number_values(pa.array(at[place]))
        pairs, pair_count = number_pairs(*dense, *number_values(values))
        first = first_rows(pairs, pair_count)
        sums = np.zeros((len(counts), pair_count), np.int64)
        for sum_, each in zip(sums, counts, strict=True):
            np.add.at(sum_, pairs, each)
        found.append(Bag(at[place][first], values.take(pa.array(first)), sums))
    return found


def spread_bags(bags: Sequence[Bag], pane_at: Ints, at: Ints) -> list[Bag]:
    """Return the values of panes as those of their windows: pane_at[i] is in window at[i]."""
    if not bags:
        return []
    pane_count = int(max(pane_at.max(initial=-1), *(b.at.max(initial=-1) for b in bags))) + 1
    sizes = np.bincount(pane_at, minlength=pane_count)
    # Windows come in the order of their panes.
    first = np.cumsum(sizes) - sizes
    rows, numbers = [], []
    for bag in bags:
        repeats = sizes[bag.at]
        within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        rows.append(np.repeat(np.arange(len(bag.at)), repeats))
        numbers.append(at[np.repeat(first[bag.at], repeats) + within])
    return renumber(bags, rows, numbers)


def join_bags(first: Sequence[Bag], second: Sequence[Bag]) -> list[Bag]:
    """Return the values of both; one that is in both is there twice."""
    return [
        Bag(
            np.concatenate([a.at, b.at]),
            join_rows(a.values, b.values),
            np.concatenate([a.counts, b.counts], axis=1),
        )
        for a, b in zip(first, second, strict=True)
    ]


def _make_bag(
    at: Ints,
    values: pa.Array,
    weights: Ints | None,
    pairs: Ints,
    pair_count: int,
    taken: Sequence[Ints | None],
) -> Bag:
    """Return the values of rows; `pairs` numbers key and value of each row.

    `taken` has the rows that count for each part; None: all. `weights` are the rows that each
    stands for; None: they do not matter.
    """
    first = first_rows(pairs, pair_count)
    counts: Array = np.zeros((len(taken), pair_count), np.bool_ if weights is None else np.int64)
    is_in = np.zeros(pair_count, np.bool_)
    for each, rows in zip(counts, taken, strict=True):
        mine = pairs if rows is None else pairs[rows]
        is_in[mine] = True
        if weights is None:
            each[mine] = True
        else:
            np.add.at(each, mine, weights if rows is None else weights[rows])
    if values.null_count:
        is_in &= validity(values)[first]
    if not is_in.all():
        first, counts = first[is_in], counts[:, is_in]
    return Bag(at[first], values.take(pa.array(first)), counts)


def _count_groups(columns: Sequence[tuple[Array, int]]) -> int:
    """Return how many different rows there are; fewer, if they are most of the rows.

    `columns` are numbered values and the count of each. If the first column has many, the rows of
    one in SAMPLED_ONE_IN of them are counted.
    """
    (numbers, count), *others = columns
    scale = 1
    if count >= SAMPLED_MIN:
        scale = SAMPLED_ONE_IN
        rows = np.flatnonzero(numbers % scale == 0)
        numbers, count = numbers[rows] // scale, -(-count // scale)
        others = [(column[rows], column_count) for column, column_count in others]
    for column, column_count in others:
        if count >= GROUPS_SHARE_MAX * len(numbers):
            break
        numbers, count = number_pairs(numbers, count, column, column_count)
    return count * scale


def _window_entries(starts: Ints, values: pa.Array) -> pa.Array:
    fields = [pa.field("start", pa.int64()), pa.field("value", values.type)]
    return pa.StructArray.from_arrays([pa.array(starts), values], fields=fields)


def _flags(kept: _Kept) -> list[pa.Field]:
    """Return a field per count that shares a map: true if it has seen the value."""
    return [pa.field(name, pa.bool_()) for _, _, name, _ in kept.parts]
