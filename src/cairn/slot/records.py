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

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, repeat
from operator import length_hint
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.table import ColumnTable
from cairn.backends.contract import Backend
from cairn.backends.handles.framed import FRAME_ROWS
from cairn.errors import CairnError, FunctionError
from cairn.functions import KeyedProcess, Process, ends_epochs, hooks_of
from cairn.slot.context import NoKey
from cairn.slot.gather import Gather, Rows
from cairn.slot.reader import ConnectedReader, RowReader
from cairn.slot.row_loop import Loop, columns_read, make_loop, make_view
from cairn.slot.timers import (
    KeyTimers,
    NoTimers,
    TimerIndex,
    UntimedKeyTimers,
    timer_text,
)
from cairn.slot.touched_keys import TouchedKeys
from cairn.types.codec import codec

if TYPE_CHECKING:
    from cairn.slot.operator import Operator

PREFETCH_KEYS: Final = 1024
AHEAD_ROWS: Final = 16 * 1024
"""Rows whose state is read at once, while the rows before them are processed."""
EVENT_TIME_AT: Final = 3
"""The event time of a row comes after its place, its key group and its key."""
AGAIN_MAX: Final = 100_000
FOREVER: Final = 1 << 62

Kind = Literal["event", "processing"]
Scope = dict[str, Sequence[Any]]
"""Attributes of the context, with their values row by row."""


class Decoded(NamedTuple):
    """Rows, and what the loop over them needs."""

    gathered: Rows
    scope: Scope
    columns: Sequence[Iterable[Any]]
    inputs: Sequence[int]
    """The input of each row, in connected streams."""

    @property
    def keys(self) -> Sequence[Any]:
        return self.scope["key"]

    @property
    def groups(self) -> Sequence[int]:
        return self.scope["group"]


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
        self._is_keyed = bool(spec.keys)
        self._key_codec = codec(spec.key_type)
        # State in arrays is found by key alone.
        in_arrays = [isinstance(table, ColumnTable) for table in operator.tables.values()]
        is_group_needed = self._touched is not None or not in_arrays or not all(in_arrays)
        self._uses_groups = self._is_keyed and is_group_needed
        if not self._uses_groups:
            self._gather = Gather(sort_rows_min=FOREVER)
        self._columns: tuple[str, ...] | None = None
        """The columns that the function reads, if it does nothing else with a row."""
        if isinstance(self._reader, RowReader):
            self._columns = columns_read(function.process, inlets[0].schema)
        self._view = None if self._columns is None else make_view(self._columns)

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
            self._process(Rows(groups, times, rows))
        elif self._gather.add(groups, times, rows):
            self.flush()

    def flush(self) -> None:
        gathered = self._gather.take()
        if gathered is not None:
            self._process(gathered)

    def _process(self, gathered: Rows) -> None:
        """Call the function for each row, frame by frame if it has state that is read so."""
        if self._operator.context.frame.handles:
            for start in range(0, len(gathered.rows), FRAME_ROWS):
                # Decoded by the frame, so that values are still in the caches when they are read.
                self._run_decoded(self._decode(gathered.slice(start, FRAME_ROWS)))
        elif self._prefetches:
            self._process_ahead(gathered)
        else:
            self._run_decoded(self._decode(gathered))

    def _process_ahead(self, gathered: Rows) -> None:
        """Call the function for each row, while the state of the next rows is being read."""
        backend = self._operator.backend
        now = self._decode(gathered.slice(0, AHEAD_ROWS))
        backend.prefetch(now.groups, now.keys)
        for start in range(AHEAD_ROWS, len(gathered.rows), AHEAD_ROWS):
            then = self._decode(gathered.slice(start, AHEAD_ROWS))
            backend.read_ahead(then.groups, then.keys)
            try:
                self._run_decoded(now)
            except BaseException:
                backend.drop_ahead()
                raise
            backend.prefetch(then.groups, then.keys)
            now = then
        self._run_decoded(now)

    def _decode(self, gathered: Rows) -> Decoded:
        """Return what the loop needs of rows."""
        groups, times, rows = gathered
        columns, keys, inputs = self._read(rows)
        decoded = Decoded(gathered, {}, columns, inputs)
        scope = decoded.scope
        if self._uses_groups:
            scope["group"] = groups.to_numpy().tolist()
        if self._is_keyed:
            scope["key"] = list(keys)
        if times is not None:
            scope["event_time_ms"] = np.floor_divide(times.to_numpy(), 1000).tolist()
        return decoded

    def _read(
        self, rows: pa.StructArray
    ) -> tuple[Sequence[Iterable[Any]], Iterable[Any], Sequence[int]]:
        """Return the columns that the loop goes through, and the key and input of each row."""
        if self._columns is not None:
            assert isinstance(self._reader, RowReader), "connected rows are tuples"
            return *self._reader.read_columns(rows, self._columns), ()
        made, keys = self._reader.read(rows)
        inputs = self._reader.inputs if isinstance(self._reader, ConnectedReader) else ()
        return [made], keys, inputs

    def _run_decoded(self, decoded: Decoded) -> None:
        """Call the function for each row."""
        times = decoded.gathered.times
        self._inputs = iter(decoded.inputs)
        if times is not None and self._reads_row_times:
            self._operator.context.row_times_us = iter(times.to_numpy().tolist())
        self._run_rows(decoded.gathered, decoded.scope, decoded.columns)

    def _run_rows(self, gathered: Rows, scope: Scope, columns: Sequence[Iterable[Any]]) -> None:
        """Call the function for each row; with state that is read by frames, they are one."""
        groups, _, rows = gathered
        loop = make_loop(("at", *scope), self._columns)
        iterators = [iter(values) for values in (*scope.values(), *columns)]
        if not self._operator.context.frame.handles:
            self._run_loop(loop, range(len(rows)), iterators, rows)
            return
        with self._frame(self._key_array(rows, scope["key"]), groups.to_numpy()) as places:
            self._run_loop(loop, places, iterators, rows)

    @contextmanager
    def _frame(self, keys: pa.Array, groups: Ints) -> Iterator[list[int]]:
        """Open a frame of these keys, with the place of each; close it at the end."""
        frame = self._operator.context.frame
        try:
            yield frame.open(keys, groups)
        except BaseException:
            frame.drop()
            raise
        try:
            frame.close()
        except FunctionError as error:
            raise self._operator.blame.place(error) from error

    def _key_array(self, rows: pa.StructArray, keys: Sequence[Any]) -> pa.Array:
        """Return the keys of rows as state has them."""
        if isinstance(self._reader, RowReader):
            return self._reader.key_array(rows, self._key_codec.arrow)
        return self._key_codec.encode(list(keys))

    def _run_loop(
        self,
        loop: Loop,
        places: Sequence[int],
        iterators: Sequence[Iterator[Any]],
        rows: pa.StructArray,
    ) -> None:
        """Call the function for these rows, each with its place; iterators have the rest of it."""
        operator = self._operator
        main, counted = operator.main, iter(places)
        # Places come first: when they end, nothing is taken from the others.
        scoped: Iterator[Any] = zip(counted, *iterators, strict=False)
        if self._fires_between_rows:
            assert self._timers is not None
            scoped = self._with_timers(scoped, self._timers.event)
        try:
            while length_hint(counted):
                some, emit = islice(scoped, main.pack_rows), main.rows.append
                loop(some, self._process_row, operator.context, self._view, emit, self._emit_other)
                for outlet in operator.outlets:
                    outlet.pack()
            for outlet in operator.outlets:
                outlet.flush()
        except Exception as error:
            raise self._describe(error, rows, len(places) - length_hint(counted) - 1) from error

    def _emit_other(self, result: Any) -> None:
        self._operator.main.emit_all(self._where, result)

    def _describe(self, error: Exception, rows: pa.StructArray, at: int) -> CairnError:
        """Return the error to report of the row at this place; -1 if it was before the first."""
        blame, row = self._operator.blame, None
        if at >= 0:
            # The loop may not have made it, or not all of it.
            (row,) = self._reader.read(rows.slice(at, 1))[0]
        if isinstance(error, FunctionError):
            return blame.locate(self._where, error, row)
        return blame.describe(self._where, error, row)

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
        is_framed = bool(operator.context.frame.handles)
        size = FRAME_ROWS if is_framed else PREFETCH_KEYS
        for start in range(0, len(touched), size):
            groups, keys = zip(*touched[start : start + size], strict=True)
            if self._prefetches:
                operator.backend.prefetch(groups, keys)
            if is_framed:
                with self._frame(self._key_codec.encode(list(keys)), np.array(groups)) as places:
                    self._call_epoch_end(zip(places, groups, keys, strict=True))
            else:
                self._call_epoch_end(zip(repeat(0), groups, keys, strict=False))
            operator.flush()
        if self._timers is not None:
            self._fire_due()

    def _call_epoch_end(self, touched: Iterable[tuple[int, int, Any]]) -> None:
        """Call `on_epoch_end` for keys, each with its place in the frame and its key group."""
        operator = self._operator
        context = operator.context
        assert isinstance(self._function, KeyedProcess), "only these have on_epoch_end"
        on_epoch_end = self._function.on_epoch_end
        try:
            for context.at, context.group, context.key in touched:
                result = on_epoch_end(context)
                if result is not None:
                    operator.main.emit_all("on_epoch_end()", result)
        except FunctionError as error:
            raise operator.blame.locate("on_epoch_end()", error) from error
        except Exception as error:
            raise operator.blame.describe("on_epoch_end()", error, has_key=True) from error

    def _with_timers(self, scoped: Iterator[Any], index: TimerIndex) -> Iterator[Any]:
        """The rows; before each one, the event timers up to its time that are due."""
        at = EVENT_TIME_AT
        times, until = index.times, self._event_until
        for row in scoped:
            if times and times[0] <= row[at] and times[0] <= until:
                self._fire("event", index, min(row[at], until))
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
