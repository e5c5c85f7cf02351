"""A function called row by row, with the context and the state handles set to the row's key.

This loop is the hottest code there is: a microsecond here is a second per million rows.

Timers are due up to the epoch's watermark and clock. Where no row is older than the watermark
they come before the first row, and those that rows set after the last. Rows of other operators
may be older, and rows that have no watermark: there event timers come in time order with them.

Always true here:
- rows of a key are processed in the order they come; among event timers, all rows are;
- what gathered rows caused has left the slot before more are gathered;
- a timer is gone from the state before `on_timer` is called for it;
- `on_epoch_end` comes after all rows and timers, except timers that it sets itself;
- which timers are called, and in which order, depends on state, rows and the epoch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa

from cairn.backends.contract import Backend
from cairn.errors import FunctionError
from cairn.functions import KeyedProcess, Process, ends_epochs, hooks_of
from cairn.slot.context import NoKey
from cairn.slot.gather import Gather
from cairn.slot.reader import ConnectedReader, RowReader
from cairn.slot.timers import (
    KeyTimers,
    NoTimers,
    TimerIndex,
    UntimedKeyTimers,
    timer_text,
)
from cairn.slot.touched_keys import TouchedKeys

if TYPE_CHECKING:
    from cairn.slot.operator import Operator

PREFETCH_KEYS: Final = 1024
AGAIN_MAX: Final = 100_000
FOREVER: Final = 1 << 62

Kind = Literal["event", "processing"]

IN_BROADCAST = NoKey("process_broadcast()")

NO_KEY = NoTimers(
    "ctx.timers is used where no key is at hand\n"
    "  next: use it in process() or on_timer(): a timer belongs to a key"
)


class RecordRunner:
    """Runs a KeyedProcess or a Process."""

    def __init__(self, operator: Operator, function: KeyedProcess[Any] | Process[Any]) -> None:
        self._operator = operator
        self._function = function
        self.handles_late = hooks_of(function).handles_late
        self._reads_row_times = hooks_of(function).reads_row_times
        self._process_name = f"{hooks_of(function).called}()"
        spec = operator.spec
        inlets = spec.row_inlets
        self._process_row: Callable[[Any, Any], Any] = function.process
        self._reader: RowReader | ConnectedReader = RowReader(inlets[0])
        if inlets[0].name:
            self._reader = ConnectedReader(inlets)
            self._process_row = self._handle
            self._handlers = [getattr(function, f"on_{inlet.name}") for inlet in inlets]
        self._touched: TouchedKeys | None = None
        if ends_epochs(function):
            self._touched = TouchedKeys(operator.journal)
            self._process_row = self._touched.watch(self._process_row)
        self._inputs: Iterator[int] = iter(())
        self._input: int | None = None
        """The input of the current row, in connected streams."""
        broadcast = spec.broadcast_inlet
        self._broadcast_reader = None if broadcast is None else RowReader(broadcast)
        self._prefetches = type(operator.backend).prefetch is not Backend.prefetch
        self._timers = operator.timers
        if self._timers is None:
            self._key_timers: KeyTimers | NoTimers = _no_timers(function)
        elif spec.event_time is None:
            self._key_timers = UntimedKeyTimers(operator.context, self._timers, operator.journal)
        else:
            self._key_timers = KeyTimers(operator.context, self._timers, operator.journal)
        self._event_until = self._processing_until = -FOREVER
        """Timers up to here are due in this epoch."""
        self._fires_between_rows = False
        self._gather = Gather()

    def reset(self) -> None:
        self._gather.reset()
        if self._touched is not None:
            self._touched.clear()

    def begin_rows(self) -> None:
        operator = self._operator
        context = operator.context
        context.timers = self._key_timers
        timers = self._timers
        if timers is None:
            return
        timers.build()
        watermark_ms = context.watermark_ms
        self._event_until = -FOREVER if watermark_ms is None else watermark_ms
        self._processing_until = context.now_ms
        if operator.is_draining:
            self._event_until = FOREVER
        spec = operator.spec
        # Such rows may be older than the watermark without being late.
        self._fires_between_rows = (
            (spec.is_downstream or not spec.has_watermark)
            and spec.event_time is not None
            and self._event_until > -FOREVER
        )
        if self._fires_between_rows:
            self._fire("processing", timers.processing, self._processing_until)
        else:
            self._fire_due()

    def run(self, groups: pa.Array, times: pa.Array | None, rows: pa.StructArray) -> None:
        if self._fires_between_rows:
            self._process(groups, times, rows)
        elif self._gather.add(groups, times, rows):
            self.flush()

    def flush(self) -> None:
        gathered = self._gather.take()
        if gathered is not None:
            self._process(*gathered)

    def _process(self, groups: pa.Array, times: pa.Array | None, rows: pa.StructArray) -> None:
        group_list = groups.to_numpy().tolist()
        times_ms: Iterable[int | None] = repeat(None)
        if times is not None:
            times_ms = np.floor_divide(times.to_numpy(), 1000).tolist()
            if self._reads_row_times:
                self._operator.context.row_times_us = iter(times.to_numpy().tolist())
        row_tuples, keys = self._reader.read(rows)
        if isinstance(self._reader, ConnectedReader):
            self._inputs = iter(self._reader.inputs)
        operator = self._operator
        if self._prefetches:
            keys = list(keys)
            operator.backend.prefetch(group_list, keys)
        scoped: Iterator[Any] = zip(group_list, keys, times_ms, row_tuples, strict=False)
        if self._fires_between_rows:
            assert self._timers is not None
            scoped = self._with_timers(scoped, self._timers.event)
        self._run_rows(scoped, len(group_list))

    def _run_rows(self, scoped: Iterator[Any], remaining: int) -> None:
        """Call the function for `remaining` rows; `scoped` has group, key, time and row of each."""
        operator = self._operator
        context = operator.context
        main = operator.main
        process = self._process_row
        emit = main.rows.append
        row: Any = None
        try:
            while remaining > 0:
                rows_max = main.rows_max
                # The loop assigns straight to the context: the cheapest way to set the scope.
                for context.group, context.key, context.event_time_ms, row in islice(
                    scoped, rows_max
                ):
                    result = process(row, context)
                    if result is None:
                        continue
                    if type(result) is tuple:
                        emit(result)
                    else:
                        operator.main.emit_all(self._where, result)
                remaining -= rows_max
                for outlet in operator.outlets:
                    outlet.flush()
        except FunctionError as error:
            raise operator.blame.locate(self._where, error, row) from error
        except Exception as error:
            raise operator.blame.describe(self._where, error, row) from error

    def _handle(self, row: Any, context: Any) -> Any:
        """A row of connected streams, to the handler of the one it is of."""
        self._input = next(self._inputs)
        return self._handlers[self._input](row, context)

    @property
    def _where(self) -> str:
        """The method that is called for a row, as errors name it."""
        name = self._input_name
        return self._process_name if name is None else f"on_{name}()"

    @property
    def _input_name(self) -> str | None:
        return None if self._input is None else self._operator.spec.inlets[self._input].name

    def run_broadcast(self, times: pa.Array | None, rows: pa.StructArray) -> None:
        """Rows that all subtasks get, with no key at hand."""
        operator = self._operator
        context = operator.context
        assert self._broadcast_reader is not None, "rows come by inlets that are there"
        times_ms: Iterable[int | None] = repeat(None)
        if times is not None:
            times_ms = (None if t is None else t // 1000 for t in times.to_pylist())
        context.key, context.group, context.timers = None, IN_BROADCAST, NO_KEY
        made, _ = self._broadcast_reader.read(rows)
        self._run_broadcast_rows(zip(made, times_ms, strict=False))
        context.timers = self._key_timers
        for outlet in operator.outlets:
            outlet.flush()

    def _run_broadcast_rows(self, timed: Iterator[Any]) -> None:
        """Call the function for rows, each with its time."""
        operator = self._operator
        context = operator.context
        row: Any = None
        try:
            for row, context.event_time_ms in timed:
                result = self._function.process_broadcast(row, context)
                if result is not None:
                    operator.main.emit_all("process_broadcast()", result)
        except FunctionError as error:
            raise operator.blame.locate("process_broadcast()", error, row) from error
        except Exception as error:
            raise operator.blame.describe("process_broadcast()", error, row) from error

    def end_rows(self) -> None:
        self.flush()
        if self._timers is not None:
            if self._operator.is_draining:
                # After the rows that operators before this one have emitted by draining.
                self._processing_until = FOREVER
            self._fire_due()
        if self._touched is not None:
            self._end_keys(self._touched.take())
        if self._timers is not None:
            self._timers.release()
        self._operator.context.timers = NO_KEY

    def _end_keys(self, touched: list[tuple[int, Any]]) -> None:
        """Call `on_epoch_end` for these keys, then `on_timer` for timers that are due by that."""
        operator = self._operator
        operator.context.event_time_ms = None
        for start in range(0, len(touched), PREFETCH_KEYS):
            chunk = touched[start : start + PREFETCH_KEYS]
            if self._prefetches:
                operator.backend.prefetch(*zip(*chunk, strict=True))
            self._call_epoch_end(chunk)
            operator.flush()
        if self._timers is not None:
            self._fire_due()

    def _call_epoch_end(self, touched: list[tuple[int, Any]]) -> None:
        operator = self._operator
        context = operator.context
        assert isinstance(self._function, KeyedProcess), "only these have on_epoch_end"
        on_epoch_end = self._function.on_epoch_end
        try:
            for context.group, context.key in touched:
                result = on_epoch_end(context)
                if result is not None:
                    operator.main.emit_all("on_epoch_end()", result)
        except FunctionError as error:
            raise operator.blame.locate("on_epoch_end()", error) from error
        except Exception as error:
            raise operator.blame.describe("on_epoch_end()", error, has_key=True) from error

    def _with_timers(self, scoped: Iterator[Any], index: TimerIndex) -> Iterator[Any]:
        """The rows; before each one, the event timers up to its time that are due."""
        times, until = index.times, self._event_until
        for row in scoped:
            if times and times[0] <= row[2] and times[0] <= until:
                self._fire("event", index, min(row[2], until))
            yield row

    def _fire_due(self) -> None:
        """All that is due, and what becomes due by that."""
        timers = self._timers
        assert timers is not None, "only functions with on_timer have timers"
        fired = True
        while fired:
            fired = self._fire("event", timers.event, self._event_until)
            fired |= self._fire("processing", timers.processing, self._processing_until)

    def _fire(self, kind: Kind, index: TimerIndex, until: int) -> bool:
        """Call `on_timer` for the timers up to a time, in order; whether there were any."""
        taken = index.take(until)
        if taken is None:
            return False
        operator = self._operator
        context = operator.context
        timers = self._timers
        assert timers is not None, "only functions with on_timer have timers"
        # A function that sets a timer whenever one is due would keep a drain from ending.
        timers.event.is_waiting = timers.processing.is_waiting = operator.is_draining
        context.timer_kind = kind
        again = prefetched = unflushed = 0
        last: int | None = None
        while taken is not None:
            time_ms, due = taken
            again = again + 1 if time_ms == last else 0
            last = time_ms
            if again == AGAIN_MAX:
                raise self._endless(kind, time_ms)
            context.event_time_ms = time_ms if kind == "event" else None
            if self._prefetches:
                prefetched -= len(due)
                if prefetched < 0:
                    prefetched = self._prefetch(due, index, until)
            for start in range(0, len(due), PREFETCH_KEYS):
                chunk = due[start : start + PREFETCH_KEYS]
                if self._prefetches and start:
                    operator.backend.prefetch(*zip(*chunk, strict=True))
                self._call(kind, time_ms, chunk)
                unflushed += len(chunk)
                if unflushed >= PREFETCH_KEYS:
                    unflushed = 0
                    operator.flush()
            taken = index.take(until)
        operator.flush()
        timers.event.is_waiting = timers.processing.is_waiting = False
        context.timer_kind = None
        context.event_time_ms = None
        return True

    def _call(self, kind: Kind, time_ms: int, due: list[tuple[int, Any]]) -> None:
        operator = self._operator
        context = operator.context
        assert isinstance(self._function, KeyedProcess), "timers belong to keys"
        on_timer = self._function.on_timer
        emit = operator.main.rows.append
        try:
            for context.group, context.key in due:
                result = on_timer(time_ms, context)
                if result is None:
                    continue
                if type(result) is tuple:
                    emit(result)
                else:
                    operator.main.emit_all("on_timer()", result)
        except FunctionError as error:
            timer = timer_text(kind, time_ms)
            raise operator.blame.locate("on_timer()", error, timer=timer) from error
        except Exception as error:
            raise operator.blame.describe(
                "on_timer()", error, timer=timer_text(kind, time_ms)
            ) from error

    def _prefetch(self, due: list[tuple[int, Any]], index: TimerIndex, until: int) -> int:
        """Ask for the keys that are taken, and with them for those that come next."""
        first = due[:PREFETCH_KEYS]
        groups, keys = index.upcoming(until, PREFETCH_KEYS - len(first))
        self._operator.backend.prefetch(
            [group for group, _ in first] + groups, [key for _, key in first] + keys
        )
        return len(keys)

    def _endless(self, kind: Kind, time_ms: int) -> FunctionError:
        uid, timer = self._operator.spec.uid, timer_text(kind, time_ms)
        return FunctionError(
            f"on_timer() of operator {uid!r} has set timers for the time it was called for "
            f"{AGAIN_MAX} times in a row\n  timer: {timer}\n"
            "  next: set the next one for a later time",
            operator=uid,
            timer=timer,
        )


def _no_timers(function: KeyedProcess[Any] | Process[Any]) -> NoTimers:
    """Return an object that raises when a function without timers uses them."""
    name = type(function).__name__
    if isinstance(function, Process):
        return NoTimers(
            f"{name} uses a timer, but is a Process: it has none, a timer belongs to a key\n"
            "  next: use key_by(...) and a KeyedProcess"
        )
    return NoTimers(
        f"{name} uses a timer, but does not say what happens when it is due\n"
        f"  next: give {name} a method on_timer(self, time_ms, ctx)"
    )
