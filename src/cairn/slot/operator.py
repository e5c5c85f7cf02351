"""An operator in a slot: a user function, its state, and the version that state is at.

    begin    bring the state to the parent's version: keep, promote or undo, say what is missing
    run      rows of the epoch through the function
    finish   the delta: what the epoch changed

How a function is called is its runner's affair: `records` calls it row by row, `batches`
by the batch.

Always true here:
- state is named by version, a digest of its history, never by an epoch number alone;
- between `begin` and the next `begin` the way back to the parent stays open;
- the same parent version and the same rows in the same order give the same delta.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.base import Backend
from cairn.backends.batch_handles import make_batch_handle, make_batch_table
from cairn.backends.handles import make_handle
from cairn.backends.journal import Journal
from cairn.backends.journaled_handles import make_journaled_handle
from cairn.backends.overlay import Table, make_table
from cairn.durations import MAX_MS, MIN_MS
from cairn.errors import CairnError, FunctionError
from cairn.functions import (
    EVENT_TIMERS,
    LATE,
    BatchProcess,
    Function,
    KeyedProcess,
    PartialProcess,
    Process,
    declared_state,
)
from cairn.plan.keygroups import groups_of
from cairn.slot.batches import BatchRunner
from cairn.slot.context import SlotContext
from cairn.slot.dead_letters import BatchSifter, DeadLetters, RecordSifter
from cairn.slot.outlet import Outlet, fitted, short
from cairn.slot.protocol import Begin, Piece
from cairn.slot.reader import times_of
from cairn.slot.records import NO_KEY, RecordRunner
from cairn.slot.sifted_outlet import SiftedOutlet
from cairn.slot.spec import OperatorSpec
from cairn.slot.timers import Timers
from cairn.storage.files import StatePart
from cairn.storage.manifest import EMPTY_VERSION, next_version

MESSAGE_CHARS_MAX = 4000
INCOMPLETE = ""
"""A version that no epoch names."""


class Runner(Protocol):
    """How the function of an operator is called. Made anew when the function is."""

    handles_late: bool
    """Late rows are the function's affair: they come to it like all others."""

    def reset(self) -> None:
        """An attempt begins: nothing of the one before is left."""

    def begin_rows(self) -> None:
        """Before the first row of an epoch."""

    def run(self, groups: pa.Array, times: pa.Array | None, rows: pa.StructArray) -> None:
        """Some rows, in order, each with its key group and its event time in microseconds."""

    def flush(self) -> None:
        """Process what was gathered, without waiting for more."""

    def end_rows(self) -> None:
        """After the last row."""


def make_runner(operator: Operator, function: Function) -> Runner:
    letters = operator.letters
    if isinstance(function, BatchProcess):
        # Partials are of rows that no user's code has seen, and will see none.
        if letters is not None and not isinstance(function, PartialProcess):
            return BatchSifter(operator, function, letters)
        return BatchRunner(operator, function)
    assert isinstance(function, KeyedProcess | Process)
    if letters is not None:
        return RecordSifter(operator, function, letters)
    return RecordRunner(operator, function)


class Operator:
    """Subtask i of an operator, resident between epochs."""

    def __init__(self, spec: OperatorSpec, backend: Backend, *, group_count: int) -> None:
        self.spec = spec
        self.group_count = group_count
        self.groups = range(0)
        self.version = EMPTY_VERSION
        self.pending: str | None = None
        """The version that the epoch just finished would have, once it is committed."""
        self.backend = backend
        self.context = SlotContext()
        self.context.count_late = self._count_late
        self.function: Function | None = None
        self.function_version = ""
        self.told_of: int | None = None
        """The last committed epoch that the function was told of."""
        self.tables: dict[str, Table] = {}
        self.timers: Timers | None = None
        """Of functions that have any."""
        self.is_draining = False
        self.is_adopted = False
        """Another version of this operator has its state now."""
        make_outlet = SiftedOutlet if spec.on_error == "dead-letter" else Outlet
        self.outlets = [make_outlet(spec.uid, out.tag, out.schema) for out in spec.outlets]
        self.letters: DeadLetters | None = None
        """Where rows go that the function fails on, if they do not fail the epoch."""
        if spec.on_error == "dead-letter":
            self.letters = DeadLetters(spec.uid, self.outlets)
        self.main = next(outlet for outlet in self.outlets if outlet.tag is None)
        self.context.sides = {o.tag: o.emit for o in self.outlets if o.tag is not None}
        self.late = {o.tag: o for o in self.outlets if o.tag and o.tag.split(".")[0] == LATE}
        self.late_us: int | None = None
        """Rows of before this time, in microseconds, are late."""
        self.rows_in = self.late_rows = self.untimed_rows = 0
        self.runner: Runner | None = None

    def adopt(self, other: Operator) -> bool:
        """Take over the state of the same operator with another function, if its form fits."""
        self.declare()
        mine = {name: _form(table) for name, table in self.tables.items()}
        theirs = {name: _form(table) for name, table in other.tables.items()}
        if self.spec.key_type != other.spec.key_type or theirs.items() - mine.items():
            return False
        self.backend.close()
        self.backend, self.tables = other.backend, other.tables
        self.groups, self.version, self.pending = other.groups, other.version, other.pending
        self.told_of, self.timers = other.told_of, other.timers
        self._declare(self.spec.load())
        other.is_adopted = True
        return True

    def bring_to(self, version: str, groups: range, pieces: Sequence[Piece]) -> list[range]:
        """Make what is here the state asked for, and say which key groups are missing of it.

        Pending changes are promoted if they belong to it, otherwise undone. `pieces` says, after
        a change of parallelism, which versions the groups had in the ranges they come from.
        """
        if groups == self.groups and version in (self.version, self.pending):
            self._settle(version)
            return []
        ours = {piece.version for piece in pieces} & {self.version, self.pending}
        kept: list[range] = []
        if groups != self.groups and ours:
            self._settle(ours.pop())
            kept = [
                owned
                for piece in pieces
                if piece.version == self.version and (owned := _overlap(piece, self.groups))
            ]
        missing = _without(groups, kept)
        # What a restore leaves behind that fails half way must not pass for the version.
        self.version, self.pending = INCOMPLETE, None
        for table in self.tables.values():
            for gap in missing:
                table.forget(gap)
            table.assign(groups)
        if self.timers is not None:
            self.timers.forget()
        self.groups = groups
        return missing

    def _settle(self, version: str) -> None:
        """Promote or undo the pending epoch."""
        is_committed = version == self.pending and version != self.version
        if self.timers is not None and not is_committed:
            self.timers.undo()
        for table in self.tables.values():
            if is_committed:
                table.promote()
            else:
                table.rollback()
        self.version, self.pending = version, None

    def open(self, begin: Begin, subtask: int) -> None:
        """Load the function if it is new, and tell it about the epoch."""
        context = self.context
        context.epoch = begin.epoch
        context.now_ms = begin.now_ms
        context.watermark_ms = begin.watermark_ms
        context.subtask = subtask
        context.parallelism = begin.parallelism
        context.event_time_ms = context.timer_kind = None
        context.timers = NO_KEY
        self.is_draining = begin.is_draining
        if self.function_version != self.spec.function_version:
            self.close_function()
            function = self.spec.load()
            self._declare(function)
            try:
                function.open(context)
            except Exception as error:
                raise self.failed("open()", error) from error
            self.function = function
            self.function_version = self.spec.function_version
            self.runner = make_runner(self, function)
        if begin.parent is not None and begin.parent != self.told_of:
            assert self.function is not None
            try:
                self.function.on_epoch_committed(begin.parent)
            except Exception as error:
                raise self.failed("on_epoch_committed()", error) from error
            self.told_of = begin.parent
        # What operators before this one emit in an epoch may be as old as what their timers
        # had not come to in the epoch before.
        passed_ms = begin.passed_ms if self.spec.is_downstream else begin.watermark_ms
        if not self.spec.has_watermark:
            # Others of the job may have one. Here nothing is late, so nothing is complete either.
            passed_ms = None
            context.watermark_ms = begin.watermark_ms if begin.is_draining else None
        context.late_ms = passed_ms
        self.late_us = None
        if passed_ms is not None and not self._runner().handles_late:
            self.late_us = passed_ms * 1000
        self._set_floor(begin)
        self.rows_in = self.late_rows = self.untimed_rows = 0
        self._runner().reset()
        for outlet in self.outlets:
            outlet.reset()

    def _set_floor(self, begin: Begin) -> None:
        # Not the watermark: timers that are due by it fire at their own times, as far back
        # as where those of the parent epoch ended.
        self.context.floor_ms = MIN_MS if begin.passed_ms is None else begin.passed_ms
        for table in self.tables.values():
            if table.expiry is not None:
                table.expiry.begin(self.floor_ms(table, begin))

    def floor_ms(self, table: Table, begin: Begin) -> int | None:
        """What of a table has expired up to here is seen by nobody any more."""
        ttl = table.declaration.ttl
        if ttl is None:
            return None
        return begin.now_ms if ttl.clock == "processing" else begin.passed_ms

    def reclaim(self, seconds: float) -> bool:
        """Remove state that has expired, for about so long; True when there is more."""
        more = False
        for table in self.tables.values():
            if table.expiry is not None:
                more = table.expiry.reclaim(seconds) or more
        return more

    def tidy(self) -> bool:
        """After much was removed: pack what is left. True if the backend should compact."""
        emptied = {
            table: table.expiry
            for table in self.tables.values()
            if table.expiry is not None and table.expiry.is_emptied()
        }
        sparse = [table for table, expiry in emptied.items() if expiry.is_sparse()]
        try:
            if sparse and not self.backend.repack(sparse):
                return False
        except BaseException:
            self.version, self.pending = INCOMPLETE, None
            raise
        for table, expiry in emptied.items():
            expiry.tidied(is_packed=table in sparse)
        return bool(emptied)

    def _declare(self, function: Function) -> None:
        key_type = self.spec.key_type
        by_batch = isinstance(function, BatchProcess)
        make = make_batch_table if by_batch else make_table
        for name, declaration in declared_state(function).items():
            table = self.tables.get(name)
            if table is None:
                table = make(declaration, key_type, self.backend, self.group_count)
                table.assign(self.groups)
                self.tables[name] = table
            table.declaration = declaration
            table.journal = self.journal
            if by_batch:
                setattr(function, name, make_batch_handle(table, self.group_count))
            elif name.isidentifier():
                make_one = make_handle if self.journal is None else make_journaled_handle
                setattr(function, name, make_one(table, self.context))
        if EVENT_TIMERS in self.tables and not (self.timers and self.timers.are_of(self.tables)):
            self.timers = Timers(self.tables)

    def declare(self) -> None:
        """Make the tables known before the function is opened, so that state can be restored."""
        if not self.tables:
            self._declare(self.spec.load())

    def begin_rows(self) -> None:
        """Before the first row: what is due without one."""
        self._runner().begin_rows()

    def run(self, groups: pa.Array, times: pa.Array | None, rows: pa.StructArray) -> None:
        """Rows of the epoch through the function. Late and untimed ones go their own way."""
        self.rows_in += self._row_count(rows)
        if times is not None:
            in_time = self._in_time(times)
            if in_time is not None:
                self._put_aside(times, rows, pc.invert(in_time))
                groups, times, rows = (c.filter(in_time) for c in (groups, times, rows))
        if len(rows):
            self._runner().run(groups, times, rows)

    def run_broadcast(self, times: pa.Array | None, rows: pa.StructArray) -> None:
        """Rows that all subtasks get, before the others of the epoch. They are never late."""
        self.rows_in += len(rows)
        runner = self._runner()
        assert isinstance(runner, RecordRunner), "broadcast rows come one by one"
        runner.run_broadcast(times, rows)

    def take(self, batch: pa.RecordBatch) -> None:
        """Rows of an operator of the same level that this one is chained to."""
        inlet = self.spec.inlets[0]
        batch = fitted(batch, inlet.schema)
        groups = pa.array(np.zeros(batch.num_rows, np.int32))
        self.run(groups, times_of(batch, inlet), batch.to_struct_array())

    def _in_time(self, times: pa.Array) -> pa.Array | None:
        """Which rows are processed; None: all of them."""
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
            for inlet in self.spec.row_inlets:
                outlet = self.late.get(f"{LATE}.{inlet.name}")
                theirs = late.filter(pc.equal(late.field("lane"), inlet.lane))
                if outlet is not None and len(theirs):
                    rows_in_lane = theirs.field(f"l{inlet.lane}")
                    outlet.pass_on(pa.RecordBatch.from_struct_array(rows_in_lane))
        elif not isinstance(self.function, PartialProcess):
            self.late[LATE].pass_on(pa.RecordBatch.from_struct_array(late))
        elif (batch := self.function.late_rows(late)) is not None:
            self.late[LATE].pass_on(batch)

    def _row_count(self, rows: pa.StructArray) -> int:
        """Of the stream: partials stand for several."""
        function = self.function
        return function.row_count(rows) if isinstance(function, PartialProcess) else len(rows)

    @property
    def groups_in(self) -> int:
        """Of an aggregation: how many groups the epoch's rows were in."""
        return self.function.groups if isinstance(self.function, PartialProcess) else 0

    @property
    def journal(self) -> Journal | None:
        """Where writes say how they are undone, if the epoch may go on without a row."""
        return None if self.letters is None else self.letters.journal

    @property
    def error_rows(self) -> int:
        """Put aside in this epoch."""
        return 0 if self.letters is None else self.letters.rows

    def _count_late(self, rows: int) -> None:
        if self.journal is not None:
            self.journal.append((setattr, self, "late_rows", self.late_rows))
        self.late_rows += rows

    def _runner(self) -> Runner:
        assert self.runner is not None, "rows come after open"
        return self.runner

    def finish(self) -> list[StatePart]:
        """What the epoch changed, by state."""
        self._runner().end_rows()
        self.flush()
        parts = []
        for name, table in sorted(self.tables.items()):
            try:
                batch = table.delta()
            except ValueError as error:
                raise FunctionError(
                    f"operator {self.spec.uid!r}: {error}", operator=self.spec.uid
                ) from error
            if batch is not None:
                parts.append(StatePart(name, batch))
        return parts

    def flush(self) -> None:
        """Process all rows that came, and pass on what they caused."""
        self._runner().flush()
        for outlet in self.outlets:
            outlet.flush()

    def finished(self, delta_id: str | None) -> None:
        """Name what the epoch made, so that the next `begin` can recognise it."""
        self.pending = self.version if delta_id is None else next_version(self.version, delta_id)

    def keys_changed(self) -> int:
        return sum(table.keys_changed() for table in self.tables.values())

    def state_keys(self) -> int:
        return sum(table.keys_held() for table in self.tables.values())

    def earliest_timers(self) -> tuple[int | None, int | None]:
        """The earliest timers left, by event time and by the clock."""
        if isinstance(self.function, BatchProcess):
            event_ms, processing_ms = self.function.next_timer(self.context)
        elif self.timers is None:
            return None, None
        else:
            self.timers.build()
            event_ms, processing_ms = self.timers.event.first(), self.timers.processing.first()
        if event_ms is not None and not self.spec.has_watermark:
            # Whatever the watermark of others: it is for draining to come to these.
            event_ms = MAX_MS
        return event_ms, processing_ms

    def own(self, subtask: int, parallelism: int) -> range:
        return groups_of(subtask, parallelism, self.group_count)

    def close_function(self) -> None:
        if self.function is not None:
            function, self.function = self.function, None
            function.close()

    def close(self) -> None:
        try:
            self.close_function()
        finally:
            if not self.is_adopted:
                self.backend.close()

    def located(
        self, error: FunctionError, row: Any = None, *, timer: str | None = None
    ) -> FunctionError:
        """An error of ours raised under a row or a timer: say which."""
        if "timer" in error.facts:
            return error
        cause = {"row": short(row)} if timer is None else {"timer": timer}
        facts = {"operator": self.spec.uid, "key": short(self.context.key), **cause}
        message = error.message
        if "operator" not in error.facts:
            message = f"operator {self.spec.uid!r}: {message}"
            message += "".join(f"\n  {name}: {text}" for name, text in cause.items())
        return FunctionError(message, **{**facts, **error.facts})

    def failed(
        self, where: str, error: Exception, row: Any = None, *, timer: str | None = None
    ) -> CairnError:
        if isinstance(error, CairnError) and not isinstance(error, FunctionError):
            return error
        uid = self.spec.uid
        # Cut: it travels to the driver in the text of other errors, several times over.
        text = str(error)[:MESSAGE_CHARS_MAX]
        lines = [f"{where} of operator {uid!r} raised {type(error).__name__}: {text}"]
        facts: dict[str, Any] = {"operator": uid, "cause": short(error, MESSAGE_CHARS_MAX)}
        if row is not None:
            facts |= {"key": short(self.context.key), "row": short(row)}
            lines += [f"  key: {facts['key']}", f"  row: {facts['row']}"]
        if timer is not None:
            facts |= {"key": short(self.context.key), "timer": timer}
            lines += [f"  key: {facts['key']}", f"  timer: {timer}"]
        # The user's part of the traceback: what lies above is ours.
        frames = traceback.extract_tb(error.__traceback__)[1:]
        facts["traceback"] = "".join(traceback.format_list(frames))
        if frames:
            lines.append(f"  at: {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}")
        return FunctionError("\n".join(lines), **facts)


def _form(table: Table) -> tuple[Any, ...]:
    """What state must agree in to be the same state: value, reducing and aggregating do."""
    declaration = table.declaration
    ttl = declaration.ttl
    # With another ttl it is restored: what had expired must not live again.
    lives = None if ttl is None else (ttl.clock, ttl.ms)
    return type(table), declaration.type, declaration.entry_type, lives


def _overlap(piece: Piece, groups: range) -> range:
    return range(
        max(piece.first_group, groups.start),
        min(piece.first_group + piece.group_count, groups.stop),
    )


def _without(groups: range, kept: Sequence[range]) -> list[range]:
    """What is left of a range, as ranges."""
    gaps = []
    start = groups.start
    for part in sorted((_cut(part, groups) for part in kept), key=lambda part: part.start):
        if part.start > start:
            gaps.append(range(start, part.start))
        start = max(start, part.stop)
    if start < groups.stop:
        gaps.append(range(start, groups.stop))
    return gaps


def _cut(part: range, groups: range) -> range:
    return range(max(part.start, groups.start), max(part.start, min(part.stop, groups.stop)))
