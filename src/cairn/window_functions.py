"""What is made of the rows of a window: one row by `reduce`, any rows by a WindowFunction.

    windows    the open windows of a key; `reduce` keeps its row there
    rows       what a WindowFunction will see: each row once, by its time, however many windows
               it is in
    arrivals   how many rows were kept, to tell those of one time apart

Always true here:
- rows are stored in their type, never pickled;
- a row is kept until the last window that it is in is removed.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from cairn.errors import PlanError
from cairn.functions import Context, Function, declared_state
from cairn.state import Declaration, Map, Value
from cairn.types import parse_schema
from cairn.window_process import WindowPlan, WindowProcess, named, window_times
from cairn.windows import Bounds, Sliding

WINDOW_COLUMNS = ("window_start", "window_end")


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


class WindowReduce(WindowProcess):
    """Keeps one row per window: what `reduce` has made of all so far."""

    def __init__(
        self,
        plan: WindowPlan,
        schema: pa.Schema,
        keys: Sequence[str],
        reduce: Callable[[Any, Any], Any],
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
        plan: WindowPlan,
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
        return super().made_state() | named(more)

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
        result = self.function.process(ctx.key, Window(*window_times(bounds)), rows, ctx)
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


def _as_rows(result: Any) -> Iterator[Any]:
    """The rows that a function returned or yields."""
    if result is None:
        return iter(())
    is_row = isinstance(result, tuple | dict) or dataclasses.is_dataclass(result)
    if is_row or isinstance(result, str | bytes) or not isinstance(result, Iterable):
        return iter((result,))
    return iter(result)
