"""An operator in a slot: a user function, fed with the rows of each epoch.

    open     the function is there and knows of the epoch
    run      rows of the epoch through the function
    finish   the delta: what the epoch changed

What it holds between epochs is its `Holding`. How a function is called is its `Runner`'s affair.

Always true here:
- the same parent version and the same rows in the same order give the same delta.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.contract import Backend
from cairn.backends.handles import (
    make_batch_handle,
    make_batch_table,
    make_handle,
    make_journaled_handle,
)
from cairn.backends.handles.broadcast import BroadcastHandle
from cairn.backends.handles.framed import Frame, make_row_table
from cairn.backends.handles.operator_list import OperatorListHandle
from cairn.backends.heap.backend import HeapBackend
from cairn.backends.journal import Journal
from cairn.backends.overlay import MakeTable, Table, make_table
from cairn.errors import FunctionError
from cairn.functions import (
    BatchProcess,
    Function,
    KeyedProcess,
    PartialProcess,
    bind_state,
    find_states,
    has_timers,
    hooks_of,
)
from cairn.key_groups import key_groups
from cairn.logs import scope as log_scope
from cairn.metrics import Metrics, UserMetrics
from cairn.protocol.messages import Begin
from cairn.protocol.scoped_state import own_states, shared_uid
from cairn.protocol.spec import OperatorSpec, lane_name
from cairn.slot.blame import Blame
from cairn.slot.context import SlotContext
from cairn.slot.dead_letters import DeadLetters
from cairn.slot.heat import Heat
from cairn.slot.holding import Holding, behind
from cairn.slot.outlet import Outlet, fit
from cairn.slot.reader import times_of
from cairn.slot.records import NO_KEY, RecordRunner
from cairn.slot.runner import Runner, make_runner
from cairn.slot.sifted_outlet import SiftedOutlet
from cairn.slot.timers import Timers
from cairn.state import Broadcast
from cairn.storage.manifest import Scope
from cairn.types.durations import MAX_MS, MIN_MS


class Operator:
    """Subtask i of an operator, resident between epochs."""

    def __init__(self, spec: OperatorSpec, backend: Backend, *, group_count: int) -> None:
        self.spec = spec
        self.group_count = group_count
        scope: Scope = "keyed" if spec.keys else "subtask"
        self.state = Holding(
            spec.uid,
            spec.key_type,
            backend,
            group_count=group_count,
            scope=scope,
            delay_ms=spec.delay_ms,
            most=spec.parallelism,
        )
        self.shared: Holding | None = None
        """Broadcast state: the same in every subtask."""
        if isinstance(spec.broadcast, Broadcast):
            self.shared = Holding(
                shared_uid(spec.uid),
                spec.broadcast.key_type,
                HeapBackend(),
                group_count=group_count,
                scope="shared",
            )
        self._lists: list[OperatorListHandle] = []
        self._broadcast: BroadcastHandle | None = None
        self.context = SlotContext()
        self.blame = Blame(self)
        self.context.count_late = self._count_late
        self.function: Function | None = None
        self.function_version = ""
        self._opened_as = 0
        """The subtask that the function was opened as."""
        self.told_of: int | None = None
        """The last committed epoch that the function was told of."""
        self._is_declared = False
        self._is_waiting = False
        """For the last row of the broadcast."""
        self.is_draining = False
        make_outlet = SiftedOutlet if spec.on_error == "dead-letter" else Outlet
        self.outlets = [make_outlet(spec.uid, out.tag, out.schema) for out in spec.outlets]
        self.letters: DeadLetters | None = None
        """Target of rows that the function fails on, if they do not fail the epoch."""
        if spec.on_error == "dead-letter":
            self.letters = DeadLetters(spec.uid, self.outlets)
        self.main = next(outlet for outlet in self.outlets if outlet.tag is None)
        self.context.sides = {o.tag: o.emit for o in self.outlets if o.tag is not None}
        sides = {o.tag: o for o in self.outlets}
        self.late = {
            inlet.lane: sides[inlet.late_tag]
            for inlet in spec.row_inlets
            if inlet.late_tag in sides
        }
        """Targets of late rows, by the lane they came in."""
        self.late_us: int | None = None
        """Rows of before this time, in microseconds, are late."""
        self.rows_in = self.late_rows = self.untimed_rows = 0
        self.heat = Heat(spec.row_inlets, group_count) if spec.keys else None
        """Counts the epoch's rows by key group and key."""
        self.runner: Runner | None = None

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """All that it holds, its own state first."""
        return (self.state,) if self.shared is None else (self.state, self.shared)

    @property
    def backend(self) -> Backend:
        return self.state.backend

    @property
    def tables(self) -> dict[str, Table]:
        return self.state.tables

    @property
    def timers(self) -> Timers | None:
        """The timers of a function that sets any."""
        return self.state.timers

    def adopt(self, other: Operator) -> set[str]:
        """Take over what the same operator with another function holds, where its form fits.

        The uids of what was taken over.
        """
        self.declare()
        theirs = {holding.uid: holding for holding in other.holdings}
        adopted = {
            mine.uid
            for mine in self.holdings
            if mine.uid in theirs and mine.adopt(theirs[mine.uid])
        }
        if self.state.uid in adopted:
            self.told_of = other.told_of
        return adopted

    @property
    def metrics(self) -> UserMetrics | None:
        """The metrics of the function in this attempt; None if it has none."""
        return self.context.metrics.collect()

    def open(self, begin: Begin, subtask: int) -> None:
        """Load the function if it is new, and tell it about the epoch."""
        with log_scope(operator=self.spec.uid):
            self._open(begin, subtask)

    def _open(self, begin: Begin, subtask: int) -> None:
        context = self.context
        context.metrics.reset()
        if self.heat is not None:
            self.heat.reset()
        context.epoch = begin.epoch
        context.now_ms = begin.now_ms
        watermark_ms = behind(begin.watermark_ms, self.spec.delay_ms)
        passed_ms = behind(begin.passed_ms, self.spec.delay_ms)
        context.watermark_ms = watermark_ms
        context.subtask = subtask
        context.parallelism = begin.parallelism
        context.event_time_ms = context.timer_kind = None
        context.timers = NO_KEY
        self.is_draining = begin.is_draining
        if self._is_stale(subtask):
            self._open_function(subtask)
        else:
            self._begin_handles(subtask)
        if begin.parent is not None and begin.parent != self.told_of:
            assert self.function is not None
            try:
                self.function.on_epoch_committed(begin.parent)
            except Exception as error:
                raise self.blame.describe("on_epoch_committed()", error) from error
            self.told_of = begin.parent
        # Operators before this one may emit rows as old as the timers that they had not reached in
        # the epoch before. After an earlier round they have reached all of them.
        if begin.execution.round and not begin.is_draining:
            passed_ms = watermark_ms
        late_ms = passed_ms if self.spec.is_downstream else watermark_ms
        if not self.spec.has_watermark:
            # Others of the job may have one. Here nothing is late, so nothing is complete either.
            late_ms = None
            context.watermark_ms = begin.watermark_ms if begin.is_draining else None
        context.late_ms = late_ms
        self.late_us = None
        # Rows in a loop were in time when they entered it.
        is_spared = self.spec.is_behind_loop and not self._forgets
        if late_ms is not None and not self._runner().handles_late and not is_spared:
            self.late_us = late_ms * 1000
        self._set_floor(begin)
        self.rows_in = self.late_rows = self.untimed_rows = 0
        self._is_waiting = False
        self._runner().reset()
        for outlet in self.outlets:
            outlet.reset()

    def _is_stale(self, subtask: int) -> bool:
        """True if the function is missing, is another one, or may have read lists that are gone."""
        if self.function is None or self.function_version != self.spec.function_version:
            return True
        return bool(self._lists) and (self.state.is_replaced or subtask != self._opened_as)

    def _open_function(self, subtask: int) -> None:
        self.close_function()
        function = self.spec.load()
        self._bind(function)
        self._begin_handles(subtask)
        self.context.metrics = Metrics(self.journal)
        try:
            function.open(self.context)
        except Exception as error:
            raise self.blame.describe("open()", error, called=function.open) from error
        self.function = function
        self.function_version = self.spec.function_version
        self._opened_as, self.state.is_replaced = subtask, False
        self.runner = make_runner(self, function)

    @property
    def _forgets(self) -> bool:
        """True if rows behind the watermark would not find their state."""
        return self.function is not None and hooks_of(self.function).forgets

    def _begin_handles(self, subtask: int) -> None:
        """Reset what handles keep of the state: it may belong to another attempt."""
        for handle in self._lists:
            handle.begin(subtask)
        if self._broadcast is not None:
            self._broadcast.forget()

    def _let_write(self, *, is_writable: bool) -> None:
        for handle in self._lists:
            handle.is_writable = is_writable

    def _set_floor(self, begin: Begin) -> None:
        # Not the watermark: timers that are due by it fire at their own times, as far back
        # as where those of the parent epoch ended.
        passed_ms = behind(begin.passed_ms, self.spec.delay_ms)
        self.context.floor_ms = MIN_MS if passed_ms is None else passed_ms
        for holding in self.holdings:
            holding.set_floor(begin)

    def reclaim(self, seconds: float) -> bool:
        """Remove state that has expired, for about so long; True when there is more."""
        return any(holding.reclaim(seconds) for holding in self.holdings)

    def declare(self) -> None:
        """Make the tables known before the function is opened, so that state can be restored."""
        if not self._is_declared:
            function = self.spec.load()
            self.state.declare(own_states(function), self._table_maker(function))
            if self.shared is not None:
                assert self.spec.broadcast is not None
                self.shared.declare({self.spec.broadcast.name: self.spec.broadcast})
            self._is_declared = True

    def _table_maker(self, function: Function) -> MakeTable:
        if isinstance(function, BatchProcess):
            return make_batch_table
        # Timers and rows that are undone use state one key at a time.
        if isinstance(function, KeyedProcess) and not has_timers(function):
            return make_table if self.spec.on_error == "dead-letter" else make_row_table
        return make_table

    def _bind(self, function: Function) -> None:
        """Give the function its state."""
        if isinstance(function, PartialProcess):
            # It runs no user code, so a failure is not a row's fault.
            self.letters = None
        by_batch = isinstance(function, BatchProcess)
        declared = find_states(function)
        self.declare()
        self.state.declare(own_states(function), self._table_maker(function))
        self._lists, self._broadcast = [], None
        frame = self.context.frame = Frame()
        for holding in self.holdings:
            for table in holding.tables.values():
                table.journal = self.journal
        make_one = make_handle if self.journal is None else make_journaled_handle
        for name, table in self.tables.items():
            if by_batch:
                bind_state(function, name, make_batch_handle(table))
            elif name.isidentifier():
                handle = make_one(table, self.context)
                bind_state(function, name, handle)
                frame.add(handle)
                if isinstance(handle, OperatorListHandle):
                    self._lists.append(handle)
        if self.shared is not None:
            (table,) = self.shared.tables.values()
            shared = make_handle(table, self.context)
            assert isinstance(shared, BroadcastHandle)
            self._broadcast = self.context.broadcast = shared
            if table.name in declared:
                bind_state(function, table.name, shared)

    def begin_rows(self) -> None:
        """Before the first row: what is due without one. Rows of a broadcast come before that."""
        self._let_write(is_writable=True)
        self._is_waiting = self.spec.broadcast_inlet is not None
        if not self._is_waiting:
            with log_scope(operator=self.spec.uid):
                self._runner().begin_rows()

    def _end_broadcast(self) -> None:
        """All rows of the broadcast are in: what was due at the beginning is due now."""
        self._is_waiting = False
        self._runner().begin_rows()

    def run(self, groups: pa.Array, times: pa.Array | None, rows: pa.StructArray) -> None:
        """Rows of the epoch through the function. Late and untimed ones go their own way."""
        with log_scope(operator=self.spec.uid):
            self._run(groups, times, rows)

    def _run(self, groups: pa.Array, times: pa.Array | None, rows: pa.StructArray) -> None:
        if self._is_waiting:
            self._end_broadcast()
        self.rows_in += self._row_count(rows)
        if times is not None:
            in_time = self._in_time(times)
            if in_time is not None:
                self._put_aside(times, rows, pc.invert(in_time))
                groups, times, rows = (c.filter(in_time) for c in (groups, times, rows))
        if len(rows):
            if self.heat is not None:
                self.heat.add(groups, rows)
            self._runner().run(groups, times, rows)

    def run_broadcast(self, times: pa.Array | None, rows: pa.StructArray) -> None:
        """Rows that all subtasks get, before the others of the epoch. They are never late."""
        if self.context.subtask == 0:
            # Every subtask gets them, but they are rows of the stream once.
            self.rows_in += len(rows)
        runner, shared = self._runner(), self._broadcast
        assert isinstance(runner, RecordRunner), "broadcast rows come one by one"
        if shared is not None:
            shared.is_writable = True
        try:
            with log_scope(operator=self.spec.uid):
                runner.run_broadcast(times, rows)
        finally:
            if shared is not None:
                shared.is_writable = False

    def run_returned(self, groups: pa.Array, times: pa.Array | None, rows: pa.StructArray) -> None:
        """Rows that a loop has sent back. They were in time once: late only if it is too late."""
        late_us = self.late_us
        if not self._forgets:
            self.late_us = None
        self.run(groups, times, rows)
        self.late_us = late_us

    def take(self, batch: pa.RecordBatch) -> None:
        """Rows of an operator of the same level that this one is chained to."""
        inlet = self.spec.inlets[0]
        batch = fit(batch, inlet.schema)
        groups = np.zeros(batch.num_rows, np.int32)
        if inlet.keys:
            keys = batch.select(inlet.keys).to_struct_array()
            groups = key_groups(keys, keys.type, self.group_count).astype(np.int32)
        self.run(pa.array(groups), times_of(batch, inlet), batch.to_struct_array())

    def _in_time(self, times: pa.Array) -> pa.Array | None:
        """Return the mask of rows that are not late; None if all rows are in time."""
        if self.late_us is None:
            return times.is_valid() if times.null_count else None
        in_time = pc.fill_null(pc.greater_equal(times, self.late_us), False)
        return None if in_time.true_count == len(times) else in_time

    def _put_aside(self, times: pa.Array, rows: pa.StructArray, aside: pa.Array) -> None:
        late = rows.filter(aside)
        untimed = self._row_count(rows.filter(times.is_null())) if times.null_count else 0
        self.untimed_rows += untimed
        self.late_rows += self._row_count(late) - untimed
        if not self.late:
            return
        if self.spec.inlets[0].name:
            for lane, outlet in self.late.items():
                assert lane is not None, "connected inputs come through shuffles"
                theirs = late.filter(pc.equal(late.field("lane"), lane)).field(lane_name(lane))
                if len(theirs):
                    outlet.pass_on(pa.RecordBatch.from_struct_array(theirs))
            return
        (outlet,) = self.late.values()
        if not isinstance(self.function, PartialProcess):
            outlet.pass_on(pa.RecordBatch.from_struct_array(late))
        elif (batch := self.function.late_rows(late)) is not None:
            outlet.pass_on(batch)

    def _row_count(self, rows: pa.StructArray) -> int:
        """Return the number of rows of the stream; a partial stands for several."""
        function = self.function
        return function.row_count(rows) if isinstance(function, PartialProcess) else len(rows)

    @property
    def partial_count(self) -> int:
        """The partials that the epoch's rows were combined into; 0 if it is not an aggregation."""
        return self.function.partial_count if isinstance(self.function, PartialProcess) else 0

    @property
    def journal(self) -> Journal | None:
        """Undo log of the current row, if rows can be put aside."""
        return None if self.letters is None else self.letters.journal

    @property
    def error_rows(self) -> int:
        """Rows put aside in this epoch."""
        return 0 if self.letters is None else self.letters.rows

    @property
    def broadcast_aside(self) -> str:
        """Digest of the broadcast rows put aside in this epoch."""
        return "" if self.letters is None else self.letters.broadcast_aside

    def _count_late(self, rows: int) -> None:
        if self.journal is not None:
            self.journal.call(setattr, self, "late_rows", self.late_rows)
        self.late_rows += rows

    def _runner(self) -> Runner:
        assert self.runner is not None, "rows come after open"
        return self.runner

    def finish(self) -> dict[str, pa.RecordBatch]:
        """After the last row: what the epoch changed of its own state."""
        self.end()
        return self.delta()

    def end(self) -> None:
        """After the last row: process what is left of them, and let nothing more be written."""
        with log_scope(operator=self.spec.uid):
            if self._is_waiting:
                self._end_broadcast()
            self._runner().end_rows()
        self.flush()
        self._let_write(is_writable=False)

    def delta(self) -> dict[str, pa.RecordBatch]:
        """Return the changes of the operator's own state, after the epoch's last row."""
        return self.state.delta(self.spec.uid)

    def flush(self) -> None:
        """Process all rows that came, and pass on what they caused."""
        with log_scope(operator=self.spec.uid):
            self._runner().flush()
            try:
                for outlet in self.outlets:
                    outlet.flush()
            except FunctionError as error:
                raise self.blame.place(error) from error

    def earliest_timers(self) -> tuple[int | None, int | None]:
        """The earliest timers left, by event time and by the clock."""
        if isinstance(self.function, BatchProcess):
            try:
                event_ms, processing_ms = self.function.next_timer(self.context)
            except Exception as error:
                raise self.blame.describe("next_timer()", error) from error
        elif self.timers is None:
            return None, None
        else:
            self.timers.build()
            event_ms, processing_ms = self.timers.event.first(), self.timers.processing.first()
        if event_ms is not None and not self.spec.has_watermark:
            # Only a drain reaches these, whatever the watermark of other operators.
            event_ms = MAX_MS
        if event_ms is not None:
            event_ms = min(event_ms + self.spec.delay_ms, MAX_MS)
        return event_ms, processing_ms

    def close_function(self) -> None:
        if self.function is not None:
            function, self.function = self.function, None
            self._let_write(is_writable=False)
            with log_scope(operator=self.spec.uid):
                function.close()

    def close(self) -> None:
        try:
            self.close_function()
        finally:
            for holding in self.holdings:
                holding.close()
