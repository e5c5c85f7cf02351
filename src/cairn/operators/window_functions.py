"""Results of windows: one row by `reduce`, any rows by a WindowFunction.

    windows    the open windows of a key; `reduce` keeps its row there
    rows       the rows for a WindowFunction: each once, however many windows it is in, by its
               pane and its number there
    panes      the number of rows in each pane

A pane is a stretch of time: a tumbling window, a slide, a gap; of count windows it is a run of
rows. So the rows of a window are found without reading those of others.

Always true here:
- rows are stored in their type, never pickled;
- a row is kept until the last of its windows is removed.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import pyarrow as pa

from cairn.errors import PlanError
from cairn.functions import Context, Function, find_states
from cairn.operators.context import RowContext
from cairn.operators.window_process import (
    Content,
    WindowPlan,
    WindowProcess,
    name_states,
)
from cairn.state import Declaration, Map
from cairn.types import Row, SchemaLike, parse_schema
from cairn.user_code import check_arguments
from cairn.windows import Bounds, Count, Session, Sliding

WINDOW_COLUMNS = ("window_start", "window_end")


class Window(NamedTuple):
    """A stretch of time, without its end. The global window has neither bound."""

    start: dt.datetime | None
    end: dt.datetime | None


class WindowFunction(Function):
    """Code that sees all rows of a window together. Subclass it and define `process`."""

    def process(self, key: Any, window: Window, rows: Iterable[Row], ctx: Context) -> Any:
        """Return or yield rows (tuples, dicts or row objects), or nothing.

        `rows` are in the order of their event times. Every result row begins with the key and
        the start and end of the window.
        """
        raise PlanError(f"{type(self).__name__} defines no process(key, window, rows, ctx)")


class WindowReduce(WindowProcess):
    """Keeps one row per window: the reduction of all rows so far."""

    def __init__(
        self,
        plan: WindowPlan,
        schema: pa.Schema,
        keys: Sequence[str],
        reduce: Callable[[Row, Row], Row],
    ) -> None:
        super().__init__(plan, schema, keys)
        self.reduce = reduce
        # Windows over windows have bounds of their own.
        left_out = {*keys, *WINDOW_COLUMNS}
        self._rest = [i for i, name in enumerate(schema.names) if name not in left_out]
        self.schema = result_schema(schema, keys, [schema.field(i) for i in self._rest])

    def content_fields(self) -> list[pa.Field]:
        return [pa.field("row", self.rows_type)]

    def first(self, row: Row) -> Content:
        return (row,)

    def merge(self, held: Content, more: Content) -> Content:
        reduced = self.reduce(held[0], more[0])
        if reduced is None:
            raise TypeError("the function given to reduce() returned None; expected a row")
        return (reduced,)

    def results(self, bounds: Bounds, held: Content, ctx: RowContext) -> Iterable[Row]:
        (row,) = held
        return [(*self.prefix(bounds, ctx), *(row[i] for i in self._rest))]


class WindowApply(WindowProcess):
    """Keeps the rows themselves, for a WindowFunction."""

    rows: Map[Any, Any]
    panes: Map[int, int]

    def __init__(
        self,
        plan: WindowPlan,
        schema: pa.Schema,
        keys: Sequence[str],
        function: WindowFunction,
        declared: SchemaLike,
    ) -> None:
        super().__init__(plan, schema, keys)
        self.function = function
        self._names = parse_schema(declared).names
        self.schema = result_schema(schema, keys, list(parse_schema(declared)))
        spec = plan.windows
        self._step_us = 0
        """From one pane to the next; 0 if a window has one pane."""
        if isinstance(spec, Sliding):
            self._step_us = spec.slide_ms * 1000
        elif isinstance(spec, Count):
            self._step_us = min(spec.every, spec.size)
        elif isinstance(spec, Session):
            # Rows of two sessions are further apart than the gap.
            self._step_us = spec.gap_ms * 1000
        self._is_session = isinstance(spec, Session)

    def declare_state(self) -> dict[str, Declaration]:
        place = pa.struct([pa.field("pane", pa.int64()), pa.field("number", pa.int64())])
        timed = pa.struct([pa.field("time", pa.int64()), pa.field("row", self.rows_type)])
        more: dict[str, Declaration] = {"rows": Map(place, timed), "panes": Map("bigint", "bigint")}
        return super().declare_state() | name_states(more)

    def open(self, ctx: Context) -> None:
        self.function.open(ctx)

    def on_epoch_committed(self, epoch: int) -> None:
        self.function.on_epoch_committed(epoch)

    def close(self) -> None:
        self.function.close()

    def take(self, row: Row, time_us: int, last: Bounds) -> None:
        pane = time_us - time_us % self._step_us if self._is_session else last[0]
        number = self.panes.get(pane, 0)
        self.rows[(pane, number)] = (time_us, row)
        self.panes[pane] = number + 1

    def results(self, bounds: Bounds, held: Content, ctx: RowContext) -> Iterable[Row]:
        start, end = bounds
        timed = [
            self.rows[(pane, number)]
            for pane in self._panes(bounds)
            for number in range(self.panes.get(pane, 0))
        ]
        # Rows of one time are in one pane, and stay in the order they came in.
        timed.sort(key=itemgetter(0))
        rows = [row for time_us, row in timed if start <= time_us < end]
        result = self.function.process(ctx.key, Window(*self.times_of(bounds)), rows, ctx)
        prefix = self.prefix(bounds, ctx)
        return [self._with_prefix(prefix, row) for row in _as_rows(result)]

    def remove_rows(self, bounds: Bounds) -> None:
        # Later windows have the other panes of a sliding window too.
        for pane in self._panes(bounds) if self._is_session else bounds[:1]:
            for number in range(self.panes.pop(pane, 0)):
                del self.rows[(pane, number)]

    def _panes(self, bounds: Bounds) -> Iterable[int]:
        """Return the panes of a window, in order; some may have no rows."""
        start, end = bounds
        step = self._step_us
        if self._is_session:
            # Up to the last row: a pane after it may belong to another session.
            return range(start - start % step, end - step + 1, step)
        return range(start, end, step) if step else (start,)

    def _with_prefix(self, prefix: Row, row: Any) -> Row:
        """Return a user's row as a tuple after key and window."""
        if dataclasses.is_dataclass(row) and not isinstance(row, type):
            row = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        elif fields := getattr(row, "_fields", None) or getattr(row, "__fields__", None):
            if list(fields) != self._names and set(fields) == set(self._names):
                row = dict(zip(fields, row, strict=True))
        if isinstance(row, dict):
            unknown = sorted(str(name) for name in row.keys() - set(self._names))
            if unknown:
                raise TypeError(
                    f"process() of windows returned a row with {unknown[0]!r}; "
                    f"the declared columns are {', '.join(self._names)}"
                )
            row = [row.get(name) for name in self._names]
        elif not isinstance(row, tuple):
            raise TypeError(f"process() of windows returned {row!r}; expected a tuple, dict or row")
        return (*prefix, *row)


def check_window_function(function: object, uid: str) -> None:
    """Refuse a function that cannot run over windows."""
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, type):
        raise PlanError(f"operator {uid!r}: give an object, {name}(), not the class")
    if not isinstance(function, WindowFunction):
        raise PlanError(
            f"operator {uid!r}: {name} is not a WindowFunction\n"
            "  next: subclass cairn.WindowFunction and define process(key, window, rows, ctx)"
        )
    if type(function).process is WindowFunction.process:
        raise PlanError(f"operator {uid!r}: {name} has no process(key, window, rows, ctx)")
    what = f"operator {uid!r}: {name}.process"
    check_arguments(function.process, what, "key", "window", "rows", "ctx")
    if states := find_states(function):
        raise PlanError(
            f"operator {uid!r}: {name} declares state {', '.join(states)}; a WindowFunction has "
            "only the rows of its window\n"
            "  next: use .key_by(...).process(...) with state and timers"
        )


def result_schema(schema: pa.Schema, keys: Sequence[str], columns: Sequence[pa.Field]) -> pa.Schema:
    """Return the schema of results: key columns, start and end of the window, these columns."""
    taken = [*keys, *WINDOW_COLUMNS]
    twice = [field.name for field in columns if field.name in taken]
    twice += [name for name in keys if name in WINDOW_COLUMNS]
    if twice:
        raise PlanError(
            f"results of windows begin with {', '.join(taken)}; {twice[0]!r} would be there twice\n"
            "  next: leave it out, or give it another name",
            column=twice[0],
        )
    bounds = [pa.field(name, pa.timestamp("us", "UTC")) for name in WINDOW_COLUMNS]
    return pa.schema([*(schema.field(name) for name in keys), *bounds, *columns])


def _as_rows(result: Any) -> Iterator[Any]:
    """Return an iterator over the rows that a function returned or yields."""
    if result is None:
        return iter(())
    is_row = isinstance(result, tuple | dict) or dataclasses.is_dataclass(result)
    if is_row or isinstance(result, str | bytes) or not isinstance(result, Iterable):
        return iter((result,))
    return iter(result)
