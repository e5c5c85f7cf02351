"""Joins as of a time: each row of a stream with the version that was newest at its time.

    left     rows whose time the watermark has not passed: a version for them may still come
    right    versions that a row may still need
    ends     the times at which versions end, if `valid_until` is a column

A row is joined when the watermark has passed its time: then all versions of up to that time are
known. A version is dropped when the watermark has reached the next one of its key, or the end of
its validity: later rows cannot need it.

Always true here:
- rows of a key that are gone from `right` are older than those that are there;
- versions of an epoch are added at its end, those of one key and time in the order of `row_order`:
  so the result does not depend on the order of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.runs import PAIRS_MAX, Bools, Found
from cairn.backends.timed_rows import TimedRows
from cairn.errors import PlanError
from cairn.functions import BatchContext, BatchProcess, Hooks
from cairn.operators.aggregates.grouping import first_rows, number_values
from cairn.operators.context import ColumnContext
from cairn.operators.join_plan import JoinColumns, JoinPlan, check_how, check_on
from cairn.operators.joins import STEP_US, fit_rows, left_alone, null_keys, pair_rows
from cairn.operators.row_order import row_order
from cairn.operators.window_process import name_states
from cairn.state import Declaration
from cairn.types import type_ddl
from cairn.types.durations import MAX_MS, Duration, duration_ms

if TYPE_CHECKING:
    from cairn.backends.handles.rows import RowsHandle

HOW = ("inner", "left")
_FROM = pa.schema([pa.field("valid_from", pa.int64())])
_INT_MAX = 2**63 - 1
_INT_MIN = -(2**63)


@dataclass(frozen=True)
class Validity:
    """The end of a version: the time of a column, a span after its start, or none."""

    column: str | None = None
    span_ms: int | None = None

    def ends_us(self, times: Ints, column: pa.Array | None) -> Ints:
        """Return the last time at which each version is valid. `column` is the one of that name."""
        if self.span_ms is not None:
            span_us = self.span_ms * 1000
            return np.minimum(times, _INT_MAX - span_us) + span_us
        if column is None:
            return np.full(len(times), _INT_MAX, np.int64)
        if pa.types.is_date(column.type):
            column = column.cast(pa.timestamp("us"))
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        else:
            limit = _INT_MAX // 1000
            least = pc.min_element_wise(column.cast(pa.int64()), limit, skip_nulls=False)
            column = pc.multiply(pc.max_element_wise(least, -limit, skip_nulls=False), 1000)
        # A version without an end is valid until the next one.
        ends: Ints = column.fill_null(_INT_MAX).to_numpy(zero_copy_only=False)
        return ends


def as_of_plan(
    left: pa.Schema, right: pa.Schema, on: JoinColumns, how: str, suffix: str
) -> JoinPlan:
    """Check the arguments of a join as of a time and return its plan."""
    check_how(how, HOW)
    return JoinPlan(left, right, check_on(on, left, right), None, None, how, suffix)


def check_validity(valid_until: str | Duration | None, right: pa.Schema) -> Validity:
    """Return the validity that an argument stands for: a column, or a span of time."""
    if valid_until is None:
        return Validity()
    if not isinstance(valid_until, str) or valid_until not in right.names:
        try:
            return Validity(span_ms=duration_ms(valid_until, "valid_until of join_as_of"))
        except PlanError as error:
            raise PlanError(
                f"join_as_of: valid_until={valid_until!r}\n"
                "  expected: a column of the versions, or a span of time such as '1 day'\n"
                f"  found columns: {', '.join(right.names)}"
            ) from error
    type_ = right.field(valid_until).type
    kinds = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_integer)
    if not any(kind(type_) for kind in kinds):
        raise PlanError(
            f"join_as_of: valid_until={valid_until!r} is a column of {type_ddl(type_)}\n"
            "  expected: a timestamp, a date, or milliseconds since 1970",
            column=valid_until,
        )
    return Validity(column=valid_until)


class AsOfJoin(Hooks, BatchProcess):
    """Joins rows, `left`, with versions, `right`."""

    forgets = True
    wants_order = False
    left: RowsHandle
    right: RowsHandle
    ends: RowsHandle

    def __init__(self, plan: JoinPlan, validity: Validity, time: tuple[str, int]) -> None:
        """`time`: the time column of the left stream, and its shift."""
        self.plan = plan
        self.result_keys = plan.left_keys
        self.validity = validity
        # A row is emitted in the epoch whose watermark passes it: not behind the watermark.
        self.result_time, self.result_shift_us = time

    def declare_state(self) -> dict[str, Declaration]:
        states: dict[str, Declaration] = {
            "left": TimedRows(self.plan.left, step_us=STEP_US),
            "right": TimedRows(self.plan.right, step_us=STEP_US),
        }
        if self.validity.column is not None:
            states["ends"] = TimedRows(_FROM, step_us=STEP_US)
        return name_states(states)

    def begin_epoch(self, ctx: BatchContext) -> None:
        self._versions: list[Timed] = []

    def on_left(self, batch: pa.RecordBatch, ctx: BatchContext) -> pa.RecordBatch | None:
        rows, is_null = fit_rows(batch, self.plan.left), null_keys(ctx.keys, len(self.plan.on))
        keyed = _with_key(rows, ctx, is_null)
        self.left.append(*keyed, _none(keyed.rows))
        if is_null is None or self.plan.how == "inner":
            return None
        return left_alone(self.plan, rows.filter(pa.array(is_null)))

    def on_right(self, batch: pa.RecordBatch, ctx: BatchContext) -> None:
        rows, is_null = fit_rows(batch, self.plan.right), null_keys(ctx.keys, len(self.plan.on))
        self._versions.append(_with_key(rows, ctx, is_null))

    def _add_versions(self) -> None:
        """Add the versions that the epoch has brought."""
        if not self._versions:
            return
        keys, times, rows = _in_order(self._versions)
        self._versions = []
        self.right.append(keys, times, rows, _none(rows))
        if self.validity.column is not None:
            ends = self.validity.ends_us(times, rows.field(self.validity.column))
            is_bounded = ends < _INT_MAX
            starts = pa.StructArray.from_arrays([pa.array(times[is_bounded])], fields=list(_FROM))
            bounded = pa.array(is_bounded)
            self.ends.append(keys.filter(bounded), ends[is_bounded], starts, _none(starts))

    def end_epoch(self, ctx: ColumnContext) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        self._add_versions()
        if ctx.watermark_ms is None:
            return
        is_drained = ctx.watermark_ms == MAX_MS
        until_us = _INT_MAX if is_drained else ctx.watermark_ms * 1000
        passed = self.left.before(until_us)
        ordered = self.left.in_order(passed)
        for start in range(0, len(ordered), PAIRS_MAX):
            some = ordered.pick(np.arange(start, min(start + PAIRS_MAX, len(ordered))))
            yield from self._join(some)
        self.left.remove(passed)
        if not is_drained:
            self._drop_versions(ctx.floor_ms * 1000, until_us)

    def _join(self, rows: Found) -> Iterator[pa.RecordBatch]:
        found = self.right.as_of(self.left.keys_of(rows), rows.times)
        is_valid = rows.times[found.at] <= self._ends_us(found)
        at = found.at[is_valid]
        if len(at):
            versions = found.pick(np.flatnonzero(is_valid)).rows(self.right.row_type)
            yield pair_rows(self.plan, rows.pick(at).rows(self.left.row_type), versions)
        if self.plan.how == "left" and len(at) < len(rows):
            is_alone = np.ones(len(rows), np.bool_)
            is_alone[at] = False
            alone = rows.pick(np.flatnonzero(is_alone))
            yield left_alone(self.plan, alone.rows(self.left.row_type))

    def _ends_us(self, versions: Found) -> Ints:
        name, column = self.validity.column, None
        if name is not None:
            column = versions.field(name, self.plan.right.field(name).type)
        return self.validity.ends_us(versions.times, column)

    def _drop_versions(self, since_us: int, until_us: int) -> None:
        """Remove the versions that no row at or after `until_us` can need.

        The epoch before, with a watermark of `since_us`, has removed all others.
        """
        keys = [self.right.keys_between(since_us, until_us)]
        if self.validity.span_ms is not None:
            span_us = self.validity.span_ms * 1000
            low = max(since_us - span_us, _INT_MIN)
            keys.append(self.right.keys_between(low, max(until_us - span_us, _INT_MIN)))
        if self.validity.column is not None:
            ended = self.ends.before(until_us)
            keys.append(self.ends.keys_of(ended))
            self.ends.remove(ended)
        some = pa.concat_arrays(keys)
        some = some.take(pa.array(first_rows(*number_values(some))))
        least, most = np.full(len(some), _INT_MIN), np.full(len(some), until_us)
        for found in self.right.match(some, least, most):
            # The last one of each key holds at `until_us`, if it is valid then.
            is_gone = np.zeros(len(found), np.bool_)
            is_gone[:-1] = found.at[1:] == found.at[:-1]
            is_gone |= self._ends_us(found) < until_us
            self.right.remove(found.pick(np.flatnonzero(is_gone)))

    def next_timer(self, ctx: BatchContext) -> tuple[int | None, int | None]:
        first = self.left.first_time()
        if first is None:
            return None, None
        return max(-MAX_MS, min(first // 1000 + 1, MAX_MS)), None


class Timed(NamedTuple):
    """Rows with their keys and times."""

    keys: pa.Array
    times: Ints
    rows: pa.StructArray


def _with_key(rows: pa.StructArray, ctx: BatchContext, is_null: Bools | None) -> Timed:
    """Return the rows that have a key."""
    assert ctx.times_us is not None
    times = ctx.times_us.to_numpy(zero_copy_only=False)
    if is_null is None:
        return Timed(ctx.keys, times, rows)
    has_key = pa.array(~is_null)
    return Timed(ctx.keys.filter(has_key), times[~is_null], rows.filter(has_key))


def _in_order(parts: Sequence[Timed]) -> Timed:
    """Return all rows; those of one key and time are in the order of their values."""
    keys, rows = (pa.concat_arrays([part[at] for part in parts]) for at in (0, 2))
    times = np.concatenate([part.times for part in parts])
    names = pa.StructArray.from_arrays([keys, pa.array(times)], ["key", "time"])
    if number_values(names)[1] == len(times):
        return Timed(keys, times, rows)
    order = row_order(rows)
    order = order[np.argsort(times[order], kind="stable")]
    taken = pa.array(order)
    return Timed(keys.take(taken), times[order], rows.take(taken))


def _none(rows: pa.StructArray) -> Bools:
    """Return the flags of rows that do not wait for a match."""
    return np.zeros(len(rows), np.bool_)
