"""Interval joins: pairs of rows of two streams with one key and near times.

    left             rows of the left stream that may still find a match, by pane and number
    left_panes       the number of rows in each pane
    left_waiting     for outer joins: the number of rows without a match, by the time when it is
                     certain that they have none
    left_unmatched   the places of these rows

and the same for the right stream. A pane is a stretch of time as long as the join reaches: a row
reads two panes of the other side, however many rows its key has.

Always true here:
- a row is kept until the watermark excludes further matches, and no longer;
- two rows meet once: when the later of them arrives;
- a waiting row is in `unmatched` until it finds a match or its time is over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cairn.errors import PlanError
from cairn.functions import Context, Hooks, KeyedProcess
from cairn.operators.context import RowContext
from cairn.operators.window_process import name_states
from cairn.state import Declaration, Map
from cairn.types import Row
from cairn.types.durations import MAX_MS, Duration, duration_ms

HOW = ("inner", "left", "right", "full")


@dataclass(frozen=True)
class JoinPlan:
    """The condition of a join, and its result."""

    left: pa.Schema
    right: pa.Schema
    on: tuple[tuple[str, str], ...]
    """Pairs of equal columns, left and right."""
    low_ms: int
    high_ms: int
    """Bounds of the right row's time minus the left row's."""
    how: str
    suffix: str = "_right"

    @property
    def left_keys(self) -> tuple[str, ...]:
        return tuple(left for left, _ in self.on)

    @property
    def right_keys(self) -> tuple[str, ...]:
        return tuple(right for _, right in self.on)

    @property
    def keeps_left(self) -> bool:
        return self.how in ("left", "full")

    @property
    def keeps_right(self) -> bool:
        return self.how in ("right", "full")

    @property
    def right_rest(self) -> list[str]:
        """The columns of the right stream that are in the result."""
        return [name for name in self.right.names if name not in self.right_keys]

    def right_name(self, column: str) -> str:
        return f"{column}{self.suffix}" if column in self.left.names else column

    def schema(self, key_types: Sequence[pa.DataType]) -> pa.Schema:
        """Return the schema of the result: all of left, then right without its key columns.

        `key_types` are wide enough for the keys of both. A right row without a match has its
        key in the columns of left.
        """
        fields = []
        keys = dict(zip(self.left_keys, zip(self.right_keys, key_types, strict=True), strict=True))
        for field in self.left:
            if self.keeps_right and field.name in keys:
                other, type_ = keys[field.name]
                nullable = field.nullable or self.right.field(other).nullable
                fields.append(pa.field(field.name, type_, nullable))
            else:
                fields.append(field.with_nullable(field.nullable or self.keeps_right))
        for name in self.right_rest:
            field, called = self.right.field(name), self.right_name(name)
            if called in (other.name for other in fields):
                raise PlanError(
                    f"join: the result would have two columns {called!r}\n"
                    "  next: give suffix= another value, or rename a column before the join",
                    column=called,
                )
            nullable = field.nullable or self.keeps_left
            fields.append(field.with_name(called).with_nullable(nullable))
        return pa.schema(fields)


JoinColumns = str | Sequence[str] | Mapping[str, str]
"""The key of a join: a column, several, or {left column: right column}."""


def join_plan(
    left: pa.Schema,
    right: pa.Schema,
    on: JoinColumns,
    within: Duration | tuple[Duration, Duration],
    how: str,
    suffix: str,
) -> JoinPlan:
    """Check the arguments of a join and return its plan."""
    if how not in HOW:
        raise PlanError(f"join: how={how!r}\n  expected: one of {', '.join(HOW)}")
    pairs = _pairs(on)
    for column, schema, side in (
        *((column, left, "left") for column, _ in pairs),
        *((column, right, "right") for _, column in pairs),
    ):
        if column not in schema.names:
            raise PlanError(
                f"join: the {side} stream has no column {column!r}\n"
                f"  found: {', '.join(schema.names)}",
                column=column,
            )
    return JoinPlan(left, right, pairs, *_bounds_ms(within), how, suffix)


def _pairs(on: JoinColumns) -> tuple[tuple[str, str], ...]:
    if isinstance(on, str):
        on = [on]
    pairs = list(on.items()) if isinstance(on, Mapping) else [(c, c) for c in _list(on)]
    if not pairs or not all(isinstance(column, str) for pair in pairs for column in pair):
        raise PlanError(
            f"join: on={on!r}\n"
            "  expected: a column, a list of columns, or {left column: right column}"
        )
    return tuple(pairs)


def _list(on: object) -> list[Any]:
    return list(on) if isinstance(on, Iterable) else [on]


def _bounds_ms(within: Duration | tuple[Duration, Duration]) -> tuple[int, int]:
    """Return the earliest and the latest time of the right row, relative to the left row's."""
    if isinstance(within, Duration):
        span_ms = duration_ms(within, "within of join")
        return -span_ms, span_ms
    if not isinstance(within, Sequence) or len(within) != 2:
        raise PlanError(
            f"join: within={within!r}\n"
            "  expected: a span of time such as '10 minutes', or a pair of them such as "
            "('-5 minutes', '10 minutes'): how much later the right row may be"
        )
    low_ms, high_ms = (duration_ms(bound, "within of join", signed=True) for bound in within)
    if low_ms > high_ms:
        raise PlanError(
            f"join: within={within!r} is empty\n"
            "  next: give the earlier bound first; the right row's time minus the left row's is "
            "between them"
        )
    return low_ms, high_ms


_PANE = re.compile(r"\bpane_(minus)?\d+_(minus)?\d+\b")


def readable(ddl: str) -> str:
    """Return a type of a join's state without the `within` that is part of it."""
    return _PANE.sub("pane", ddl)


class Side:
    """One of the two streams: its rows of the current key."""

    rows: Map[tuple[int, int], tuple[int, int | None, Row]]
    panes: Map[int, int]
    waiting: Map[int, int]
    unmatched: Map[tuple[int, int], tuple[int, int]]

    def __init__(
        self, name: str, schema: pa.Schema, low_ms: int, high_ms: int, *, is_kept: bool
    ) -> None:
        self.name = name
        self.is_kept = is_kept
        """Rows without a match are in the result."""
        self.low_us, self.high_us = low_ms * 1000, high_ms * 1000
        """Bounds of a match's time minus the time of a row here."""
        self._step_us = max(high_ms - low_ms, 1) * 1000
        # Panes and timers in state fit one `within` only. It is part of the type, so that state
        # of another `within` is refused.
        span = f"{low_ms}_{high_ms}".replace("-", "minus")
        self._place = pa.struct([(f"pane_{span}", pa.int64()), ("number", pa.int64())])
        self._row = pa.struct(
            [("time", pa.int64()), ("waiting", pa.int64()), ("row", pa.struct(list(schema)))]
        )

    def states(self) -> dict[str, Declaration]:
        states: dict[str, Declaration] = {
            self.name: Map(self._place, self._row),
            f"{self.name}_panes": Map("bigint", "bigint"),
        }
        if self.is_kept:
            at = pa.struct([("at", pa.int64()), ("number", pa.int64())])
            states[f"{self.name}_waiting"] = Map("bigint", "bigint")
            states[f"{self.name}_unmatched"] = Map(at, self._place)
        return name_states(states)

    def bind(self, function: IntervalJoin) -> None:
        """Use the state handles of the function."""
        self.rows = getattr(function, self.name)
        self.panes = getattr(function, f"{self.name}_panes")
        if self.is_kept:
            self.waiting = getattr(function, f"{self.name}_waiting")
            self.unmatched = getattr(function, f"{self.name}_unmatched")

    def match(self, low_us: int, high_us: int) -> list[Row]:
        """Return the rows of these times, which now have a match."""
        step, rows = self._step_us, self.rows
        found = []
        for pane in range(low_us - low_us % step, high_us + 1, step):
            if pane not in self.panes:
                continue
            for number in range(self.panes[pane]):
                time_us, waiting, row = rows[(pane, number)]
                if low_us <= time_us <= high_us:
                    found.append(row)
                    if waiting is not None:
                        self.unmatched.pop((self._over_ms(time_us), waiting), None)
        return found

    def keep(self, time_us: int, row: Row, ctx: RowContext, *, is_matched: bool) -> None:
        """Store a row for later matches."""
        pane = time_us - time_us % self._step_us
        number = self.panes.get(pane, 0)
        if not number:
            ctx.timers.event(self._removal_ms(pane))
        self.panes[pane] = number + 1
        waiting = None
        if self.is_kept and not is_matched:
            at_ms = self._over_ms(time_us)
            waiting = self.waiting.get(at_ms, 0)
            if not waiting:
                ctx.timers.event(at_ms)
            self.waiting[at_ms] = waiting + 1
            self.unmatched[(at_ms, waiting)] = (pane, number)
        self.rows[(pane, number)] = (time_us, waiting, row)

    def take_unmatched(self, time_ms: int) -> list[Row]:
        """Return the rows that certainly have no match, as of this time."""
        if not self.is_kept:
            return []
        places = (
            self.unmatched.pop((time_ms, number), None)
            for number in range(self.waiting.pop(time_ms, 0))
        )
        return [self.rows[place][2] for place in places if place is not None]

    def remove(self, time_ms: int) -> None:
        """Remove the panes whose rows can have no further match."""
        if -MAX_MS < time_ms < MAX_MS:  # At most one, and its place is known.
            gone = [time_ms * 1000 - self.high_us - self._step_us]
        else:
            gone = [pane for pane in self.panes if self._removal_ms(pane) == time_ms]
        for pane in gone:
            for number in range(self.panes.pop(pane, 0)):
                del self.rows[(pane, number)]

    def is_over(self, time_us: int, late_ms: int | None) -> bool:
        """True if every match of a row of this time would be late."""
        return late_ms is not None and time_us + self.high_us < late_ms * 1000

    def _over_ms(self, time_us: int) -> int:
        """Return the watermark from which on `is_over` holds."""
        return _in_calendar((time_us + self.high_us) // 1000 + 1)

    def _removal_ms(self, pane: int) -> int:
        return _in_calendar((pane + self._step_us + self.high_us) // 1000)


def _in_calendar(time_ms: int) -> int:
    return max(-MAX_MS, min(time_ms, MAX_MS))


class IntervalJoin(Hooks, KeyedProcess[Row]):
    """Joins two connected streams, `left` and `right`."""

    forgets = True
    reads_row_times = True

    def __init__(self, plan: JoinPlan) -> None:
        self.plan = plan
        low, high = plan.low_ms, plan.high_ms
        self._left = Side("left", plan.left, low, high, is_kept=plan.keeps_left)
        self._right = Side("right", plan.right, -high, -low, is_kept=plan.keeps_right)
        self._rest = [plan.right.names.index(name) for name in plan.right_rest]
        self._no_right = (None,) * len(self._rest)
        right_key = dict(plan.on)
        self._key_at = [
            plan.right.names.index(right_key[name]) if name in right_key else None
            for name in plan.left.names
        ]
        """For each column of left: the index of its value in an unmatched right row."""
        self._has_one_key = len(plan.on) == 1

    def set_times(self, left: tuple[str, int], right: tuple[str, int]) -> None:
        """Set the event time of the result from the time column, and its shift, of each stream.

        The result has the time of a stream that all its rows have. A pair is emitted with the
        later of its rows, an unmatched row when it has waited long enough; the result may be
        that far behind the watermark.
        """
        plan = self.plan
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

    def open(self, ctx: Context) -> None:
        self._left.bind(self)
        self._right.bind(self)

    def on_left(self, row: Row, ctx: RowContext) -> Any:
        found = self._match(self._left, self._right, row, ctx)
        if found is None:
            return self._left_alone(row)
        return [self._pair(row, other) for other in found] if found else None

    def on_right(self, row: Row, ctx: RowContext) -> Any:
        found = self._match(self._right, self._left, row, ctx)
        if found is None:
            return self._right_alone(row)
        return [self._pair(other, row) for other in found] if found else None

    def _match(self, side: Side, others: Side, row: Row, ctx: RowContext) -> list[Row] | None:
        """Return the matches of a new row; None if it is in the result without a match."""
        assert ctx.row_times_us is not None
        time_us = next(ctx.row_times_us)
        # Null is not equal to anything.
        if ctx.key is None or (not self._has_one_key and None in ctx.key):
            return None if side.is_kept else []
        found = others.match(time_us + side.low_us, time_us + side.high_us)
        if not side.is_over(time_us, ctx.late_ms):
            side.keep(time_us, row, ctx, is_matched=bool(found))
        elif not found and side.is_kept:
            return None
        return found

    def on_timer(self, time_ms: int, ctx: Context) -> Any:
        alone = [self._left_alone(row) for row in self._left.take_unmatched(time_ms)]
        alone += [self._right_alone(row) for row in self._right.take_unmatched(time_ms)]
        self._left.remove(time_ms)
        self._right.remove(time_ms)
        return alone or None

    def _pair(self, left: Row, right: Row) -> Row:
        return (*left, *[right[at] for at in self._rest])

    def _left_alone(self, left: Row) -> Row:
        return (*left, *self._no_right)

    def _right_alone(self, right: Row) -> Row:
        keys = [None if at is None else right[at] for at in self._key_at]
        return (*keys, *[right[at] for at in self._rest])
