"""Parts that need every value of a key: count(DISTINCT x), and extremes of rows taken back.

    <name>__values   per key: a value -> 1 (in windows: the start of a window and a value)
    <name>__counts   the same, with the number of its rows, if rows can be taken back

The accumulator holds the result, and a map state the values. Only the values of the rows at hand
are looked up.

Always true here:
- a value is in the map if and only if some row of the key (and window) has it, and it is not null;
- a map entry is written only if it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from cairn.operators.aggregates.edges import choose_rows
from cairn.operators.aggregates.grouping import first_rows, number_pairs, number_values
from cairn.operators.aggregates.ordering import rank_values
from cairn.operators.aggregates.parts import (
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


class Bag(NamedTuple):
    """Values of numbered keys, each once per key."""

    at: Ints
    values: pa.Array
    counts: Ints
    """Rows that have the value, less those taken back."""


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
        np.add.at(held[0], change.at, change.after.astype(np.int64) - change.before)


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


class ValueSets:
    """The map states of an aggregation."""

    def __init__(
        self,
        parts: Sequence[tuple[str, Part]],
        columns: Sequence[tuple[str, str | None]],
        *,
        weight: str | None,
        in_windows: bool,
    ) -> None:
        """`parts` with the names of their aggregates, `columns` those of the partial stream.

        With each column comes that of the condition for it, None if all rows count.
        `weight` is the column with the number of rows that a partial adds; None: rows are
        never taken back.
        """
        suffix = "values" if weight is None else "counts"
        rest = iter(columns)
        self._weight = weight
        self._in_windows = in_windows
        self._sets: list[tuple[int, SetPart, str]] = []
        """Place of the part, the part, and its state."""
        self._columns: list[tuple[str, str | None]] = []
        """For each of them, its column and the condition for it."""
        for index, (name, part) in enumerate(parts):
            column, *_ = [next(rest) for _ in part.names]
            if isinstance(part, SetPart):
                self._sets.append((index, part, f"{name}__{suffix}"))
                self._columns.append(column)
        self._handles: dict[str, MapHandle] = {}

    def __bool__(self) -> bool:
        return bool(self._sets)

    def declare_state(self) -> dict[str, Declaration]:
        states: dict[str, Declaration] = {}
        for _, part, name in self._sets:
            entry = part.type
            if self._in_windows:
                entry = pa.struct([pa.field("start", pa.int64()), pa.field("value", part.type)])
            states[name] = Map(entry, "bigint")
            states[name].name = name
        return states

    def bind(self, function: object) -> None:
        """Find the states of the function that runs."""
        self._handles = {name: getattr(function, name) for *_, name in self._sets}

    def collect(self, batch: pa.RecordBatch, at: Ints, count: int) -> tuple[list[Bag], int]:
        """Return the values of partials, row i for key at[i].

        And the number of distinct (key, value, value, ...): those that Spark would group to, or
        fewer, if grouping leaves most of the rows anyway.
        """
        weights = None if self._weight is None else plain(batch[self._weight])
        bags = []
        pairs: dict[str, tuple[Ints, int]] = {}
        groups = at, count
        for column, condition in self._columns:
            if column not in pairs:
                found = number_values(batch[column])
                pairs[column] = number_pairs(at, count, *found)
                if groups[0] is at:
                    groups = pairs[column]
                elif groups[1] < GROUPS_SHARE_MAX * len(at):
                    groups = number_pairs(*groups, *found)
            rows = None
            if condition is not None:
                rows = np.flatnonzero(batch[condition].to_numpy(zero_copy_only=False))
            bags.append(_make_bag(at, batch[column], weights, *pairs[column], rows))
        for name in {condition for _, condition in self._columns if condition is not None}:
            if groups[1] < GROUPS_SHARE_MAX * len(at):
                is_in = plain(batch[name]).astype(np.int64)
                groups = number_pairs(*groups, is_in, 2)
        return bags, groups[1]

    def add(
        self, bags: Sequence[Bag], keys: pa.Array, starts: Ints | None, held: list[Columns]
    ) -> None:
        """Add bags of numbered keys (of windows that start then) to state and accumulators."""
        groups: Ints | None = None
        for (index, part, name), bag in zip(self._sets, bags, strict=True):
            if len(bag.at):
                if groups is None:
                    # A key has many values, and there are several maps: it is hashed once.
                    groups = self._handles[name].groups_of(keys)
                change = self._write(self._handles[name], bag, keys, groups, starts)
                part.update(held[index], change, _Finder(self, name, keys, starts).find)

    def _write(
        self, handle: MapHandle, bag: Bag, keys: pa.Array, groups: Ints, starts: Ints | None
    ) -> Change:
        at = pa.array(bag.at)
        names = keys.take(at)
        entries = bag.values
        if starts is not None:
            entries = _window_entries(starts[bag.at], bag.values)
        before = plain(handle.get_many(names, entries))
        after = before + bag.counts if self._weight is not None else np.ones_like(before)
        if (changed := after != before).any():
            groups = groups[bag.at]
            if not changed.all():
                rows = np.flatnonzero(changed)
                taken = pa.array(rows)
                names, entries, groups = names.take(taken), entries.take(taken), groups[rows]
            counts = after[changed]
            handle.put_many(names, entries, pa.array(counts, mask=counts == 0), groups)
        return Change(bag.at, bag.values, before > 0, after > 0)

    def find_all(
        self, name: str, keys: pa.Array, starts: Ints | None, numbers: Ints
    ) -> tuple[Bag, pa.Array, pa.Array]:
        """Return the values of these keys and windows, and their names in state."""
        keys = keys.take(pa.array(numbers))
        handle = self._handles[name]
        if starts is None:
            rows, entries, counts = handle.of_keys(keys)
            at, values = plain(rows), entries
            return Bag(numbers[at], values, plain(counts)), keys.take(rows), entries
        # A key may have several of the windows, and others.
        key_at, key_count = number_values(keys)
        keys = keys.take(pa.array(first_rows(key_at, key_count)))
        rows, entries, counts = handle.of_keys(keys)
        held_at, held_starts = plain(rows), plain(entries.field("start"))
        both_starts = number_values(pa.array(np.concatenate([starts[numbers], held_starts])))
        pairs, _ = number_pairs(np.concatenate([key_at, held_at]), key_count, *both_starts)
        wanted, found = pairs[: len(numbers)], pairs[len(numbers) :]
        place = np.full(int(pairs.max(initial=-1)) + 1, -1, np.int64)
        place[wanted] = numbers
        kept = np.flatnonzero(place[found] >= 0)
        taken = pa.array(kept)
        entries = entries.take(taken)
        bag = Bag(place[found[kept]], entries.field("value"), plain(counts.take(taken)))
        return bag, keys.take(rows.take(taken)), entries

    def remove(self, keys: pa.Array, starts: Ints) -> list[Bag]:
        """Remove the values of windows, and return them by the window's row."""
        bags = []
        for _, part, name in self._sets:
            if not len(starts):
                none = np.zeros(0, np.int64)
                bags.append(Bag(none, pa.nulls(0, part.type), none))
                continue
            bag, names, entries = self.find_all(name, keys, starts, np.arange(len(starts)))
            self._handles[name].put_many(names, entries, pa.nulls(len(entries), pa.int64()))
            bags.append(bag)
        return bags

    def forget(self, held: list[Columns], rows: Ints) -> None:
        """Clear accumulators whose values come again, as those of a bag."""
        for index, part, _ in self._sets:
            kept = np.ones(len(held[index][0]), np.bool_)
            kept[rows] = False
            zero = part.concat(held[index], part.zeros(1))
            held[index] = part.take(zero, np.where(kept, np.arange(len(kept)), len(kept)))


class _Finder:
    """Finds all values of some of the keys at hand."""

    def __init__(self, sets: ValueSets, name: str, keys: pa.Array, starts: Ints | None) -> None:
        self._sets, self._name, self._keys, self._starts = sets, name, keys, starts

    def find(self, numbers: Ints) -> Bag:
        bag, _, _ = self._sets.find_all(self._name, self._keys, self._starts, numbers)
        held = np.flatnonzero(bag.counts > 0)
        return Bag(bag.at[held], bag.values.take(pa.array(held)), bag.counts[held])


def renumber(bags: Sequence[Bag], rows: Sequence[Ints] | None, at: Sequence[Ints]) -> list[Bag]:
    """Return bags with other numbers: those of `rows` (None: all), under the numbers `at`."""
    found = []
    for place, bag in enumerate(bags):
        values, counts = bag.values, bag.counts
        if rows is not None:
            values, counts = values.take(pa.array(rows[place])), counts[rows[place]]
        # Some numbers may have no values: they are numbered again, without gaps.
        dense = number_values(pa.array(at[place]))
        pairs, pair_count = number_pairs(*dense, *number_values(values))
        found.append(_make_bag(at[place], values, counts, pairs, pair_count, None))
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
            np.concatenate([a.counts, b.counts]),
        )
        for a, b in zip(first, second, strict=True)
    ]


def _make_bag(
    at: Ints,
    values: pa.Array,
    counts: Ints | None,
    pairs: Ints,
    pair_count: int,
    rows: Ints | None,
) -> Bag:
    """Return the values of some rows (None: of all); `pairs` numbers key and value of each row.

    `counts` are the rows that each stands for; None: they do not matter.
    """
    first = np.full(pair_count, -1, np.int64)
    if rows is None:
        first[pairs[::-1]] = np.arange(len(pairs) - 1, -1, -1)
    else:
        first[pairs[rows[::-1]]] = rows[::-1]
    is_in = first >= 0
    if values.null_count:
        is_in &= validity(values)[first]
    first = first[is_in]
    total = np.ones(len(first), np.int64)
    if counts is not None:
        taken = pairs if rows is None else pairs[rows]
        sums = np.zeros(pair_count, np.int64)
        np.add.at(sums, taken, counts if rows is None else counts[rows])
        total = sums[is_in]
    return Bag(at[first], values.take(pa.array(first)), total)


def _window_entries(starts: Ints, values: pa.Array) -> pa.Array:
    fields = [pa.field("start", pa.int64()), pa.field("value", values.type)]
    return pa.StructArray.from_arrays([pa.array(starts), values], fields=fields)
