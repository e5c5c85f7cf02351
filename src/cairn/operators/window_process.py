"""Windows that run row by row: the open windows of a key, and when they emit.

The open windows of a key are a map state, by their ends. Subclasses decide what a window holds
of its rows: see `window_functions`.

A window emits when it is complete, then again for every late row until it is removed,
`allowed_lateness` after its end; and before it is complete, if there is an early trigger.
Each result covers all rows so far. Timers do the rest: one for the end of a window, one for its
removal, one for the early result by the clock.

Always true here:
- a window in state has a timer for its next event;
- a row is judged by its windows: it is late when all of them are gone;
- sessions of a key neither overlap nor touch.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from cairn.errors import PlanError
from cairn.functions import LATE, Context, Hooks, KeyedProcess
from cairn.operators.context import RowContext
from cairn.state import Declaration, Map, Value
from cairn.types import Row
from cairn.types.durations import MAX_MS
from cairn.windows import FOREVER, Bounds, Count, Global, Session, WindowSpec, complete_ms

Content = tuple[Any, ...]
"""The state that a function keeps for a window."""

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_FIRST_US = (dt.datetime.min.replace(tzinfo=dt.UTC) - _EPOCH) // dt.timedelta(microseconds=1)
_LAST_US = (dt.datetime.max.replace(tzinfo=dt.UTC) - _EPOCH) // dt.timedelta(microseconds=1)


@dataclasses.dataclass(frozen=True)
class WindowPlan:
    """The windows of a stream, and when they emit."""

    windows: WindowSpec
    allowed_lateness_ms: int = 0
    early_rows: int | None = None
    early_ms: int | None = None

    @property
    def has_late_rows(self) -> bool:
        return self.windows.time == "event" and not isinstance(self.windows, Global)

    def __post_init__(self) -> None:
        is_early = self.early_rows is not None or self.early_ms is not None
        if isinstance(self.windows, Count) and (is_early or self.allowed_lateness_ms):
            raise PlanError(
                "windows of a number of rows emit when they are full, and no row is late for them\n"
                "  next: leave early_every_rows, early_every and allowed_lateness out"
            )
        if self.allowed_lateness_ms and self.windows.time == "processing":
            raise PlanError(
                "allowed_lateness of windows by processing time: no row is late there\n"
                "  next: leave it out, or use windows by event time"
            )
        if self.early_rows is not None and self.early_rows < 1:
            raise PlanError(
                f"early_every_rows of windows must be positive, found {self.early_rows}"
            )
        if self.early_ms is not None and self.early_ms < 1:
            raise PlanError(f"early_every of windows must be positive, found {self.early_ms} ms")


class WindowProcess(Hooks, KeyedProcess[Row]):
    """The part that all functions of windows share."""

    handles_late: bool = True
    reads_row_times: ClassVar[bool] = True
    windows: Map[int, Any]
    """End of a window -> (start, rows since the last result, fired, early_at, *content)."""
    counted: Value[int]
    """Rows of the key so far, for windows of a number of rows."""

    def __init__(self, plan: WindowPlan, schema: pa.Schema, keys: Sequence[str]) -> None:
        self.plan = plan
        self.rows_type = pa.struct(list(schema))
        self.key_count = len(keys)
        self.result_time = None if isinstance(plan.windows, Global | Count) else "window_end"
        # A session emits after its end, and never what is older than the watermark was before.
        self.result_shift_us = 0 if isinstance(plan.windows, Session) else -1
        self._spec = plan.windows
        self._is_session = isinstance(plan.windows, Session)
        self._is_global = isinstance(plan.windows, Global)
        self._is_counted = isinstance(plan.windows, Count)
        self._is_aligned = not self._is_session and not self._is_global
        # The global window ends with the job, by either clock.
        self._by_event = plan.windows.time == "event" and not self._is_global
        self._counts = plan.early_rows is not None or self._is_global
        self._early_rows = math.inf if plan.early_rows is None else plan.early_rows

    def declare_state(self) -> dict[str, Declaration]:
        fields = [
            pa.field("start", pa.int64()),
            pa.field("rows", pa.int64()),
            pa.field("fired", pa.bool_()),
            pa.field("early_at", pa.int64()),
            *self.content_fields(),
        ]
        states: dict[str, Declaration] = {"windows": Map("bigint", pa.struct(fields))}
        if self._is_counted:
            states["counted"] = Value("bigint", default=0)
        return name_states(states)

    # The content of a window

    def content_fields(self) -> list[pa.Field]:
        """Return the fields of a window's content in state."""
        return []

    def take(self, row: Row, time_us: int, last: Bounds) -> None:
        """Store a row that is in some windows; `last` is the last of them."""

    def first(self, row: Row) -> Content:
        """Return the content of a window with one row."""
        return ()

    def merge(self, held: Content, more: Content) -> Content:
        """Return the content of two windows that become one, or of a window and its next row."""
        return ()

    def results(self, bounds: Bounds, held: Content, ctx: RowContext) -> Iterable[Row]:
        """Return the result rows of a window."""
        raise NotImplementedError

    def remove_rows(self, bounds: Bounds) -> None:
        """Remove the rows of a removed window."""

    # Rows

    def process(self, row: Row, ctx: RowContext) -> Any:  # type: ignore[override]
        if self._is_counted:
            return self._count(row, ctx)
        time_us: int = ctx.now_ms * 1000
        if ctx.row_times_us is not None:
            event_us = next(ctx.row_times_us)
            if self._spec.time == "event":
                time_us = event_us
        bounds = self._spec.assign(time_us)
        met: list[int] = []
        if self._is_session:
            session, met = self._grow_session(*bounds[0])
            bounds = [session]
        late_ms = ctx.late_ms
        if self._by_event and late_ms is not None:
            bounds = [(start, end) for start, end in bounds if self._removal_ms(end) > late_ms]
            if not bounds:
                ctx.count_late(1)
                if LATE in ctx.sides:
                    ctx.output(LATE, row)
                return None
        if met:
            self._unite(bounds[0], met, ctx)
        self.take(row, time_us, bounds[-1])
        results: list[Row] = []
        for start, end in bounds:
            if self._add(start, end, row, ctx):
                results += self._emit(end, ctx)
        return results or None

    def _count(self, row: Row, ctx: RowContext) -> Any:
        """Add a row to its count windows; those that it fills emit, and are gone."""
        number = self.counted.get()
        self.counted.set(number + 1)
        bounds = self._spec.assign(number)
        if bounds:
            self.take(row, number, bounds[-1])
        results: list[Row] = []
        for start, end in bounds:
            known = self.windows.get(end)
            held = self.first(row)
            if known is not None:
                held = self.merge(tuple(known[4:]), held)
            if number + 1 < end:
                if held or known is None:
                    self.windows[end] = (start, 0, False, None, *held)
                continue
            results += self.results((start, end), held, ctx)
            if known is not None:
                del self.windows[end]
            self.remove_rows((start, end))
        return results or None

    def _add(self, start: int, end: int, row: Row, ctx: RowContext) -> bool:
        """Add a row to a window; True if the window then emits."""
        known = self.windows.get(end)
        if known is None:
            self._set_timers(end, ctx)
            rows, fired, early_at, held = 0, False, None, self.first(row)
        else:
            _, rows, fired, early_at, *before = known
            held = self.merge(tuple(before), self.first(row))
        if self._counts:
            rows += 1
        # Sessions that were united may have more rows than that.
        emits = fired or rows >= self._early_rows
        if emits:
            rows, early_at = 0, None
        elif self.plan.early_ms is not None and early_at is None:
            early_at = ctx.now_ms + self.plan.early_ms
            ctx.timers.processing(early_at)
        if self._is_global and rows == 1:
            ctx.timers.processing(MAX_MS)
        changed = (start, rows, fired, early_at, *held)
        # The content is not compared: 0.0 equals -0.0.
        if held or changed != known:
            self.windows[end] = changed
        return bool(emits)

    def _emit(self, end: int, ctx: RowContext) -> Iterable[Row]:
        start, _, _, _, *held = self.windows[end]
        return self.results((start, end), tuple(held), ctx)

    # Sessions

    def _grow_session(self, start: int, end: int) -> tuple[Bounds, list[int]]:
        """Return the union of a session with those it overlaps or touches, and their ends."""
        ends = list(self.windows)
        met = []
        for known_end in ends[bisect_left(ends, start) :]:
            if self.windows[known_end][0] > end:
                break
            met.append(known_end)
        if not met:
            return (start, end), met
        # They are in order and apart from each other, so the first begins and the last ends all.
        return (min(start, self.windows[met[0]][0]), max(end, met[-1])), met

    def _unite(self, bounds: Bounds, met: Sequence[int], ctx: RowContext) -> None:
        """Replace the sessions that end at `met` by one with these bounds."""
        start, end = bounds
        known = [self.windows[known_end] for known_end in met]
        if len(known) == 1 and (known[0][0], met[0]) == bounds:
            return
        held = tuple(known[0][4:])
        for other in known[1:]:
            held = self.merge(held, tuple(other[4:]))
        early = [other[3] for other in known if other[3] is not None]
        # A session with a new end is not complete yet.
        fired = met[-1] == end and known[-1][2]
        for known_end in met:
            del self.windows[known_end]
        self.windows[end] = (
            start,
            sum(other[1] for other in known),
            fired,
            min(early, default=None),
            *held,
        )
        self._drop_timers([known_end for known_end in met if known_end != end], ctx)
        if met[-1] != end:
            self._set_timers(end, ctx)

    # Timers

    def on_timer(self, time_ms: int, ctx: RowContext) -> Any:  # type: ignore[override]
        results: list[Row] = []
        if ctx.timer_kind == ("event" if self._by_event else "processing"):
            lateness_ms = self.plan.allowed_lateness_ms
            complete = self._due(self._complete_ms, time_ms, 0)
            for end in complete:
                if not self.windows[end][2]:
                    results += self._complete(end, ctx)
            gone = self._due(self._removal_ms, time_ms, lateness_ms) if lateness_ms else complete
            for end in gone:
                self._remove(end)
        if self.plan.early_ms is not None and ctx.timer_kind == "processing":
            for end in [end for end, known in self.windows.items() if known[3] == time_ms]:
                results += self._fire(end, ctx, fired=self.windows[end][2])
        return results or None

    def on_timer_failed(self, time_ms: int, ctx: Context) -> None:
        # Windows whose time is over get no further timer.
        if ctx.timer_kind == ("event" if self._by_event else "processing"):
            for end in self._due(self._removal_ms, time_ms, self.plan.allowed_lateness_ms):
                self._remove(end)

    def _complete(self, end: int, ctx: RowContext) -> Iterable[Row]:
        if not self._is_global:
            return self._fire(end, ctx, fired=True)
        # The job is drained. It may go on later, and so may the window.
        return self._fire(end, ctx, fired=False) if self.windows[end][1] else ()

    def _fire(self, end: int, ctx: RowContext, *, fired: bool) -> Iterable[Row]:
        start, _, _, _, *held = self.windows[end]
        self.windows[end] = (start, 0, fired, None, *held)
        return self.results((start, end), tuple(held), ctx)

    def _remove(self, end: int) -> None:
        if self._is_global:
            return
        start = self.windows[end][0]
        del self.windows[end]
        self.remove_rows((start, end))

    def _complete_ms(self, end: int) -> int:
        return complete_ms(self._spec, end)

    def _removal_ms(self, end: int) -> int:
        return min(complete_ms(self._spec, end) + self.plan.allowed_lateness_ms, MAX_MS)

    def _due(self, when_ms: Callable[[int], int], time_ms: int, after_ms: int) -> list[int]:
        """Return the ends of the windows that a timer was set for."""
        until = (time_ms - after_ms) * 1000
        if self._is_aligned and time_ms < MAX_MS:  # At most one, and its end is known.
            return [until] if until in self.windows else []
        ends = list(self.windows)
        if time_ms < MAX_MS:
            ends = ends[bisect_left(ends, until - 1000) : bisect_left(ends, until + 1)]
        return [end for end in ends if when_ms(end) == time_ms]

    def _timers_of(self, end: int) -> set[int]:
        """Return the times when a window is complete, and when it is removed."""
        return {self._complete_ms(end), self._removal_ms(end)}

    def _set_timers(self, end: int, ctx: RowContext) -> None:
        if not self._is_global:
            register = ctx.timers.event if self._by_event else ctx.timers.processing
            for at_ms in self._timers_of(end):
                register(at_ms)

    def _drop_timers(self, ends: Iterable[int], ctx: RowContext) -> None:
        """Delete the timers of removed windows, unless other windows need them too."""
        stale = {at_ms for end in ends for at_ms in self._timers_of(end)}
        # Windows that wait only for their ends share no timer.
        if self.plan.allowed_lateness_ms or self.plan.early_ms is not None or MAX_MS in stale:
            for end, known in self.windows.items():
                stale -= self._timers_of(end)
                stale.discard(known[3])
        delete = ctx.timers.delete_event if self._by_event else ctx.timers.delete_processing
        for at_ms in stale:
            delete(at_ms)

    # Results

    def prefix(self, bounds: Bounds, ctx: RowContext) -> Row:
        """Return the first columns of every result: key, start, end."""
        key = (ctx.key,) if self.key_count == 1 else ctx.key
        return (*key, *self.times_of(bounds))

    def times_of(self, bounds: Bounds) -> tuple[dt.datetime | None, dt.datetime | None]:
        """Return start and end of a window; None where it has none."""
        return (None, None) if self._is_counted else window_times(bounds)


def name_states(states: dict[str, Declaration]) -> dict[str, Declaration]:
    """Give states that are made at run time their names, as class attributes have them."""
    for name, declaration in states.items():
        declaration.name = name
    return states


def window_times(bounds: Bounds) -> tuple[dt.datetime | None, dt.datetime | None]:
    """Return start and end as datetimes; None for the global window."""
    if bounds == FOREVER:
        return None, None
    return _datetime(bounds[0]), _datetime(bounds[1])


def _datetime(time_us: int) -> dt.datetime:
    # The bounds of the first and last rows that a datetime can hold lie outside its range.
    return _EPOCH + dt.timedelta(microseconds=max(_FIRST_US, min(time_us, _LAST_US)))
