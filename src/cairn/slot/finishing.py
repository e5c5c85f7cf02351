"""After the last row of an epoch: what it has changed becomes durable, and is acknowledged.

Always true here:
- an acknowledgement names only what is already durable or goes with it, but for records of a
  loop that are processed before the epoch ends;
- of state that all subtasks hold alike, the first one stores the changes, and the others say
  what they are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from cairn.protocol.messages import Begin, OperatorAck
from cairn.slot.feedback import Feedback
from cairn.slot.holding import Holding
from cairn.slot.operator import Operator
from cairn.storage.files import Kind, StateFile, encode_parts
from cairn.storage.pack import write_parts
from cairn.storage.store import Store


class Finishing:
    """The end of an attempt in a subtask."""

    def __init__(self, store: Store, begin: Begin, subtask: int) -> None:
        self._store = store
        self._begin = begin
        self._subtask = subtask

    def operator(self, operator: Operator) -> OperatorAck:
        """Store the changes of an operator's own state; return its acknowledgement."""
        changes, holding = operator.delta(), operator.state
        stored = self._write(*self._encode(holding.uid, changes)) if changes else None
        holding.name_pending(None if stored is None else stored.id)
        event_timer_ms, processing_timer_ms = operator.earliest_timers()
        return OperatorAck(
            uid=operator.spec.uid,
            rows_in=operator.rows_in,
            rows_out=sum(outlet.rows_out for outlet in operator.outlets),
            keys_changed=holding.keys_changed(),
            delta=stored,
            late_rows=operator.late_rows,
            untimed_rows=operator.untimed_rows,
            error_rows=operator.error_rows,
            broadcast_aside=operator.broadcast_aside,
            event_timer_ms=event_timer_ms,
            processing_timer_ms=processing_timer_ms,
            partial_count=operator.partial_count,
        )

    def shared(self, holding: Holding) -> OperatorAck:
        """Store changes that every subtask makes in the same way; return the acknowledgement."""
        changes = holding.delta(holding.uid.split(":")[0])
        is_writer = self._subtask == 0
        stored: StateFile | None = None
        if changes:
            segment, parts = self._encode(holding.uid, changes)
            stored = StateFile(segment.id, "delta", 0, 0)
            if is_writer:
                stored = self._write(segment, parts)
        holding.name_pending(None if stored is None else stored.id)
        return OperatorAck(
            uid=holding.uid,
            rows_in=0,
            rows_out=0,
            keys_changed=holding.keys_changed() if is_writer else 0,
            delta=stored,
        )

    def feedback(self, feedback: Feedback) -> OperatorAck:
        """Store the records that a loop sends back; only the last round stores them."""
        uid = feedback.spec.uid
        records = feedback.finish()
        stored = None
        if records:
            segment, parts = self._encode(uid, records, "base")
            if self._begin.is_last_round:
                stored = self._write(segment, parts)
            else:
                stored = StateFile(segment.id, "base", 0, segment.rows)
            feedback.name_version(stored.id, self._begin)
        return OperatorAck(uid=uid, rows_in=0, rows_out=0, keys_changed=0, delta=stored)

    def _encode(
        self, uid: str, states: Mapping[str, pa.RecordBatch], kind: Kind = "delta"
    ) -> tuple[StateFile, list[Any]]:
        epoch = self._begin.epoch
        return encode_parts(kind, uid, states, first_epoch=epoch, last_epoch=epoch)

    def _write(self, segment: StateFile, parts: list[Any]) -> StateFile:
        begin = self._begin
        return write_parts(
            self._store, segment, parts, begin.term, inline_bytes_max=begin.inline_bytes_max
        )
