"""The order of values of any type, by the column.

The order is Spark's: null comes before every value, NaN after every number, 0.0 equals -0.0.
Text and bytes go by their bytes, structs field by field, lists element by element, a list before
the longer ones that begin with it. A map is compared as the list of its entries.

Always true here:
- the result depends on the values, not on how rows are cut into batches;
- equal values have equal ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]


def rank_values(values: pa.Array) -> Ints:
    """Return the rank of each value among these; the ranks of distinct values are 0, 1, 2, …"""
    return _rank(values)[0]


def sortable(values: pa.Array) -> Ints | None:
    """Return integers that are ordered as the values are; None if 64 bits cannot hold them.

    Nulls are arbitrary numbers.
    """
    type_ = values.type
    is_ = pa.types
    if is_.is_boolean(type_) or (is_.is_integer(type_) and not is_.is_uint64(type_)):
        return _plain(values.cast(pa.int64()))
    if is_.is_date32(type_) or is_.is_time32(type_):
        return _plain(values.view(pa.int32()).cast(pa.int64()))
    if is_.is_temporal(type_) and type_.bit_width == 64:
        return _plain(values.view(pa.int64()))
    if is_.is_floating(type_) and not is_.is_float16(type_):
        floats = values.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False) + 0.0
        floats[np.isnan(floats)] = np.nan
        bits = floats.view(np.int64)
        # The bits of negative numbers grow as the numbers fall.
        found: Ints = bits ^ ((bits >> 63) & np.int64((1 << 63) - 1))
        return found
    return None


def choose_extremes(values: pa.Array, at: Ints, count: int, *, is_max: bool) -> Ints:
    """Return the row of the greatest or least value of each number; -1 if it has no value.

    Neighbours of one number are compared in pairs, then the winners, until one is left: each
    value is read about twice, and nothing is sorted but the numbers.
    """
    found = np.full(count, -1, np.int64)
    rows = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    group = at[rows]
    if len(group) and (group[1:] < group[:-1]).any():
        order = np.argsort(group, kind="stable")
        rows, group = rows[order], group[order]
    better = pc.greater if is_max else pc.less
    while len(group):
        is_first = np.ones(len(group), np.bool_)
        is_first[1:] = group[1:] != group[:-1]
        starts = np.flatnonzero(is_first)
        if len(starts) == len(group):
            break
        place = np.arange(len(group)) - np.repeat(starts, np.diff(starts, append=len(group)))
        left = np.flatnonzero(place % 2 == 0)
        right = left + 1
        paired = np.flatnonzero((right < len(group)) & ~np.append(is_first, True)[right])
        first, second = rows[left[paired]], rows[right[paired]]
        # An earlier row stays in front of its equals.
        wins = better(values.take(pa.array(second)), values.take(pa.array(first)))
        winners = np.where(wins.to_numpy(zero_copy_only=False), second, first)
        rows, group = rows[left], group[left]
        rows[paired] = winners
    found[group] = rows
    return found


def _rank(values: pa.Array) -> tuple[Ints, int]:
    """Return ranks, and the number of distinct ones."""
    type_ = values.type
    if isinstance(type_, pa.BaseExtensionType):
        return _rank(values.storage)
    if pa.types.is_struct(type_):
        ranks, count = _rank(values.is_valid())
        for field in values.flatten():
            ranks, count = _refine(ranks, count, *_rank(field))
        return ranks, count
    if pa.types.is_nested(type_) and values.offset:
        # Without rows before the first: children of maps would have them too.
        values = values.take(pa.array(np.arange(len(values))))
    if pa.types.is_map(type_):
        entries = pa.StructArray.from_arrays([values.keys, values.items], ["key", "value"])
        return _rank_lists(values, entries)
    if pa.types.is_nested(type_):
        return _rank_lists(values, values.values)
    if pa.types.is_null(type_):
        return np.zeros(len(values), np.int64), min(1, len(values))
    # Numbers from 1, NaN after them, null last.
    ranks = pc.rank(values, "ascending", tiebreaker="dense").to_numpy(zero_copy_only=False)
    ranks = ranks.astype(np.int64)
    if values.null_count:
        ranks[values.is_null().to_numpy(zero_copy_only=False)] = 0
        return ranks, int(ranks.max(initial=0)) + 1
    return ranks - 1, int(ranks.max(initial=0))


def _rank_lists(values: pa.Array, elements: pa.Array) -> tuple[Ints, int]:
    """Rank lists by their first elements, then ties by the second ones, and so on."""
    ranks, count = _rank(values.is_valid())
    element_ranks, _ = _rank(elements)
    offsets = values.offsets.to_numpy(zero_copy_only=False)
    starts, lengths = offsets[:-1], np.diff(offsets)
    lengths[values.is_null().to_numpy(zero_copy_only=False)] = 0
    rows = np.arange(len(values))
    at = 0
    while count < len(values) and len(rows):
        # The end of a list comes before any element.
        place = np.zeros(len(values), np.int64)
        rows = rows[lengths[rows] > at]
        place[rows] = element_ranks[starts[rows] + at] + 1
        distinct, place = np.unique(place, return_inverse=True)
        ranks, count = _refine(ranks, count, place, len(distinct))
        at += 1
    return ranks, count


def _refine(ranks: Ints, count: int, more: Ints, more_count: int) -> tuple[Ints, int]:
    """Rank pairs of ranks."""
    if more_count <= 1:
        return ranks, count
    if count <= 1:
        return more, more_count
    pairs, found = np.unique(ranks * more_count + more, return_inverse=True)
    return found, len(pairs)


def _plain(values: pa.Array) -> Ints:
    if values.null_count:
        values = values.fill_null(0)
    found: Ints = values.to_numpy(zero_copy_only=False)
    return found
