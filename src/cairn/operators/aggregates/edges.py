"""Parts that choose one row of each key: first, last, max_by, min_by.

Always true here:
- among values of one time (of one `y`) the least is first and the greatest last, in the order
  of `ordering`; null is the least;
- only values that tie are compared.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cairn.operators.aggregates.ordering import Ints, rank_values, sortable
from cairn.operators.aggregates.parts import Bools, Columns, Part, join_rows, plain, validity


class Edge(Part):
    """The first or the last value, by its time or by arrival."""

    names = ("order", "value")

    def __init__(self, type_: pa.DataType, *, is_last: bool, is_timed: bool) -> None:
        self.type = type_
        self.is_last = is_last
        self.is_timed = is_timed

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (pa.int64(), self.type)

    def zeros(self, count: int) -> Columns:
        return [np.zeros(count, np.int64), np.zeros(count, np.bool_), pa.nulls(count, self.type)]

    def load(self, arrays: list[pa.Array]) -> Columns:
        order, values = arrays
        return [plain(order), validity(order), values.cast(self.type)]

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        order, seen, values = columns
        rows = np.flatnonzero(seen)
        if self.is_timed:
            chosen = choose_rows(at, rows, order, values, len(into[0]), is_last=self.is_last)
            won, rows = _challenge(into, chosen, order, values, is_last=self.is_last)
        else:
            won, rows = self._by_arrival(into[1], at, rows)
        into[0][won] = order[rows]
        into[1][won] = True
        into[2] = _replace(into[2], won, values.take(pa.array(rows)))

    def _by_arrival(self, held: Bools, at: Ints, rows: Ints) -> tuple[Ints, Ints]:
        """Return the numbers that get another value, and the row of each."""
        chosen = np.full(len(held), -1, np.int64)
        if not self.is_last:
            # The last of several assignments to one place wins.
            rows = rows[::-1]
        chosen[at[rows]] = rows
        won = np.flatnonzero(chosen >= 0 if self.is_last else (chosen >= 0) & ~held)
        return won, chosen[won]

    def store(self, columns: Columns) -> list[pa.Array]:
        order, seen, values = columns
        return [pa.array(order, mask=None if seen.all() else ~seen), values]


class ValueBy(Part):
    """The value `x` of the row with the greatest or least `y`; rows without a `y` do not count."""

    names = ("by", "value")

    def __init__(self, type_: pa.DataType, by: pa.DataType, *, is_max: bool) -> None:
        self.type = type_
        self.by = by
        self.is_max = is_max

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (self.by, self.type)

    def zeros(self, count: int) -> Columns:
        return [pa.nulls(count, self.by), pa.nulls(count, self.type)]

    def load(self, arrays: list[pa.Array]) -> Columns:
        return [array.cast(type_) for array, type_ in zip(arrays, self.types, strict=True)]

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        by, values = columns
        held_order, order = sortable(into[0]), sortable(by)
        if held_order is None or order is None:
            ranks = rank_values(pa.concat_arrays([into[0], by]))
            held_order, order = ranks[: len(into[0])], ranks[len(into[0]) :]
        held = [held_order, validity(into[0]), into[1]]
        rows = np.flatnonzero(validity(by))
        chosen = choose_rows(at, rows, order, values, len(held_order), is_last=self.is_max)
        won, rows = _challenge(held, chosen, order, values, is_last=self.is_max)
        taken = pa.array(rows)
        into[:] = [
            _replace(old, won, new.take(taken)) for old, new in zip(into, columns, strict=True)
        ]

    def store(self, columns: Columns) -> list[pa.Array]:
        return columns


def choose_rows(
    at: Ints, rows: Ints, order: Ints, values: pa.Array, count: int, *, is_last: bool
) -> Ints:
    """Return the first or last of these rows for each number, -1 if it has none."""
    group, order = at[rows], order[rows]
    chosen = np.full(count, -1, np.int64)
    limits = np.iinfo(np.int64)
    best = np.full(count, limits.min if is_last else limits.max)
    (np.maximum if is_last else np.minimum).at(best, group, order)
    is_best = order == best[group]
    rows, group = rows[is_best], group[is_best]
    # The last of several assignments to one place wins.
    chosen[group] = rows
    many = np.bincount(group, minlength=count) > 1
    if many.any():
        tied = np.flatnonzero(many[group])
        rows, group = rows[tied], group[tied]
        # Equal values in the order of their rows, so that the choice is the same every time.
        ranked = np.argsort(rank_values(values.take(pa.array(rows))), kind="stable")
        if not is_last:
            ranked = ranked[::-1]
        chosen[group[ranked]] = rows[ranked]
    return chosen


def _challenge(
    held: Columns, chosen: Ints, order: Ints, values: pa.Array, *, is_last: bool
) -> tuple[Ints, Ints]:
    """Return the numbers whose value in state gives way to the chosen row, and that row."""
    held_order, held_seen, held_values = held
    found = np.flatnonzero(chosen >= 0)
    rows = chosen[found]
    before, after, is_held = held_order[found], order[rows], held_seen[found]
    wins: Bools = ~is_held | ((after > before) if is_last else (after < before))
    tied = np.flatnonzero(is_held & (after == before))
    if len(tied):
        ranks = rank_values(
            pa.concat_arrays(
                [held_values.take(pa.array(found[tied])), values.take(pa.array(rows[tied]))]
            )
        )
        before, after = ranks[: len(tied)], ranks[len(tied) :]
        # Among equals the row that came last is the last, and the one in state the first.
        wins[tied] = (after >= before) if is_last else (after < before)
    return found[wins], rows[wins]


def _replace(held: pa.Array, at: Ints, values: pa.Array) -> pa.Array:
    """Return `held` with other values at these rows, which are in order."""
    if len(at) == len(held):
        return values
    if not len(at):
        return held
    index = np.arange(len(held))
    index[at] = len(held) + np.arange(len(at))
    return join_rows(held, values).take(pa.array(index))
