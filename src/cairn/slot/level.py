"""One level of a job in a slot: its operators and sinks, and the attempt under way.

    begin(token, begin)     per attempt: bring each operator to the parent's version
    run(token, batch)       rows in; rows for later levels go to `send`
    finish(token) -> Ack    delta and sink output durable, then acknowledged

Always true here:
- every call carries a token; a token older than the newest seen is refused, so a
  zombie can neither wipe nor extend the live attempt;
- pending work is promoted only if its version is the one the parent names,
  otherwise it is undone; what is not here is restored from the store;
- an acknowledgement names only what is already durable, but for records of a loop that are
  processed before the epoch ends;
- how many rows of a loop are processed at once depends on neither slot nor attempt;
- no attempt waits for a base or a merge, which are written beside the epochs, unless memory is
  full of changes that a base is to write.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends import make_backend
from cairn.crash import crash_point
from cairn.errors import EpochError
from cairn.ids import new_id
from cairn.key_groups import count_owners
from cairn.logs import scope as log_scope
from cairn.protocol.envelope import LANE
from cairn.protocol.messages import Ack, Begin, Compacted, Part, Report, Token
from cairn.protocol.spec import (
    FeedbackSpec,
    InletSpec,
    JobSpec,
    LevelSpec,
)
from cairn.sinks.base import Execution
from cairn.slot.compactor import Compactor
from cairn.slot.feedback import Feedback, InFlight, take
from cairn.slot.finishing import Finishing
from cairn.slot.gather import Rows
from cairn.slot.heat import cut_zeros
from cairn.slot.holding import INCOMPLETE, Holding
from cairn.slot.memory import Room, trim_memory
from cairn.slot.operator import Operator
from cairn.slot.parts import Parts
from cairn.slot.reader import mix_lanes, put_into_lane
from cairn.slot.redistribution import redistribute
from cairn.slot.restore import catch_up, is_ancestor, restore, write_base
from cairn.slot.sink import SinkRuntime
from cairn.slot.write_behind import WriteBehind
from cairn.storage.log import Log
from cairn.storage.manifest import EMPTY_VERSION, Epoch, Held
from cairn.storage.pending import read_pending
from cairn.storage.store import Store

Send = Callable[[pa.RecordBatch], None]

RECLAIM_S_MIN = 0.005
RECLAIM_SHARE = 0.05
"""Share of the last epoch's processing time that an epoch spends on removing expired state."""
FOLLOWING_RECLAIM_S = 0.05
RETURNED_ROWS_MAX = 16 * 1024
"""Rows of a loop that are processed at once: about as many as in one of Spark's batches."""


class StaleTokenError(EpochError):
    """A call of an attempt that has been superseded."""


def _lane(inlet: InletSpec) -> int:
    assert inlet.lane is not None, "what comes through a shuffle has a lane"
    return inlet.lane


def _groups(batch: pa.RecordBatch) -> pa.Array:
    """Return the key groups of rows: 0 in a level without keys."""
    if "group" in batch.schema.names:
        return batch["group"]
    return pa.array(np.zeros(batch.num_rows, np.int32))


class LevelRuntime:
    """One level: its operators and sinks, and the attempt under way."""

    def __init__(
        self,
        job: JobSpec,
        spec: LevelSpec,
        store: Store,
        log: Log,
        scratch: str,
        compactor: Compactor,
        in_flight: InFlight,
        parts: Parts,
        room: Room,
    ) -> None:
        self.spec = spec
        self.store = store
        self.log = log
        self.scratch = scratch
        self.compactor = compactor
        self._behind = WriteBehind(compactor, store, scratch)
        self.operators = [
            Operator(
                op,
                # Lists of subtasks are little: in memory with every backend.
                make_backend(
                    job.backend if op.keys else "heap",
                    f"{scratch}/{new_id()}",
                    job.backend_memory_bytes,
                    job_id=job.job_id,
                    operator=op.uid,
                ),
                group_count=job.group_count,
            )
            for op in spec.operators
        ]
        self.sinks = {sink.uid: SinkRuntime(sink, job, scratch) for sink in spec.sinks}
        self.feedbacks = [Feedback(f, in_flight) for f in spec.feedbacks]
        self._in_flight = in_flight
        self._parts = parts
        self._room = room
        self._group_count = job.group_count
        self._job_name = job.job_name
        uids = {op.uid for op in spec.operators}
        self._returns = {uid: [f for f in job.feedbacks if f.operator == uid] for uid in uids}
        """Per operator, what loops send back to it."""
        self._returned: dict[str, list[tuple[FeedbackSpec, Rows]]] = {}
        """The same in this attempt, until it is processed."""
        self._send: Send = lambda batch: None
        self.restored = False
        self.begin_ms = self.process_ms = self.snapshot_ms = 0.0
        self._row_bytes = 0
        self.state_held: dict[str, Held] = {}
        by_uid = {operator.spec.uid: operator for operator in self.operators}
        everybody: list[Operator | SinkRuntime | Feedback] = [
            *self.operators,
            *self.sinks.values(),
            *self.feedbacks,
        ]
        self._consumers = [consumer for consumer in everybody if consumer.spec.lane is not None]
        self._lane_count = len(spec.lanes_in)
        for operator in self.operators:
            for outlet, outlet_spec in zip(operator.outlets, operator.spec.outlets, strict=True):
                outlet.targets += [self.sinks[uid].write for uid in outlet_spec.sinks]
                outlet.targets += [
                    partial(by_uid[uid].take, inlet_index=index)
                    for uid, index in outlet_spec.operators
                ]
                outlet.targets += [self._lane_target(lane) for lane in outlet_spec.lanes]
        self._newest = Token(-1, -1, Execution())
        self._begin: Begin | None = None
        self._subtask = 0
        self._rewritten: list[Compacted] = []
        self._closed = False
        self._lock = threading.RLock()
        self._token_lock = threading.Lock()

    @property
    def holdings(self) -> list[Holding]:
        return [holding for operator in self.operators for holding in operator.holdings]

    def _lane_target(self, lane: int) -> Send:
        return lambda batch: self._send(self.spec.outgoing.pack(lane, batch))

    def check(self, token: Token) -> None:
        if token < self._newest:
            raise StaleTokenError(f"attempt {token} is superseded by {self._newest}")

    def begin(self, token: Token, begin: Begin, subtask: int) -> None:
        """Start an attempt: every operator at the parent's version, nothing of this epoch in."""
        # The token is announced before the lock is taken, so that an older attempt still
        # running sees it at its next batch and lets go.
        with self._token_lock:
            self.check(token)
            self._newest = token
        with self._lock, self._log_scope(token, subtask):
            self.check(token)
            started = time.perf_counter()
            mine = self._parts.read(begin, subtask, self.store)
            self._begin, self._subtask = begin, subtask
            self._rewritten.clear()
            self.compactor.settle(mine.settled)
            self.restored = False
            for operator in self.operators:
                operator.declare()
                for holding in operator.holdings:
                    self._bring_to_parent(holding, token, begin, mine, subtask)
                operator.open(begin, subtask)
                if not self.restored:
                    # After a restore the first rows come first: what has expired is not seen.
                    operator.reclaim(max(RECLAIM_S_MIN, RECLAIM_SHARE * self.process_ms / 1000))
                self._take_returned(operator, begin, mine, subtask)
            for sink in self.sinks.values():
                sink.begin(begin, subtask)
            for feedback in self.feedbacks:
                feedback.begin(subtask, self._own(feedback.spec, begin, mine, subtask))
            self._room.begin(begin)
            self.begin_ms = (time.perf_counter() - started) * 1000
            self.process_ms = 0.0
        crash_point("slot.begun")

    def follow(self, token: Token, begin: Begin, subtask: int) -> None:
        """Bring the state to the parent's version and run nothing: the driver is a standby."""
        with self._token_lock:
            self.check(token)
            self._newest = token
        with self._lock, self._log_scope(token, subtask):
            self.check(token)
            mine = self._parts.read(begin, subtask, self.store)
            for operator in self.operators:
                operator.declare()
                for holding in operator.holdings:
                    self._bring_to_version(holding, begin, mine, subtask)
                    for table in holding.tables.values():
                        table.end_applying()
                    if holding.timers is not None:
                        holding.timers.build()
                    # The leader removes expired state in its own slots only.
                    holding.set_floor(begin)
                operator.reclaim(FOLLOWING_RECLAIM_S)

    def _log_scope(self, token: Token, subtask: int) -> AbstractContextManager[None]:
        """Return a scope in which log records name job, epoch and subtask."""
        return log_scope(job=self._job_name, epoch=token.epoch, subtask=subtask)

    def _bring_to_parent(
        self, holding: Holding, token: Token, begin: Begin, mine: Part, subtask: int
    ) -> None:
        is_full = self._behind.is_full(holding)
        self._bring_to_version(holding, begin, mine, subtask)
        uid, version = holding.uid, holding.version
        # All subtasks hold shared state alike, and the first one stores it.
        is_writer = holding.scope != "shared" or subtask == 0
        if is_writer and uid in begin.rewrite and version != EMPTY_VERSION:
            self.compactor.cancel(uid)
            self._rewritten.append(self._write_base_now(holding, begin))
        else:
            due = mine.compactions.get(uid)
            self._behind.start(
                holding,
                begin,
                due,
                lambda: self.check(token),
                is_full=is_full,
                is_restored=self.restored,
            )

    def _bring_to_version(self, holding: Holding, begin: Begin, mine: Part, subtask: int) -> None:
        uid = holding.uid
        groups = holding.own(subtask, begin.parallelism, mine)
        version = mine.versions[uid]
        missing: list[range] = []
        if holding.backend.is_lost():
            holding.give_up()
        is_here = holding.is_at(version, groups)
        if not is_here:
            # Before anything of it changes: what is being written is of the state that was.
            self.compactor.cancel(uid)
        if not is_here and version != EMPTY_VERSION and self._catch_up(holding, begin, groups):
            self.restored = True
            crash_point("slot.restored")
        else:
            missing = holding.bring_to(version, groups, mine.pieces.get(uid, []))
        if missing and version != EMPTY_VERSION:
            if begin.execution.round:
                raise EpochError(
                    f"operator {uid!r}: subtask {subtask} has lost its state of round "
                    f"{begin.execution.round}, which is stored nowhere; the batch runs again"
                )
            self._read_parent(holding, missing, version, begin, subtask)
            self.restored = True
            crash_point("slot.restored")
        holding.version = version
        # Batches and rounds of a running epoch start from state that no epoch has.
        is_first = not begin.execution.batch and not begin.execution.round
        holding.as_of = begin.parent if is_first else None

    def _catch_up(self, holding: Holding, begin: Begin, groups: range) -> bool:
        """Bring state of an earlier epoch to the parent by later deltas; False if they do not."""
        held = holding.as_of
        if holding.scope != "keyed" or groups != holding.groups or held is None:
            return False
        if begin.parent is None or begin.execution.batch or begin.execution.round:
            return False
        if holding.version == INCOMPLETE or not is_ancestor(self.log, held, self._parent(begin)):
            return False
        return catch_up(holding, self.store, self._parent(begin), self.scratch, begin)

    def _take_returned(self, operator: Operator, begin: Begin, mine: Part, subtask: int) -> None:
        self._returned[operator.spec.uid] = [
            (spec, rows)
            for spec in self._returns[operator.spec.uid]
            if (
                rows := take(
                    spec,
                    self._in_flight,
                    begin,
                    mine.versions[spec.uid],
                    self._own(spec, begin, mine, subtask),
                    subtask,
                    lambda: self._parent(begin),
                    self.store,
                    self.scratch,
                )
            )
            is not None
        ]

    def _own(self, spec: FeedbackSpec, begin: Begin, mine: Part, subtask: int) -> range:
        """Return the key groups whose rows a loop sends back to this subtask."""
        return mine.own(subtask, begin.parallelism, self._group_count, spec.parallelism)

    def _run_returned(self, operator: Operator) -> None:
        """Process the rows that loops sent back: before all other rows but broadcast ones."""
        inlets = operator.spec.row_inlets
        for spec, (groups, times, rows) in self._returned.pop(operator.spec.uid, ()):
            for start in range(0, len(rows), RETURNED_ROWS_MAX):
                mine = rows.slice(start, RETURNED_ROWS_MAX)
                if inlets[0].name:
                    mine = put_into_lane(mine, inlets, spec.target)
                operator.run_returned(
                    groups.slice(start, RETURNED_ROWS_MAX),
                    None if times is None else times.slice(start, RETURNED_ROWS_MAX),
                    mine,
                )

    def _read_parent(
        self, holding: Holding, missing: list[range], version: str, begin: Begin, subtask: int
    ) -> None:
        parent = self._parent(begin)
        if holding.scope == "subtask":
            held = parent.operators.get(holding.uid)
            # Each list has its own version, so another one is of a share.
            if held is not None and (
                len(held.ranges) != begin.parallelism or held.ranges[subtask].version != version
            ):
                redistribute(
                    holding,
                    self.store,
                    parent,
                    subtask=subtask,
                    owners=count_owners(holding.most, begin.parallelism),
                    scratch=self.scratch,
                )
                return
        restore(holding, self.store, parent, missing, self.scratch, begin)

    def _parent(self, begin: Begin) -> Epoch:
        """Return the stored epoch that the attempt starts from."""
        if begin.pending is not None:
            return read_pending(self.store, begin.pending)
        if begin.execution.batch:
            raise EpochError(
                f"a slot has lost the state that batch {begin.execution.batch} of epoch "
                f"{begin.epoch} starts from; the next attempt restores it",
                is_lost=True,
            )
        assert begin.parent is not None, "state without a parent epoch"
        return self.log.epoch(begin.parent)

    def _write_base_now(self, holding: Holding, begin: Begin) -> Compacted:
        base = holding.backend.begin_base(holding.tables, holding.groups)
        try:
            uid, groups = holding.uid, holding.groups
            return write_base(base, uid, groups, self.store, begin, self.scratch)
        finally:
            base.close()

    def attach(self, token: Token, send: Send) -> None:
        """Send the level's output here until a newer attempt attaches. Rows may come now."""
        with self._lock, self._log_scope(token, self._subtask):
            self.check(token)
            self._send = send
            self._row_bytes = 0
            started = time.perf_counter()
            # Those that are fed by others first: timers of these may emit at once.
            for operator in reversed(self.operators):
                operator.begin_rows()
                if operator.spec.broadcast_inlet is None:
                    self._run_returned(operator)
            self.process_ms = (time.perf_counter() - started) * 1000

    def run(self, token: Token, batch: pa.RecordBatch) -> None:
        """Rows in, in the order they came. What they cause goes to `send` and to sinks."""
        with self._lock, self._log_scope(token, self._subtask):
            self.check(token)
            started = time.perf_counter()
            self._row_bytes = max(self._row_bytes, batch.nbytes // max(1, batch.num_rows))
            for consumer in self._consumers:
                if isinstance(consumer, Operator):
                    self._run_operator(consumer, batch)
                    continue
                mine = self._in_lanes(batch, consumer.spec.lane)
                if not mine.num_rows:
                    continue
                assert consumer.spec.lane is not None
                rows = self.spec.incoming.open(mine, consumer.spec.lane)
                if isinstance(consumer, Feedback):
                    consumer.run(_groups(mine), rows)
                else:
                    consumer.write(pa.RecordBatch.from_struct_array(rows))
            self.process_ms += (time.perf_counter() - started) * 1000
            assert self._begin is not None, "rows follow begin"
            self._room.check(self._begin)
        crash_point("slot.batch")

    def _run_operator(self, operator: Operator, batch: pa.RecordBatch) -> None:
        spec = operator.spec
        broadcast = spec.broadcast_inlet
        if broadcast is not None:
            # Spark has put them before all others of the level, so they come first here too.
            theirs = self._in_lanes(batch, broadcast.lane)
            if theirs.num_rows:
                times = theirs["time"] if broadcast.event_time else None
                operator.run_broadcast(times, self.spec.incoming.open(theirs, _lane(broadcast)))
        shuffled = [inlet for inlet in spec.row_inlets if not inlet.is_chained]
        mine = self._in_lanes(batch, *(inlet.lane for inlet in shuffled))
        if not mine.num_rows:
            return
        self._run_returned(operator)
        main = spec.inlets[0]
        # Rows that a loop sent back are in declared types, and the two are put together.
        parts = {
            _lane(inlet): self.spec.incoming.open(
                mine, _lane(inlet), in_declared_types=bool(self._returns[spec.uid])
            )
            for inlet in shuffled
        }
        rows = mix_lanes(mine[LANE], parts, spec.row_inlets) if main.name else parts[_lane(main)]
        operator.run(_groups(mine), mine["time"] if main.event_time else None, rows)

    def _in_lanes(self, batch: pa.RecordBatch, *lanes: int | None) -> pa.RecordBatch:
        if len(lanes) == self._lane_count:
            return batch
        return batch.filter(pc.is_in(batch[LANE], pa.array(lanes, pa.int32())))

    def finish(self, token: Token) -> Ack:
        """Make delta and output durable, then say so."""
        with self._lock, self._log_scope(token, self._subtask):
            self.check(token)
            begin = self._begin
            assert begin is not None, "finish follows begin"
            started = time.perf_counter()
            for operator in self.operators:
                self._run_returned(operator)
            # In their order: what one still emits, the next one gets.
            for operator in self.operators:
                operator.end()
            ended = time.perf_counter()
            self.process_ms += (ended - started) * 1000
            finishing = Finishing(self.store, begin, self._subtask)
            operators = [finishing.operator(operator) for operator in self.operators]
            shared = [op.shared for op in self.operators if op.shared is not None]
            operators += [finishing.shared(holding) for holding in shared]
            self.state_held = {
                held.uid: held.state_held()
                for held in self.holdings
                if held.scope != "shared" or self._subtask == 0
            }
            operators += [finishing.feedback(feedback) for feedback in self.feedbacks]
            crash_point("slot.delta.written")
            committables = {}
            for uid, sink in self.sinks.items():
                committable = sink.prepare()
                if committable is not None:
                    committables[uid] = committable
            crash_point("slot.sink.prepared")
            self.snapshot_ms = (time.perf_counter() - ended) * 1000
            counted = {uid: s.rows for uid, s in self.sinks.items() if s.spec.lane is not None}
            return Ack(self.spec.index, self._subtask, operators, committables, counted)

    def report(
        self,
        token: Token,
        *,
        executor: str,
        log: str,
        started_ms: int,
        stage: int | None = None,
        door: str = "",
        slot_id: str = "",
    ) -> Report:
        """Return the measurements of the finished attempt, and the files written beside it."""
        with self._lock:
            # A later attempt may have begun, and its counts are not this one's.
            self.check(token)
            return self._report(executor, log, started_ms, stage, door, slot_id)

    def _report(
        self,
        executor: str,
        log: str,
        started_ms: int,
        stage: int | None,
        door: str,
        slot_id: str,
    ) -> Report:
        uids = {holding.uid for holding in self.holdings}
        written = [file for file in self.compactor.list_unconfirmed() if file.uid in uids]
        heats = {op.spec.uid: op.heat for op in self.operators if op.heat is not None}
        return Report(
            level=self.spec.index,
            subtask=self._subtask,
            executor=executor,
            log=log,
            started_ms=started_ms,
            finished_ms=time.time_ns() // 1_000_000,
            begin_ms=self.begin_ms,
            restored=self.restored,
            process_ms=self.process_ms,
            snapshot_ms=self.snapshot_ms,
            compacted=(*self._rewritten, *written),
            state_held=self.state_held,
            base_failed=self.compactor.failure(),
            stage=stage,
            door=door,
            slot_id=slot_id,
            epoch=0 if self._begin is None else self._begin.epoch,
            execution=Execution() if self._begin is None else self._begin.execution,
            group_rows={uid: cut_zeros(heat.group_rows()) for uid, heat in heats.items()},
            hot_keys={uid: heat.hot_keys() for uid, heat in heats.items()},
            letters={
                op.spec.uid: op.letters.sample
                for op in self.operators
                if op.letters is not None and op.letters.sample
            },
            user={op.spec.uid: found for op in self.operators if (found := op.metrics)},
            row_bytes=self._row_bytes,
        )

    def abandon(self, token: Token) -> None:
        """The attempt has failed: its sinks forget. State is undone by the next `begin`."""
        with self._lock:
            if token == self._newest:
                for sink in self.sinks.values():
                    sink.abort()

    def sweep(self, seconds: float) -> bool:
        """Between epochs: remove state that has expired; True when there is more."""
        with self._lock:
            if self._closed:
                return False
            holdings = [holding for holding in self.holdings if not holding.is_adopted]
            if any(holding.reclaim(seconds) for holding in holdings):
                return True
            emptied = [holding for holding in holdings if holding.tidy()]
        for holding in emptied:
            holding.backend.compact()
        if emptied:
            trim_memory()
        return False

    def retire(self, successor: LevelRuntime | None) -> None:
        """Hand over to another version of this level; calls that still run here are superseded."""
        with self._token_lock:
            newest, self._newest = self._newest, Token(1 << 62, 0, Execution())
        with self._lock:
            heirs = {} if successor is None else {op.spec.uid: op for op in successor.operators}
            for operator in self.operators:
                heir = heirs.get(operator.spec.uid)
                adopted = set() if heir is None else heir.adopt(operator)
                for holding in operator.holdings:
                    if holding.uid not in adopted:
                        self.compactor.cancel(holding.uid)
            if successor is not None:
                successor._newest = newest
            self.close()

    def close(self) -> None:
        self._closed = True
        for operator in self.operators:
            operator.close()
        for sink in self.sinks.values():
            sink.abort()
            sink.sink.close()
