"""Rounds of a batch: a job with loops may go around several times before it goes on.

A round is an execution of its own. Every round but the first runs without rows of the
sources, from the records that the round before sent back and on the state it left.

Always true here:
- epoch, `now`, watermark and parent are the same in all rounds of an attempt;
- versions between two rounds are in no log: an attempt that loses one is lost as a whole;
- what is written beside the epochs is asked for in the first round only;
- records are stored only if the next epoch is to process them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from cairn.slot.protocol import Ack, Begin, OperatorAck
from cairn.storage.manifest import EMPTY_VERSION, Epoch, OperatorEntry, next_version

INLINE_BYTES_MAX = 32 * 1024 * 1024
"""So much of all rounds of an epoch travels with acknowledgements; the driver holds it."""


def following(
    begin: Begin, acks: Sequence[Ack], feedbacks: Collection[str], inlined_bytes: int = 0
) -> Begin:
    """What the next round starts from. `inlined_bytes` have come with acknowledgements so far."""
    versions = {uid: list(parts) for uid, parts in begin.versions.items()}
    for subtask, ack in _operators(acks):
        parts = versions[ack.uid]
        if ack.uid in feedbacks:
            parts[subtask] = EMPTY_VERSION if ack.delta is None else ack.delta.id
        elif ack.delta is not None:
            parts[subtask] = next_version(parts[subtask], ack.delta.id)
    shares = max(1, len(versions) * begin.parallelism)
    left = max(0, INLINE_BYTES_MAX - inlined_bytes) // shares
    return msgspec.structs.replace(
        begin,
        round=begin.round + 1,
        inline_bytes_max=min(begin.inline_bytes_max, left),
        versions=versions,
        compactions={},
        pieces={},
        settled=[],
        rewrite=[],
    )


def inlined(acks: Sequence[Ack]) -> int:
    """The bytes of state that came with acknowledgements."""
    deltas = [ack.delta for _, ack in _operators(acks)]
    return sum(len(d.data) for d in deltas if d is not None and d.data is not None)


def sends_back(acks: Sequence[Ack], feedbacks: Collection[str]) -> bool:
    """Whether any record is on its way back."""
    return any(ack.uid in feedbacks and ack.delta is not None for _, ack in _operators(acks))


def in_flight(epoch: Epoch | None) -> int:
    """How many records an epoch has left on their way back, in all loops."""
    return 0 if epoch is None else sum(records_of(epoch).values())


def records_of(epoch: Epoch) -> dict[str, int]:
    """The same for each loop and the operator the records go to."""
    return {
        uid: sum(part.state_keys for part in entry.ranges)
        for uid, entry in epoch.operators.items()
        if entry.scope == "feedback"
    }


def is_pending(epoch: Epoch | None) -> bool:
    """Whether an epoch has records to process, without a single row of the sources."""
    return epoch is not None and any(
        has_records(entry) for entry in epoch.operators.values() if entry.scope == "feedback"
    )


def has_records(entry: OperatorEntry) -> bool:
    # Not by the keys of a range: those are estimates after a change of parallelism.
    return any(ref.rows for part in entry.ranges for ref in part.files)


def _operators(acks: Sequence[Ack]) -> Iterable[tuple[int, OperatorAck]]:
    for ack in acks:
        for operator in ack.operators:
            yield ack.subtask, operator


__all__ = [
    "following",
    "has_records",
    "in_flight",
    "inlined",
    "is_pending",
    "records_of",
    "sends_back",
]
