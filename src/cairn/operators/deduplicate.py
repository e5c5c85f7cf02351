"""The first row of each key, or of each key and stretch of time.

    Distinct          a key passes once, for good
    DistinctWithin    a key passes again after enough time

Time is the row's event time if there is one, else the epoch's clock. Rows may come out of order:
an older row is compared with those that have passed as well.

Always true here:
- no two rows of a key that have passed are less than `within` apart;
- a row that has not passed is less than `within` away from one that has;
- a time is removed from state when only late rows could be near it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.functions import BatchContext, BatchProcess, Hooks
from cairn.operators.aggregates.grouping import Ints, first_rows, number_values
from cairn.operators.context import ColumnContext
from cairn.operators.row_order import pack_codes
from cairn.state import Map, Value

DUPLICATES = "duplicates"
"""The side output of the rows that do not pass."""

Bools = npt.NDArray[np.bool_]


class Distinct(Hooks, BatchProcess):
    """Remembers every key. No row is too late for that."""

    handles_late: bool = True
    seen = Value("boolean")

    def __init__(self, keys: Sequence[str] = ()) -> None:
        """`keys`: the columns of the key, in rows that pass too."""
        self.result_keys = tuple(keys)

    def process(self, batch: pa.RecordBatch, ctx: ColumnContext) -> pa.RecordBatch:  # type: ignore[override]
        at, count = number_values(ctx.keys)
        first = first_rows(at, count)
        keys = ctx.keys.take(pa.array(first))
        is_new = self.seen.get_many(keys).is_null().to_numpy(zero_copy_only=False)
        if is_new.any():
            new = keys.filter(pa.array(is_new))
            self.seen.put_many(new, pa.repeat(True, len(new)))
        passes = np.zeros(batch.num_rows, np.bool_)
        passes[first[is_new]] = True
        return _emit(batch, passes, ctx)


class DistinctWithin(Hooks, BatchProcess):
    """Remembers the times, in microseconds, of the rows that have passed."""

    passed: Map[int, bool] = Map("bigint", "boolean")
    passed.by_time = True

    def __init__(self, within_ms: int, *, by_event: bool, keys: Sequence[str] = ()) -> None:
        self.result_keys = tuple(keys)
        self._within_us = within_ms * 1000
        self._by_event = self.forgets = by_event

    def begin_epoch(self, ctx: BatchContext) -> None:
        now_ms = ctx.late_ms if self._by_event else ctx.now_ms
        if now_ms is None:
            return
        keys, times, _ = self.passed.between(None, now_ms * 1000 - self._within_us)
        if len(keys):
            self.passed.put_many(keys, times, pa.nulls(len(keys), pa.bool_()))

    def process(self, batch: pa.RecordBatch, ctx: ColumnContext) -> pa.RecordBatch:  # type: ignore[override]
        if self._by_event:
            assert ctx.times_us is not None
            times = ctx.times_us.to_numpy(zero_copy_only=False)
        else:
            times = np.full(batch.num_rows, ctx.now_ms * 1000, np.int64)
        at, count = number_values(ctx.keys)
        keys = ctx.keys if count == len(at) else ctx.keys.take(pa.array(first_rows(at, count)))
        held_at, held_times, _ = self.passed.of_keys(keys)
        rows = np.arange(batch.num_rows)
        if len(held_at):
            rows = rows[~self._near(at, times, _plain(held_at), _plain(held_times))]
        passes = np.zeros(batch.num_rows, np.bool_)
        passes[self._choose(rows, at, times)] = True
        taken = pa.array(passes)
        if passes.any():
            put = pa.array(times[passes])
            self.passed.put_many(ctx.keys.filter(taken), put, pa.repeat(True, len(put)))
        return _emit(batch, passes, ctx)

    def _near(self, at: Ints, times: Ints, held_at: Ints, held_times: Ints) -> Bools:
        """Mark the rows that are near a time in the state of their key."""
        key_at, all_times = np.concatenate([held_at, at]), np.concatenate([held_times, times])
        order = np.argsort(pack_codes(key_at, [all_times]))
        places = np.arange(len(order))
        is_held = order < len(held_at)
        before = np.maximum.accumulate(np.where(is_held, places, 0))
        after = np.minimum.accumulate(np.where(is_held, places, len(order) - 1)[::-1])[::-1]
        near = np.zeros(len(order), np.bool_)
        for neighbours in (order[before], order[after]):
            is_near = np.abs(all_times[neighbours] - all_times[order]) < self._within_us
            is_near &= (key_at[neighbours] == key_at[order]) & (neighbours < len(held_at))
            near[order] |= is_near
        return near[len(held_at) :]

    def _choose(self, rows: Ints, at: Ints, times: Ints) -> Ints:
        """Return the rows that pass, of those that are near no stored time."""
        if not len(rows):
            return rows
        key_at, count = number_values(pa.array(at[rows]))
        first = first_rows(key_at, count)
        first_times = times[rows[first]]
        is_left = np.abs(times[rows] - first_times[key_at]) >= self._within_us
        if not is_left.any():
            return rows[first]
        is_left[first] = True
        rows, key_at = rows[is_left], key_at[is_left]
        order = np.argsort(key_at, kind="stable")
        rows, key_at = rows[order], key_at[order]
        is_back = np.zeros(count, np.bool_)
        steps = np.flatnonzero((np.diff(times[rows]) < 0) & (np.diff(key_at) == 0))
        is_back[key_at[steps]] = True
        in_order = ~is_back[key_at]
        others, rows, key_at = rows[~in_order], rows[in_order], key_at[in_order]
        chosen = rows[choose_in_order(key_at, times[rows], self._within_us)]
        return np.concatenate([chosen, self._choose_singly(others, at, times)])

    def _choose_singly(self, rows: Ints, at: Ints, times: Ints) -> Ints:
        """Do what `_choose` does, for keys whose rows are not in the order of time: these are few.

        Rows that an epoch brings from Spark are in order.
        """
        near: dict[int, list[int]] = {}
        chosen = []
        for row, key, time in zip(
            rows.tolist(), at[rows].tolist(), times[rows].tolist(), strict=True
        ):
            known = near.setdefault(key, [])
            place = bisect_left(known, time)
            beside = known[max(place - 1, 0) : place + 1]
            if all(abs(time - other) >= self._within_us for other in beside):
                known.insert(place, time)
                chosen.append(row)
        return np.array(chosen, np.int64)


def choose_in_order(key_at: Ints, times: Ints, within_us: int) -> Ints:
    """Return the first row of each key, the first that is `within_us` after it, and so on.

    Rows are sorted by key and time. Every row has a next one; the rows that are reached from the
    first ones are found in a number of steps that is logarithmic in the longest way.
    """
    end = len(times)
    distinct, ranks = np.unique(times, return_inverse=True)
    width = len(distinct) + 1
    places = key_at * width + ranks
    # A time that is later than all others has the rank after the last one.
    is_last = times > np.iinfo(np.int64).max - within_us
    later = np.searchsorted(distinct, np.where(is_last, times, times + within_us))
    after = key_at * width + np.where(is_last, len(distinct), later)
    following = np.empty(end + 1, np.int64)
    following[:end] = np.searchsorted(places, after)
    following[end] = end
    is_same = following[:end] < end
    is_same[is_same] = key_at[following[:end][is_same]] == key_at[is_same]
    following[:end][~is_same] = end
    is_reached = np.zeros(end + 1, np.bool_)
    is_reached[:end] = np.diff(key_at, prepend=-1) != 0
    reached = np.flatnonzero(is_reached)
    while True:
        more = following[reached]
        more = more[~is_reached[more] & (more < end)]
        if not len(more):
            return reached
        is_reached[more] = True
        reached = np.concatenate([reached, more])
        following = following[following]


def _plain(array: pa.Array) -> Ints:
    plain: Ints = array.to_numpy(zero_copy_only=False)
    return plain


def _emit(batch: pa.RecordBatch, passes: Bools, ctx: ColumnContext) -> pa.RecordBatch:
    """Return the rows that pass; the others go to the side output, if it is read."""
    if passes.all():
        return batch
    if DUPLICATES in ctx.sides:
        ctx.output(DUPLICATES, batch.filter(pa.array(~passes)))
    return batch.filter(pa.array(passes))
