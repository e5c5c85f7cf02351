"""Joins: pairs of rows of two streams with one key, by the batch.

    left, right                       rows that may still find a match
    left_unmatched, right_unmatched   of outer joins, written by earlier versions only

A row is joined with the rows of the other side that came before it. It is kept until no match can
come any more: until the watermark has passed the end of `within`, until its `ttl` is over, or for
ever. A row of an outer join that has found no match by then comes with nulls.

Without event time, time is the epoch's clock; without `within` and `ttl` there is none, and all
rows have the time 0.

Always true here:
- two rows meet once: when the later of them arrives;
- a row waits in state until it finds a match or its time is over;
- null is not equal to anything, so a row with a null in its key is not kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.runs import PAIRS_MAX, Bools, Found
from cairn.backends.timed_rows import TimedRows
from cairn.functions import EVENT_TIMERS, PROCESSING_TIMERS, BatchContext, BatchProcess, Hooks
from cairn.operators.aggregates.grouping import first_rows, number_values
from cairn.operators.join_plan import JoinPlan
from cairn.operators.window_process import name_states
from cairn.state import Declaration, Map
from cairn.types.codec import codec
from cairn.types.durations import MAX_MS

if TYPE_CHECKING:
    from cairn.backends.handles.rows import RowsHandle

STEP_US = 60_000_000
"""Length of a pane where `within` does not give one."""
_INT_MAX = 2**63 - 1
_INT_MIN = -(2**63)

_PANE = re.compile(r"\bpane_(minus)?\d+_(minus)?\d+\b")


def readable(ddl: str) -> str:
    """Return a type of a join's state without the `within` that is part of it."""
    return _PANE.sub("pane", ddl)


class Side:
    """One of the two streams."""

    rows: RowsHandle
    unmatched: Any

    def __init__(
        self,
        name: str,
        schema: pa.Schema,
        low_ms: int | None,
        high_ms: int | None,
        *,
        is_kept: bool,
        is_timed: bool,
    ) -> None:
        self.name = name
        self.schema = schema
        self.is_kept = is_kept
        """Rows without a match are in the result."""
        self.low_us = None if low_ms is None else low_ms * 1000
        self.high_us = None if high_ms is None else high_ms * 1000
        """Bounds of a match's time minus the time of a row here."""
        self._pane, self._step_us = "pane", STEP_US
        self._is_timed = is_timed
        if is_timed and low_ms is not None and high_ms is not None:
            # Panes in state fit one `within` only. It is part of the type, so that state of
            # another `within` is refused.
            self._pane += f"_{low_ms}_{high_ms}".replace("-", "minus")
            self._step_us = max(high_ms - low_ms, 1) * 1000

    def states(self) -> dict[str, Declaration]:
        rows = TimedRows(self.schema, step_us=self._step_us, pane=self._pane)
        states: dict[str, Declaration] = {self.name: rows}
        if self.is_kept and self._is_timed:
            at = pa.struct([("at", pa.int64()), ("number", pa.int64())])
            states[f"{self.name}_unmatched"] = Map(at, rows.entry_type)
        return name_states(states)

    def bind(self, function: Join) -> None:
        """Use the state handles of the function."""
        self.rows = getattr(function, self.name)
        self.unmatched = getattr(function, f"{self.name}_unmatched", None)

    def match(self, keys: pa.Array, times: Ints) -> Iterator[Found]:
        """Yield the rows here that match rows of the other side: `at` is the index of those."""
        # The bounds are about a match's time minus the time of a row here.
        low = _shift(times, None if self.high_us is None else -self.high_us, _INT_MIN)
        high = _shift(times, None if self.low_us is None else -self.low_us, _INT_MAX)
        return self.rows.match(keys, low, high)

    def over(self, until_us: int) -> Found:
        """Return the rows whose matches would all be of before a time."""
        assert self.high_us is not None
        return self.rows.before(max(_INT_MIN, min(until_us - self.high_us, _INT_MAX)))

    def over_ms(self) -> int | None:
        """Return the time, in milliseconds, at which the next row is over."""
        first = None if self.high_us is None else self.rows.first_time()
        if first is None or self.high_us is None:
            return None
        return max(-MAX_MS, min((first + self.high_us) // 1000 + 1, MAX_MS))

    def convert_old(self) -> None:
        """Take the rows that wait from the state in which earlier versions listed them."""
        if self.unmatched is None:
            return
        keys, entries, places = self.unmatched.between(None, None)
        if not len(keys):
            return
        listed = zip(
            codec(keys.type).decode_keys(keys), codec(places.type).decode_keys(places), strict=True
        )
        waiting = {(key, tuple(place)) for key, place in listed}
        self.unmatched.put_many(keys, entries, pa.nulls(len(keys), places.type))
        some = keys.take(pa.array(first_rows(*number_values(keys))))
        every = np.full(len(some), _INT_MIN), np.full(len(some), _INT_MAX)
        for found in self.rows.match(some, *every):
            owners = codec(keys.type).decode_keys(some.take(pa.array(found.at)))
            names = zip(owners, self.rows.places(found), strict=True)
            waits = np.fromiter((name in waiting for name in names), np.bool_, len(found))
            self.rows.set_waiting(found.pick(np.flatnonzero(waits)), waits=True)


def _shift(times: Ints, by_us: int | None, without: int) -> Ints:
    """Return later times, as far as integers go; `without` bounds none."""
    if by_us is None:
        return np.full(len(times), without, np.int64)
    if by_us >= 0:
        return np.minimum(times, _INT_MAX - by_us) + by_us
    return np.maximum(times, _INT_MIN - by_us) + by_us


class Join(Hooks, BatchProcess):
    """Joins two connected streams, `left` and `right`."""

    wants_order = False
    retired_states = frozenset(
        {
            "left_panes",
            "left_waiting",
            "right_panes",
            "right_waiting",
            EVENT_TIMERS,
            PROCESSING_TIMERS,
        }
    )

    def __init__(self, plan: JoinPlan) -> None:
        self.plan = plan
        self.result_keys = plan.left_keys
        self._by_event = plan.clock == "event"
        self.forgets = self._by_event
        self.ignores_time = not self._by_event
        low, high = plan.low_ms, plan.high_ms
        back = None if high is None else -high, None if low is None else -low
        timed = self._by_event
        self._left = Side("left", plan.left, low, high, is_kept=plan.keeps_left, is_timed=timed)
        self._right = Side("right", plan.right, *back, is_kept=plan.keeps_right, is_timed=timed)
        if not self._by_event:
            # A row may come any time after the one it is joined with.
            self.result_time = ""

    def set_times(self, left: tuple[str, int], right: tuple[str, int]) -> None:
        """Set the event time of the result from the time column, and its shift, of each stream.

        The result has the time of a stream that all its rows have. A pair is emitted with the
        later of its rows, an unmatched row when it has waited long enough; the result may be
        that far behind the watermark.
        """
        plan = self.plan
        assert plan.high_ms is not None and plan.low_ms is not None, "joins by event time"
        after_left_ms, after_right_ms = max(plan.high_ms, 0), max(-plan.low_ms, 0)
        if plan.how == "full":
            self.result_time = ""
            self.result_delay_ms = max(after_left_ms, after_right_ms)
        elif plan.how == "right":
            column, self.result_shift_us = right
            left_key = {theirs: mine for mine, theirs in plan.on}
            self.result_time = left_key.get(column) or plan.right_name(column)
            self.result_delay_ms = after_right_ms
        else:
            self.result_time, self.result_shift_us = left
            self.result_delay_ms = after_left_ms

    def declare_state(self) -> dict[str, Declaration]:
        return self._left.states() | self._right.states()

    def open(self, ctx: Any) -> None:
        self._left.bind(self)
        self._right.bind(self)

    def begin_epoch(self, ctx: BatchContext) -> None:
        self._left.convert_old()
        self._right.convert_old()

    # Rows

    def on_left(self, batch: pa.RecordBatch, ctx: BatchContext) -> Iterator[pa.RecordBatch]:
        return self._take(self._left, self._right, batch, ctx)

    def on_right(self, batch: pa.RecordBatch, ctx: BatchContext) -> Iterator[pa.RecordBatch]:
        return self._take(self._right, self._left, batch, ctx)

    def _take(
        self, side: Side, others: Side, batch: pa.RecordBatch, ctx: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        keys, times = ctx.keys, self._times(batch, ctx)
        rows = fit_rows(batch, side.schema)
        is_null = null_keys(keys, len(self.plan.on))
        if is_null is not None:
            if side.is_kept:
                yield self._alone(side, rows.filter(pa.array(is_null)))
            has_key = pa.array(~is_null)
            keys, times, rows = keys.filter(has_key), times[~is_null], rows.filter(has_key)
        is_matched = np.zeros(len(times), np.bool_)
        for found in others.match(keys, times):
            if others.is_kept:
                others.rows.set_waiting(found, waits=False)
            is_matched[found.at] = True
            mine = rows.take(pa.array(found.at))
            theirs = found.rows(others.rows.row_type)
            yield self._pair(mine, theirs) if side is self._left else self._pair(theirs, mine)
        waiting = ~is_matched if side.is_kept else np.zeros(len(times), np.bool_)
        side.rows.append(keys, times, rows, waiting)

    def _times(self, batch: pa.RecordBatch, ctx: BatchContext) -> Ints:
        if self._by_event:
            assert ctx.times_us is not None
            times: Ints = ctx.times_us.to_numpy(zero_copy_only=False)
            return times
        now_us = 0 if self.plan.high_ms is None else ctx.now_ms * 1000
        return np.full(batch.num_rows, now_us, np.int64)

    # Rows whose time is over

    def end_epoch(self, ctx: BatchContext) -> Iterator[pa.RecordBatch]:
        until_us = self._until_us(ctx)
        if until_us is not None:
            for side in (self._left, self._right):
                yield from self._clear(side, until_us)

    def _clear(self, side: Side, until_us: int) -> Iterator[pa.RecordBatch]:
        found = side.over(until_us)
        if side.is_kept:
            waiting = side.rows.in_order(found.pick(np.flatnonzero(found.waiting)))
            for start in range(0, len(waiting), PAIRS_MAX):
                some = waiting.pick(np.arange(start, min(start + PAIRS_MAX, len(waiting))))
                yield self._alone(side, some.rows(side.rows.row_type))
        side.rows.remove(found)

    def _until_us(self, ctx: BatchContext) -> int | None:
        """Return the time before which nothing comes any more; None if that is not known."""
        if self.plan.high_ms is None:
            return None
        if ctx.watermark_ms == MAX_MS:
            # The job is drained: time has ended.
            return 2 * _INT_MAX
        if self._by_event:
            return None if ctx.watermark_ms is None else ctx.watermark_ms * 1000
        return ctx.now_ms * 1000

    def next_timer(self, ctx: BatchContext) -> tuple[int | None, int | None]:
        times = [side.over_ms() for side in (self._left, self._right)]
        first_ms = min((time for time in times if time is not None), default=None)
        return (first_ms, None) if self._by_event else (None, first_ms)

    # Results

    def _pair(self, left: pa.StructArray, right: pa.StructArray) -> pa.RecordBatch:
        return pair_rows(self.plan, left, right)

    def _alone(self, side: Side, rows: pa.StructArray) -> pa.RecordBatch:
        if side is self._left:
            return left_alone(self.plan, rows)
        return right_alone(self.plan, rows)


def fit_rows(batch: pa.RecordBatch, schema: pa.Schema) -> pa.StructArray:
    """Return rows in the declared types. Spark's have the time zone of its session."""
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.StructArray.from_arrays(columns, fields=list(schema))


def null_keys(keys: pa.Array, column_count: int) -> Bools | None:
    """Mark keys with a null, in any of their columns; None if all keys are without."""
    columns = keys.flatten() if column_count > 1 else [keys]
    found: Bools | None = None
    for column in columns:
        if column.null_count:
            is_null = column.is_null().to_numpy(zero_copy_only=False)
            found = is_null if found is None else found | is_null
    return found


def pair_rows(plan: JoinPlan, left: pa.StructArray, right: pa.StructArray) -> pa.RecordBatch:
    """Return pairs as rows of the result."""
    columns = dict(zip(plan.left.names, left.flatten(), strict=True))
    columns |= {plan.right_name(name): right.field(name) for name in plan.right_rest}
    return pa.RecordBatch.from_pydict(columns)


def left_alone(plan: JoinPlan, rows: pa.StructArray) -> pa.RecordBatch:
    columns = dict(zip(plan.left.names, rows.flatten(), strict=True))
    for name in plan.right_rest:
        columns[plan.right_name(name)] = pa.nulls(len(rows), plan.right.field(name).type)
    return pa.RecordBatch.from_pydict(columns)


def right_alone(plan: JoinPlan, rows: pa.StructArray) -> pa.RecordBatch:
    right_key = dict(plan.on)
    columns = {
        name: rows.field(right_key[name])
        if name in right_key
        else pa.nulls(len(rows), plan.left.field(name).type)
        for name in plan.left.names
    }
    columns |= {plan.right_name(name): rows.field(name) for name in plan.right_rest}
    return pa.RecordBatch.from_pydict(columns)
