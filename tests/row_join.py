"""An interval join row by row: the model that joins by the batch are compared with.

It is the join of earlier versions, so it also writes the state that these have left.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from cairn.functions import Context, Hooks, KeyedProcess
from cairn.operators.context import RowContext
from cairn.operators.join_plan import JoinPlan
from cairn.operators.window_process import name_states
from cairn.state import Declaration, Map
from cairn.types import Row
from cairn.types.durations import MAX_MS


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

    def bind(self, function: RowJoin) -> None:
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


class RowJoin(Hooks, KeyedProcess[Row]):
    """Joins two connected streams, `left` and `right`."""

    forgets = True
    reads_row_times = True

    def __init__(self, plan: JoinPlan) -> None:
        self.plan = plan
        low, high = plan.low_ms, plan.high_ms
        assert low is not None and high is not None
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
