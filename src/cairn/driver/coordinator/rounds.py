"""Rounds of a batch: one, or several in a job with loops or where memory is short.

Each round is an execution, on the state that the round before has left. The first one reads the
rows of the sources. Later ones read none and process the records that loops have sent back, until
there are none. If the rows of a batch do not fit into the memory of the slots, they are read in
slices: a round reads each, and rounds of its loops follow.

Always true here:
- epoch, `now`, watermark and parent are the same in all rounds of an attempt;
- versions between two rounds are in no log: if a slot loses one, the whole attempt fails;
- only the first round orders compactions;
- all slices are read, whatever happens between them: a batch is in an epoch whole;
- records are stored only if the next epoch will process them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from cairn.crash import crash_point
from cairn.driver.coordinator.acks import check_complete, check_shared
from cairn.driver.coordinator.quiet_collector import pause_collector
from cairn.protocol.messages import WHOLE, Ack, Begin, OperatorAck, Part, Report, Slice
from cairn.protocol.scoped_state import ScopedState
from cairn.protocol.spec import JobSpec
from cairn.storage.manifest import EMPTY_VERSION, Epoch, EpochOperator, next_version

INLINE_BYTES_MAX = 32 * 1024 * 1024
"""Limit of the bytes in acknowledgements of all rounds, which the driver holds."""


class Outcome(NamedTuple):
    """The result of a round: one Ack per level and subtask, and the reports."""

    acks: list[Ack]
    reports: list[Report]
    event_times: Mapping[str, int] = MappingProxyType({})
    """The latest event time of each origin with rows, in microseconds."""
    sources_ms: int | None = None
    """Time between the first and the last finish of Spark's tasks before level 0, if known."""
    sink_rows: Mapping[str, int] = MappingProxyType({})
    """Per sink that drops its rows, those that Spark has counted."""


Execute = Callable[[Begin], Outcome]


def run_rounds(
    begin: Begin,
    execute: Execute,
    spec: JobSpec,
    states: Mapping[str, ScopedState],
    *,
    is_stopping: Callable[[], bool],
) -> list[Outcome]:
    """Run the rounds of an attempt: in a job with loops up to `rounds_max` for each slice."""
    feedbacks = {feedback.uid for feedback in spec.feedbacks}
    rounds = []
    inlined_bytes = 0
    at, since = begin.slice or WHOLE, begin.execution.round
    while True:
        # Decided before the round: only the last round stores the records it sends back.
        is_enough = begin.execution.round - since + 1 >= spec.rounds_max or is_stopping()
        begin = msgspec.structs.replace(begin, is_last_round=is_enough and at.is_last)
        outcome = execute(begin)
        with pause_collector():
            acks = check_complete(outcome.acks, spec, begin.parallelism)
            check_shared(acks, states)
        rounds.append(outcome._replace(acks=acks))
        goes_on = not is_enough and sends_back(acks, feedbacks)
        if not goes_on and at.is_last:
            return rounds
        crash_point("driver.round.ran")
        inlined_bytes += count_inlined_bytes(acks)
        begin = next_round(begin, acks, feedbacks, inlined_bytes)
        if not goes_on:
            at, since = Slice(at.index + 1, at.count), begin.execution.round
            begin = msgspec.structs.replace(begin, slice=at)


def next_round(
    begin: Begin, acks: Sequence[Ack], feedbacks: Collection[str], inlined_bytes: int = 0
) -> Begin:
    """Return the begin of the next round. Acknowledgements had `inlined_bytes` so far."""
    versions = {subtask: dict(part.versions) for subtask, part in begin.parts.items()}
    for subtask, ack in _operators(acks):
        mine = versions[subtask]
        if ack.uid in feedbacks:
            mine[ack.uid] = EMPTY_VERSION if ack.delta is None else ack.delta.id
        elif ack.delta is not None:
            mine[ack.uid] = next_version(mine[ack.uid], ack.delta.id)
    shares = max(1, sum(map(len, versions.values())))
    left = max(0, INLINE_BYTES_MAX - inlined_bytes) // shares
    return msgspec.structs.replace(
        begin,
        execution=msgspec.structs.replace(begin.execution, round=begin.execution.round + 1),
        inline_bytes_max=min(begin.inline_bytes_max, left),
        parts={
            subtask: Part(mine, groups=begin.parts[subtask].groups)
            for subtask, mine in versions.items()
        },
        rewrite=[],
        slice=None,
    )


def latest_times(rounds: Sequence[Outcome]) -> dict[str, int]:
    """Return the latest event time of each origin in all rounds, in microseconds."""
    found: dict[str, int] = {}
    for outcome in rounds:
        for name, time_us in outcome.event_times.items():
            found[name] = max(time_us, found.get(name, time_us))
    return found


def count_sink_rows(rounds: Sequence[Outcome]) -> dict[str, int]:
    """Return per sink that drops its rows those of all rounds."""
    found: dict[str, int] = {}
    for outcome in rounds:
        for uid, count in outcome.sink_rows.items():
            found[uid] = found.get(uid, 0) + count
    return found


def count_inlined_bytes(acks: Sequence[Ack]) -> int:
    """Return the bytes of state in acknowledgements."""
    deltas = [ack.delta for _, ack in _operators(acks)]
    return sum(len(d.data) for d in deltas if d is not None and d.data is not None)


def sends_back(acks: Sequence[Ack], feedbacks: Collection[str]) -> bool:
    """True if a loop sends records back."""
    return any(ack.uid in feedbacks and ack.delta is not None for _, ack in _operators(acks))


def in_flight(epoch: Epoch | None) -> int:
    """Return the number of records in all loops after an epoch."""
    return 0 if epoch is None else sum(records_of(epoch).values())


def records_of(epoch: Epoch) -> dict[str, int]:
    """Return the number of records per loop and receiving operator."""
    return {
        uid: sum(each.state_entries for each in stored.ranges)
        for uid, stored in epoch.operators.items()
        if stored.scope == "feedback"
    }


def is_pending(epoch: Epoch | None) -> bool:
    """True if loops have records to process after an epoch."""
    return epoch is not None and any(
        has_records(stored) for stored in epoch.operators.values() if stored.scope == "feedback"
    )


def has_records(stored: EpochOperator) -> bool:
    # Not from the key counts: after a change of parallelism they are estimates.
    return any(ref.rows for each in stored.ranges for ref in each.files)


def _operators(acks: Sequence[Ack]) -> Iterable[tuple[int, OperatorAck]]:
    for ack in acks:
        for operator in ack.operators:
            yield ack.subtask, operator


__all__ = [
    "Execute",
    "Outcome",
    "count_inlined_bytes",
    "count_sink_rows",
    "has_records",
    "in_flight",
    "is_pending",
    "latest_times",
    "next_round",
    "records_of",
    "run_rounds",
    "sends_back",
]
