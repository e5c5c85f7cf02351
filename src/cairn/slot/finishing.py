"""After the last row of an epoch: what it has changed becomes durable, and is acknowledged.

Always true here:
- an acknowledgement names only what is already durable or goes with it, but for records of a
  loop that are processed before the epoch ends;
- of state that all subtasks hold alike, the first one stores the changes, and the others say
  what they are called.
"""

from __future__ import annotations

from cairn.protocol.messages import Begin, OperatorAck, Stored
from cairn.slot.feedback import Feedback
from cairn.slot.holding import Holding
from cairn.slot.operator import Operator
from cairn.storage.files import EncodedSegment, Kind, StatePart, encode_segment
from cairn.storage.pack import write_segment
from cairn.storage.store import Store


class Finishing:
    """The end of an attempt in a subtask."""

    def __init__(self, store: Store, begin: Begin, subtask: int) -> None:
        self._store = store
        self._begin = begin
        self._subtask = subtask

    def operator(self, operator: Operator) -> OperatorAck:
        """What an operator has done, and changed of its own state."""
        parts, holding = operator.delta(), operator.state
        stored = self._stored(self._encoded(holding.uid, parts)) if parts else None
        holding.finished(None if stored is None else stored.id)
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
            groups=operator.groups_in,
        )

    def shared(self, holding: Holding) -> OperatorAck:
        """What every subtask has changed in the same way."""
        parts = holding.delta(holding.uid.split(":")[0])
        is_writer = self._subtask == 0
        stored: Stored | None = None
        if parts and is_writer:
            stored = self._stored(self._encoded(holding.uid, parts))
        elif parts:
            stored = Stored(self._encoded(holding.uid, parts).id, 0, 0)
        holding.finished(None if stored is None else stored.id)
        return OperatorAck(
            uid=holding.uid,
            rows_in=0,
            rows_out=0,
            keys_changed=holding.keys_changed() if is_writer else 0,
            delta=stored,
        )

    def feedback(self, feedback: Feedback) -> OperatorAck:
        """What a loop sends back: stored in the last round, until then only here."""
        uid = feedback.spec.uid
        part = feedback.finish()
        stored = None
        if part is not None:
            segment = self._encoded(uid, [part], "base")
            if self._begin.is_last_round:
                stored = self._stored(segment)
            else:
                stored = Stored(segment.id, 0, segment.rows)
            feedback.finished(stored.id, self._begin)
        return OperatorAck(uid=uid, rows_in=0, rows_out=0, keys_changed=0, delta=stored)

    def _encoded(self, uid: str, parts: list[StatePart], kind: Kind = "delta") -> EncodedSegment:
        epoch = self._begin.epoch
        return encode_segment(kind, uid, parts, first_epoch=epoch, last_epoch=epoch)

    def _stored(self, segment: EncodedSegment) -> Stored:
        if len(segment.data) <= self._begin.inline_bytes_max:
            return Stored(segment.id, len(segment.data), segment.rows, data=segment.data)
        at = write_segment(self._store, segment, self._begin.term)
        return Stored(segment.id, len(segment.data), segment.rows, path=at.path)
