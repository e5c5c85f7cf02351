"""The functions that run windows row by row: what they hold per key, and when they emit.

    windows    the windows of the key that are open, by their ends: `reduce` keeps the row there
    rows       what `process` keeps: each row once, by time, however many windows it is in
    arrivals   how many rows `process` has kept, to tell those of one time apart

A window emits when it is complete, then once more for every late row until it is removed,
`allowed_lateness` after its end; and before it is complete, if there is an early trigger.
Each result is of all rows so far. Everything else is the job of timers: one for the end of a
window, one for its removal, one for the early result by the clock.

Always true here:
- a window that is in state has a timer for what happens to it next;
- a row is judged by its windows: it is late when all of them are gone;
- sessions of a key neither overlap nor touch.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import GeneratorType
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from cairn.durations import MAX_MS
from cairn.errors import PlanError
from cairn.functions import Context, Function, KeyedProcess, declared_state
from cairn.state import Declaration, Map, Value
from cairn.types import parse_schema
from cairn.windows import FOREVER, Bounds, Global, Session, Sliding, WindowSpec

LATE = "late"
"""The side output of late rows, as all operators have it."""
WINDOW_COLUMNS = ("window_start", "window_end")
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_FIRST_US = (dt.datetime.min.replace(tzinfo=dt.UTC) - _EPOCH) // dt.timedelta(microseconds=1)
_LAST_US = (dt.datetime.max.replace(tzinfo=dt.UTC) - _EPOCH) // dt.timedelta(microseconds=1)


class Window(NamedTuple):
    """A stretch of time; the end does not belong to it. The global window has neither bound."""

    start: dt.datetime | None
    end: dt.datetime | None


class WindowFunction(Function):
    """Code that sees all rows of a window together. Subclass it and define `process`."""

    def process(self, key: Any, window: Window, rows: Iterable[Any], ctx: Context) -> Any:
        """Return or yield rows (tuples, dicts or row objects), or nothing.

        `rows` come in the order of their event times. Key, start and end of the window stand
        before every row that comes out.
        """
        raise PlanError(f"{type(self).__name__} defines no process(key, window, rows, ctx)")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a windowed stream says of its windows."""

    windows: WindowSpec
    allowed_lateness_ms: int = 0
    early_rows: int | None = None
    early_ms: int | None = None

    @property
    def has_late_rows(self) -> bool:
        return self.windows.time == "event" and not isinstance(self.windows, Global)

    def __post_init__(self) -> None:
        if self.allowed_lateness_ms and self.windows.time == "processing":
            raise PlanError(
                "allowed_lateness of windows by processing time: no row is late there\n"
                "  next: leave it out, or take windows by event time"
            )
        if self.early_rows is not None and self.early_rows < 1:
            raise PlanError(
                f"early_every_rows of windows is {self.early_rows}\n  expected: at least 1"
            )
        if self.early_ms is not None and self.early_ms < 1:
            raise PlanError(f"early_every of windows is {self.early_ms} ms\n  expected: over 0")


class WindowProcess(KeyedProcess[Any]):
    """What all functions of windows share. `windows` is the state of the key at hand."""

    handles_late: ClassVar[bool] = True
    reads_times_us: ClassVar[bool] = True
    windows: Map[int, Any]

    def __init__(self, plan: Plan, schema: pa.Schema, keys: Sequence[str]) -> None:
        self.plan = plan
        self.rows_type = pa.struct(list(schema))
        self.key_count = len(keys)
        self.result_time = None if isinstance(plan.windows, Global) else "window_end"
        self._spec = plan.windows
        self._is_session = isinstance(plan.windows, Session)
        self._is_global = isinstance(plan.windows, Global)
        # The global window ends with the job, and that is for either clock to say.
        self._by_event = plan.windows.time == "event" and not self._is_global
        self._lateness_us = plan.allowed_lateness_ms * 1000
        self._counts = plan.early_rows is not None or self._is_global

    def made_state(self) -> dict[str, Declaration]:
        fields = [
            pa.field("start", pa.int64()),
            pa.field("rows", pa.int64()),
            pa.field("fired", pa.bool_()),
            pa.field("early_at", pa.int64()),
            *self.held_fields(),
        ]
        return _named({"windows": Map("bigint", pa.struct(fields))})

    # What a function holds for a window

    def held_fields(self) -> list[pa.Field]:
        """What stands in a window's state beyond what it is to do next."""
        return []

    def take(self, row: Any, time_us: int) -> None:
        """A row that is in some window."""

    def first(self, row: Any) -> tuple[Any, ...]:
        """What is held of a window with one row."""
        return ()

    def merge(self, held: Sequence[Any], more: Sequence[Any]) -> tuple[Any, ...]:
        """What is held of two windows that become one, or of a window and its next row."""
        return ()

    def results(self, bounds: Bounds, held: Sequence[Any], ctx: Any) -> Iterable[Any]:
        """The rows that a window comes to."""
        raise NotImplementedError

    def removed(self, bounds: Bounds) -> None:
        """A window is gone."""

    # Rows

    def process(self, row: Any, ctx: Any) -> Any:
        time_us: int = ctx.now_ms * 1000
        if ctx.times_us is not None:
            event_us = next(ctx.times_us)
            if self._spec.time == "event":
                time_us = event_us
        bounds = self._spec.assign(time_us)
        met: list[int] = []
        if self._is_session:
            session, met = self._met(*bounds[0])
            bounds = [session]
        if self._by_event and ctx.late_ms is not None:
            gone_us = ctx.late_ms * 1000 - self._lateness_us
            bounds = [(start, end) for start, end in bounds if end > gone_us]
            if not bounds:
                ctx.count_late(1)
                if LATE in ctx.sides:
                    ctx.output(LATE, row)
                return None
        if met:
            self._unite(bounds[0], met, ctx)
        self.take(row, time_us)
        results: list[Any] = []
        for start, end in bounds:
            if self._add(start, end, row, ctx):
                results += self._emitted(end, ctx)
        return results or None

    def _add(self, start: int, end: int, row: Any, ctx: Any) -> bool:
        """A row more in a window; whether that makes it emit."""
        known = self.windows.get(end)
        if known is None:
            self._set_timers(end, ctx)
            rows, fired, early_at, held = 0, False, None, self.first(row)
        else:
            _, rows, fired, early_at, *before = known
            held = self.merge(before, self.first(row))
        if self._counts:
            rows += 1
        emits = fired or rows == self.plan.early_rows
        if emits:
            rows, early_at = 0, None
        elif self.plan.early_ms is not None and early_at is None:
            early_at = ctx.now_ms + self.plan.early_ms
            ctx.timers.processing(early_at)
        if self._is_global and rows == 1:
            ctx.timers.processing(MAX_MS)
        changed = (start, rows, fired, early_at, *held)
        if changed != known:
            self.windows[end] = changed
        return bool(emits)

    def _emitted(self, end: int, ctx: Any) -> Iterable[Any]:
        start, _, _, _, *held = self.windows[end]
        return self.results((start, end), held, ctx)

    # Sessions

    def _met(self, start: int, end: int) -> tuple[Bounds, list[int]]:
        """What a session becomes with those it overlaps or touches, and the ends of these."""
        met = [
            known_end
            for known_end, known in self.windows.items()
            if known[0] <= end and start <= known_end
        ]
        if not met:
            return (start, end), met
        # In order, and apart from each other: the first begins and the last ends them all.
        return (min(start, self.windows[met[0]][0]), max(end, met[-1])), met

    def _unite(self, bounds: Bounds, met: Sequence[int], ctx: Any) -> None:
        """Make the sessions that a row has met one, with these bounds."""
        start, end = bounds
        known = [self.windows[known_end] for known_end in met]
        if len(known) == 1 and (known[0][0], met[0]) == bounds:
            return
        held = tuple(known[0][4:])
        for other in known[1:]:
            held = self.merge(held, other[4:])
        early = [other[3] for other in known if other[3] is not None]
        # With a new end it is a window that has not come to its end yet.
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

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        results: list[Any] = []
        if self._is_global:
            if time_ms == MAX_MS and FOREVER[1] in self.windows and self.windows[FOREVER[1]][1]:
                results += self._fire(FOREVER[1], ctx, fired=False)
        elif ctx.timer_kind == self._spec.time:
            for end in self._ending(time_ms):
                if not self.windows[end][2]:
                    results += self._fire(end, ctx, fired=True)
            for end in self._ending(time_ms - self.plan.allowed_lateness_ms):
                self._remove(end)
        if self.plan.early_ms is not None and ctx.timer_kind == "processing":
            for end in [end for end, known in self.windows.items() if known[3] == time_ms]:
                results += self._fire(end, ctx, fired=self.windows[end][2])
        return results or None

    def _fire(self, end: int, ctx: Any, *, fired: bool) -> Iterable[Any]:
        start, _, _, _, *held = self.windows[end]
        self.windows[end] = (start, 0, fired, None, *held)
        return self.results((start, end), held, ctx)

    def _remove(self, end: int) -> None:
        start = self.windows[end][0]
        del self.windows[end]
        self.removed((start, end))

    def _ending(self, time_ms: int) -> list[int]:
        """The ends of the windows that a timer of this time was set for."""
        if self._is_session:
            return [end for end in self.windows if _timer_ms(end) == time_ms]
        return [time_ms * 1000] if time_ms * 1000 in self.windows else []

    def _timers_of(self, end: int) -> set[int]:
        """The times when a window is complete, and when it is removed."""
        at_ms = _timer_ms(end)
        return {at_ms, at_ms + self.plan.allowed_lateness_ms}

    def _set_timers(self, end: int, ctx: Any) -> None:
        if not self._is_global:
            register = ctx.timers.event if self._by_event else ctx.timers.processing
            for at_ms in self._timers_of(end):
                register(at_ms)

    def _drop_timers(self, ends: Iterable[int], ctx: Any) -> None:
        """Those of windows that are no more, unless others have timers for the same time."""
        stale = {at_ms for end in ends for at_ms in self._timers_of(end)}
        for end, known in self.windows.items():
            stale -= self._timers_of(end)
            stale.discard(known[3])
        delete = ctx.timers.delete_event if self._by_event else ctx.timers.delete_processing
        for at_ms in stale:
            delete(at_ms)

    # Results

    def prefix(self, bounds: Bounds, ctx: Any) -> tuple[Any, ...]:
        """What stands before every result: key, start, end."""
        key = (ctx.key,) if self.key_count == 1 else ctx.key
        return (*key, *_window(bounds))


class WindowReduce(WindowProcess):
    """Keeps one row per window: what `reduce` has made of all so far."""

    def __init__(
        self, plan: Plan, schema: pa.Schema, keys: Sequence[str], reduce: Callable[[Any, Any], Any]
    ) -> None:
        super().__init__(plan, schema, keys)
        self.reduce = reduce
        # A window of windows has bounds of its own.
        left_out = {*keys, *WINDOW_COLUMNS}
        self._rest = [i for i, name in enumerate(schema.names) if name not in left_out]
        self.schema = result_schema(schema, keys, [schema.field(i) for i in self._rest])

    def held_fields(self) -> list[pa.Field]:
        return [pa.field("row", self.rows_type)]

    def first(self, row: Any) -> tuple[Any, ...]:
        return (row,)

    def merge(self, held: Sequence[Any], more: Sequence[Any]) -> tuple[Any, ...]:
        reduced = self.reduce(held[0], more[0])
        if reduced is None:
            raise TypeError("the function given to reduce() returned None; expected a row")
        return (reduced,)

    def results(self, bounds: Bounds, held: Sequence[Any], ctx: Any) -> Iterable[Any]:
        (row,) = held
        return [(*self.prefix(bounds, ctx), *(row[i] for i in self._rest))]


class WindowApply(WindowProcess):
    """Keeps the rows themselves, for a WindowFunction to see them all."""

    rows: Map[Any, Any]
    arrivals: Value[int]

    def __init__(
        self,
        plan: Plan,
        schema: pa.Schema,
        keys: Sequence[str],
        function: WindowFunction,
        declared: Any,
    ) -> None:
        super().__init__(plan, schema, keys)
        self.function = function
        self._names = parse_schema(declared).names
        self.schema = result_schema(schema, keys, list(parse_schema(declared)))
        self._slide_us = plan.windows.slide_ms * 1000 if isinstance(plan.windows, Sliding) else None

    def made_state(self) -> dict[str, Declaration]:
        place = pa.struct([pa.field("time", pa.int64()), pa.field("arrival", pa.int64())])
        more: dict[str, Declaration] = {
            "rows": Map(place, self.rows_type),
            "arrivals": Value("bigint"),
        }
        return super().made_state() | _named(more)

    def open(self, ctx: Context) -> None:
        self.function.open(ctx)

    def on_epoch_committed(self, epoch: int) -> None:
        self.function.on_epoch_committed(epoch)

    def close(self) -> None:
        self.function.close()

    def take(self, row: Any, time_us: int) -> None:
        arrival = self.arrivals.get(0)
        assert arrival is not None, "there is a default"
        self.rows[(time_us, arrival)] = row
        self.arrivals.set(arrival + 1)

    def results(self, bounds: Bounds, held: Sequence[Any], ctx: Any) -> Iterable[Any]:
        rows = map(self.rows.__getitem__, self._places(bounds))
        result = self.function.process(ctx.key, Window(*_window(bounds)), rows, ctx)
        prefix = self.prefix(bounds, ctx)
        return [self._placed(prefix, row) for row in _as_rows(result)]

    def removed(self, bounds: Bounds) -> None:
        start, end = bounds
        if self._slide_us is not None:
            end = start + self._slide_us  # The others are in later windows, too.
        for place in self._places((start, end)):
            del self.rows[place]
        if not self.windows:
            self.arrivals.clear()

    def _places(self, bounds: Bounds) -> list[Any]:
        """Where the rows of a stretch of time are, in order."""
        places: list[Any] = list(self.rows)
        start, end = (bisect_left(places, (bound,)) for bound in bounds)
        return places[start:end]

    def _placed(self, prefix: tuple[Any, ...], row: Any) -> Any:
        """A row of the user's with key and window before it, as a tuple."""
        if dataclasses.is_dataclass(row) and not isinstance(row, type):
            row = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        elif fields := getattr(row, "_fields", None) or getattr(row, "__fields__", None):
            if list(fields) != self._names and set(fields) == set(self._names):
                row = dict(zip(fields, row, strict=True))
        if isinstance(row, dict):
            unknown = sorted(str(name) for name in row.keys() - set(self._names))
            if unknown:
                raise TypeError(
                    f"process() of windows gave a row with {unknown[0]!r}; "
                    f"declared are {', '.join(self._names)}"
                )
            row = [row.get(name) for name in self._names]
        elif not isinstance(row, tuple):
            raise TypeError(f"process() of windows gave {row!r}; expected a tuple, dict or row")
        return (*prefix, *row)


def check_window_function(function: Any, uid: str) -> None:
    """Refuse what cannot run over windows."""
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, type):
        raise PlanError(f"operator {uid!r}: give an object, {name}(), not the class")
    if not isinstance(function, WindowFunction):
        raise PlanError(
            f"operator {uid!r}: {name} is no WindowFunction\n"
            "  next: subclass cairn.WindowFunction and define process(key, window, rows, ctx)"
        )
    if type(function).process is WindowFunction.process:
        raise PlanError(f"operator {uid!r}: {name} has no process(key, window, rows, ctx)")
    if states := declared_state(function):
        raise PlanError(
            f"operator {uid!r}: {name} declares state {', '.join(states)}; a WindowFunction has "
            "its window's rows and nothing else\n"
            "  next: use .key_by(...).process(...) with state and timers"
        )


def result_schema(schema: pa.Schema, keys: Sequence[str], columns: Sequence[pa.Field]) -> pa.Schema:
    """What windows emit: key columns, start and end of the window, then these columns."""
    taken = [*keys, *WINDOW_COLUMNS]
    twice = [field.name for field in columns if field.name in taken]
    twice += [name for name in keys if name in WINDOW_COLUMNS]
    if twice:
        raise PlanError(
            f"results of windows have {', '.join(taken)} before all else; {twice[0]!r} would be "
            "there twice\n  next: leave it out, or give it another name",
            column=twice[0],
        )
    bounds = [pa.field(name, pa.timestamp("us", "UTC")) for name in WINDOW_COLUMNS]
    return pa.schema([*(schema.field(name) for name in keys), *bounds, *columns])


def _named(states: dict[str, Declaration]) -> dict[str, Declaration]:
    for name, declaration in states.items():
        declaration.name = name
    return states


def _as_rows(result: Any) -> Iterator[Any]:
    """The rows that a function returned or yields."""
    if result is None:
        return iter(())
    is_one = isinstance(result, tuple | dict) or dataclasses.is_dataclass(result)
    if not is_one and isinstance(result, GeneratorType | Iterable):
        if not isinstance(result, str | bytes):
            return iter(result)
    return iter((result,))


def _timer_ms(end_us: int) -> int:
    """The first millisecond that is not before the end."""
    return -(-end_us // 1000)


def _window(bounds: Bounds) -> tuple[dt.datetime | None, dt.datetime | None]:
    if bounds == FOREVER:
        return None, None
    return _datetime(bounds[0]), _datetime(bounds[1])


def _datetime(time_us: int) -> dt.datetime:
    # Bounds of rows at the ends of Python's calendar lie beyond it.
    return _EPOCH + dt.timedelta(microseconds=max(_FIRST_US, min(time_us, _LAST_US)))
