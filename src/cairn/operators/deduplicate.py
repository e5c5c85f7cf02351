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

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.functions import BatchContext, BatchProcess, Hooks
from cairn.operators.aggregates.grouping import Ints, first_rows, number_values
from cairn.operators.context import ColumnContext
from cairn.state import Map, Value

DUPLICATES = "duplicates"
"""The side output of the rows that do not pass."""

Bools = npt.NDArray[np.bool_]


class Distinct(Hooks, BatchProcess):
    """Remembers every key. No row is too late for that."""

    handles_late: bool = True
    seen = Value("boolean")

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

    def __init__(self, within_ms: int, *, by_event: bool) -> None:
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
        order = np.lexsort((all_times, key_at))
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

    def _choose(self, rows: Ints, at: Ints, times: Ints) -> list[int]:
        """Return the rows that pass, of those that are near no stored time, in their order."""
        if not len(rows):
            return []
        key_at, _ = number_values(pa.array(at[rows]))
        first = first_rows(key_at, int(key_at.max()) + 1)
        first_time = times[rows[first]]
        left = rows[np.abs(times[rows] - first_time[key_at]) >= self._within_us]
        chosen: list[int] = rows[first].tolist()
        if not len(left):
            return chosen
        # Usually few: keys that pass more than once in this batch.
        near = {int(at[row]): [int(times[row])] for row in chosen}
        for row, key, time in zip(
            left.tolist(), at[left].tolist(), times[left].tolist(), strict=True
        ):
            known = near[key]
            place = bisect_left(known, time)
            if any(
                abs(time - other) < self._within_us
                for other in known[max(place - 1, 0) : place + 1]
            ):
                continue
            known.insert(place, time)
            chosen.append(row)
        return chosen


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
