"""What a slot does: runs the levels of a job, epoch by epoch, and keeps their state between.

    load(spec)                     once per job
    begin(level, token, begin)     per attempt: bring each operator to the parent's version
    run(level, token, batch)       rows in; envelope batches go to `send`
    finish(level, token) -> Ack    delta and sink output durable, then acknowledged

Always true here:
- every call carries a token; a token older than the newest seen is refused, so a
  zombie can neither wipe nor extend the live attempt;
- pending work is promoted only if its version is the one the parent names,
  otherwise it is undone; what is not here is restored from the store;
- an acknowledgement names only what is already durable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.crash import crash_point
from cairn.errors import EpochError
from cairn.sinks.base import Sink, SinkContext, Writer
from cairn.slot.operator import Operator
from cairn.slot.protocol import (
    Ack,
    Begin,
    Compacted,
    Compaction,
    OperatorAck,
    Stored,
    Token,
)
from cairn.slot.restore import merge_files, restore, write_base
from cairn.slot.spec import JobSpec, LevelSpec, OperatorSpec, SinkSpec, envelope_schema, lane_name
from cairn.storage.files import StatePart, encode_segment
from cairn.storage.log import Log
from cairn.storage.manifest import EMPTY_VERSION
from cairn.storage.pack import write_segment
from cairn.storage.store import Store, open_store

INCOMPLETE = ""
"""A version that no epoch names."""

Send = Callable[[pa.RecordBatch], None]


class StaleTokenError(EpochError):
    """A call of an attempt that has been superseded."""


class Runtime:
    """The levels of one job in one slot."""

    def __init__(self, *, scratch: str, store: Store | None = None) -> None:
        self.spec_id = ""
        self._scratch = scratch
        self._store = store
        self._levels: dict[int, LevelRuntime] = {}

    def load(self, spec_id: str, data: bytes) -> None:
        spec = JobSpec.unpickled(data)
        self.close()
        store = self._store or open_store(spec.checkpoint)
        log = Log(store)
        for level in spec.levels:
            self._levels[level.index] = LevelRuntime(spec, level, store, log, self._scratch)
        self.spec_id = spec_id

    def level(self, index: int) -> LevelRuntime:
        return self._levels[index]

    def close(self) -> None:
        for level in self._levels.values():
            level.close()
        self._levels.clear()


class SinkRuntime:
    """A sink in a slot: open for the slot's life, a writer per attempt."""

    def __init__(self, spec: SinkSpec, job: JobSpec, scratch: str) -> None:
        self.spec = spec
        self.sink: Sink = spec.sink
        self.sink.open(SinkContext(job.job_id, job.job_name, spec.uid, spec.schema, scratch))
        self.writer: Writer | None = None

    def begin(self, begin: Begin, subtask: int) -> None:
        self.abort()
        self.writer = self.sink.writer(begin.epoch, subtask, begin.attempt)

    def write(self, batch: pa.RecordBatch) -> None:
        assert self.writer is not None, "a sink is written to between begin and prepare"
        schema = self.spec.schema
        if batch.schema != schema:
            # United streams may differ in the order of columns, Spark's rows in their time zone.
            columns = [batch[field.name].cast(field.type) for field in schema]
            batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        try:
            self.writer.write(batch)
        except OSError as error:
            # Named here: above, it would pass for an error of the function that emits the rows.
            raise EpochError(
                f"sink {self.spec.uid!r} could not be written: {error}", sink=self.spec.uid
            ) from error

    def prepare(self) -> Any:
        assert self.writer is not None, "a sink is prepared once per attempt"
        writer, self.writer = self.writer, None
        return writer.prepare()

    def abort(self) -> None:
        if self.writer is not None:
            writer, self.writer = self.writer, None
            writer.abort()


class LevelRuntime:
    """One level: its operators and sinks, and the attempt under way."""

    def __init__(self, job: JobSpec, spec: LevelSpec, store: Store, log: Log, scratch: str) -> None:
        self.spec = spec
        self.store = store
        self.log = log
        self.scratch = scratch
        self.operators = [
            Operator(op, backend=job.backend, group_count=job.group_count) for op in spec.operators
        ]
        self.sinks = {sink.uid: SinkRuntime(sink, job, scratch) for sink in spec.sinks}
        self.schema = envelope_schema(spec.lanes)
        self._send: Send = lambda batch: None
        self.restored = False
        self.begin_ms = self.process_ms = self.snapshot_ms = 0.0
        self._consumers: list[Operator | SinkRuntime] = [
            *self.operators,
            *(sink for sink in self.sinks.values() if sink.spec.lane is not None),
        ]
        for operator in self.operators:
            for outlet, outlet_spec in zip(operator.outlets, operator.spec.outlets, strict=True):
                outlet.targets += [self.sinks[uid].write for uid in outlet_spec.sinks]
                outlet.targets += [self._lane_target(lane) for lane in outlet_spec.lanes]
        self._newest = Token(-1, -1, -1, -1)
        self._begin: Begin | None = None
        self._subtask = 0
        self._compacted: dict[str, Compacted] = {}
        self._lock = threading.RLock()
        self._token_lock = threading.Lock()

    def _lane_target(self, lane: int) -> Send:
        fields = list(self.schema)

        def send(batch: pa.RecordBatch) -> None:
            count = batch.num_rows
            columns: list[pa.Array] = [pa.array(np.full(count, lane, np.int32))]
            for field in fields[1:]:
                if field.name == lane_name(lane):
                    # By name: united streams may differ in the order of their columns.
                    parts = [batch[part.name] for part in field.type]
                    columns.append(pa.StructArray.from_arrays(parts, fields=list(field.type)))
                else:
                    columns.append(pa.nulls(count, field.type))
            self._send(pa.RecordBatch.from_arrays(columns, schema=self.schema))

        return send

    def _check(self, token: Token) -> None:
        if token < self._newest:
            raise StaleTokenError(f"attempt {token} is superseded by {self._newest}")

    def begin(self, token: Token, begin: Begin, subtask: int) -> None:
        """Start an attempt: every operator at the parent's version, nothing of this epoch in."""
        # The token is announced before the lock is taken, so that an older attempt still
        # running sees it at its next batch and lets go.
        with self._token_lock:
            self._check(token)
            self._newest = token
        with self._lock:
            self._check(token)
            started = time.perf_counter()
            self._begin, self._subtask = begin, subtask
            self._compacted.clear()
            self.restored = False
            for operator in self.operators:
                self._bring_to_parent(operator, begin, subtask)
                operator.open(begin, subtask)
            for sink in self.sinks.values():
                sink.begin(begin, subtask)
            self.begin_ms = (time.perf_counter() - started) * 1000
            self.process_ms = 0.0
        crash_point("slot.begun")

    def _bring_to_parent(self, operator: Operator, begin: Begin, subtask: int) -> None:
        uid = operator.spec.uid
        groups = operator.own(subtask, begin.parallelism)
        version = begin.versions[uid][subtask]
        operator.declare()
        if not operator.is_at(version, groups):
            # What a restore leaves behind that fails half way must not pass for the version.
            operator.reset(INCOMPLETE, groups)
            if version != EMPTY_VERSION:
                assert begin.parent is not None, "state without a parent epoch"
                restore(operator, self.log, self.store, begin.parent)
                self.restored = True
            operator.version = version
        compaction = begin.compactions.get(uid, {}).get(subtask)
        if compaction is not None:
            stored = self._compact(operator, compaction, begin)
            if stored is not None:
                self._compacted[uid] = Compacted(compaction, stored)

    def _compact(self, operator: Operator, compaction: Compaction, begin: Begin) -> Stored | None:
        assert begin.parent is not None, "nothing to compact without a parent epoch"
        if compaction.kind == "base":
            return write_base(operator, self.store, begin, self.scratch)
        return merge_files(operator, compaction, self.log, self.store, begin)

    def attach(self, token: Token, send: Send) -> None:
        """What leaves this level goes here, until a newer attempt attaches."""
        with self._lock:
            self._check(token)
            self._send = send

    def run(self, token: Token, batch: pa.RecordBatch) -> None:
        """Rows in, in the order they came. What they cause goes to `send` and to sinks."""
        with self._lock:
            self._check(token)
            started = time.perf_counter()
            lanes = None if len(self._consumers) == 1 else batch["lane"]
            for consumer in self._consumers:
                lane = consumer.spec.lane
                assert lane is not None
                mine = batch if lanes is None else batch.filter(pc.equal(lanes, lane))
                if not mine.num_rows:
                    continue
                rows = mine[lane_name(lane)]
                if isinstance(consumer, Operator):
                    consumer.run(mine["group"].to_numpy().tolist(), rows)
                else:
                    consumer.write(pa.RecordBatch.from_struct_array(rows))
            self.process_ms += (time.perf_counter() - started) * 1000
        crash_point("slot.batch")

    def finish(self, token: Token) -> Ack:
        """Make delta and output durable, then say so."""
        with self._lock:
            self._check(token)
            begin = self._begin
            assert begin is not None, "finish follows begin"
            started = time.perf_counter()
            operators = [self._finish_operator(op, begin) for op in self.operators]
            crash_point("slot.delta.written")
            committables = {}
            for uid, sink in self.sinks.items():
                committable = sink.prepare()
                if committable is not None:
                    committables[uid] = committable
            crash_point("slot.sink.prepared")
            self.snapshot_ms = (time.perf_counter() - started) * 1000
            return Ack(self.spec.index, self._subtask, operators, committables)

    def _finish_operator(self, operator: Operator, begin: Begin) -> OperatorAck:
        parts = operator.finish()
        stored = self._store_delta(operator.spec, parts, begin) if parts else None
        operator.finished(None if stored is None else stored.id)
        return OperatorAck(
            uid=operator.spec.uid,
            rows_in=operator.rows_in,
            rows_out=sum(outlet.rows_out for outlet in operator.outlets),
            keys_changed=operator.keys_changed(),
            state_keys=operator.state_keys(),
            delta=stored,
            compacted=self._compacted.get(operator.spec.uid),
        )

    def _store_delta(self, spec: OperatorSpec, parts: list[StatePart], begin: Begin) -> Stored:
        segment = encode_segment(
            "delta", spec.uid, parts, first_epoch=begin.epoch, last_epoch=begin.epoch
        )
        if len(segment.data) <= begin.inline_bytes_max:
            return Stored(segment.id, len(segment.data), segment.rows, data=segment.data)
        at = write_segment(self.store, segment, begin.term)
        return Stored(segment.id, len(segment.data), segment.rows, path=at.path)

    def abandon(self, token: Token) -> None:
        """The attempt has failed: its sinks forget. State is undone by the next `begin`."""
        with self._lock:
            if token == self._newest:
                for sink in self.sinks.values():
                    sink.abort()

    def close(self) -> None:
        for operator in self.operators:
            operator.close()
        for sink in self.sinks.values():
            sink.abort()
            sink.sink.close()
