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

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from cairn.crash import crash_point
from cairn.driver.coordinator.acks import check_shared, complete
from cairn.protocol.messages import Ack, Begin, OperatorAck, Report
from cairn.protocol.scoped_state import ScopedState
from cairn.protocol.spec import JobSpec
from cairn.storage.manifest import EMPTY_VERSION, Epoch, EpochOperator, next_version

INLINE_BYTES_MAX = 32 * 1024 * 1024
"""So much of all rounds of an epoch travels with acknowledgements; the driver holds it."""


class Outcome(NamedTuple):
    """What an executed round gives: one Ack per level and subtask, and what was measured."""

    acks: list[Ack]
    reports: list[Report]
    event_times: Mapping[str, int] = MappingProxyType({})
    """The latest event time of each origin that gave rows, in microseconds."""
    sources_ms: int | None = None
    """From the first to the last of Spark's tasks before level 0 to finish, where known."""


Execute = Callable[[Begin], Outcome]


def run_rounds(
    begin: Begin,
    execute: Execute,
    spec: JobSpec,
    states: Mapping[str, ScopedState],
    *,
    is_stopping: Callable[[], bool],
) -> list[Outcome]:
    """The rounds of an attempt: one, or in a job with loops as many as it takes."""
    feedbacks = {feedback.uid for feedback in spec.feedbacks}
    rounds = []
    inlined_bytes = 0
    while True:
        # Known before: what the last round sends back is stored, and nothing of the others.
        is_last = begin.execution.round + 1 >= spec.rounds_max or is_stopping()
        begin = msgspec.structs.replace(begin, is_last_round=is_last)
        outcome = execute(begin)
        acks = complete(outcome.acks, spec, begin.parallelism)
        check_shared(acks, states)
        rounds.append(outcome._replace(acks=acks))
        if is_last or not sends_back(acks, feedbacks):
            return rounds
        crash_point("driver.round.ran")
        inlined_bytes += inlined(acks)
        begin = following(begin, acks, feedbacks, inlined_bytes)


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
        execution=msgspec.structs.replace(begin.execution, round=begin.execution.round + 1),
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
        uid: sum(part.state_entries for part in stored.ranges)
        for uid, stored in epoch.operators.items()
        if stored.scope == "feedback"
    }


def is_pending(epoch: Epoch | None) -> bool:
    """Whether an epoch has records to process, without a single row of the sources."""
    return epoch is not None and any(
        has_records(stored) for stored in epoch.operators.values() if stored.scope == "feedback"
    )


def has_records(stored: EpochOperator) -> bool:
    # Not by the keys of a range: those are estimates after a change of parallelism.
    return any(ref.rows for part in stored.ranges for ref in part.files)


def _operators(acks: Sequence[Ack]) -> Iterable[tuple[int, OperatorAck]]:
    for ack in acks:
        for operator in ack.operators:
            yield ack.subtask, operator


__all__ = [
    "Execute",
    "Outcome",
    "following",
    "has_records",
    "in_flight",
    "inlined",
    "is_pending",
    "records_of",
    "run_rounds",
    "sends_back",
]
