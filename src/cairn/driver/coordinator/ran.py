"""A batch whose attempt has succeeded, and what it adds to the epoch's manifest.

Always true here:
- a later batch of an epoch adds to the figures and to the output of those before it;
- state is as of the last round of the last batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cairn.driver.coordinator.measured import (
    add_measured,
    add_timings,
    measure_epoch,
    state_held_of,
    time_epoch,
    user_of,
)
from cairn.driver.coordinator.ranges import owners_of
from cairn.driver.coordinator.record import advance_ranges
from cairn.driver.coordinator.rounds import Outcome, count_sink_rows
from cairn.driver.coordinator.totals import with_totals
from cairn.protocol.messages import Ack, Begin, Compacted, Report
from cairn.protocol.scoped_state import ScopedState
from cairn.protocol.spec import JobSpec
from cairn.report.epoch import Measured, Timings
from cairn.sinks.base import Committable
from cairn.storage.manifest import Epoch, EpochOperator, RangeState, SparkPosition


class Ran(NamedTuple):
    """A batch whose attempt has succeeded."""

    begin: Begin
    position: SparkPosition
    rounds: Sequence[Outcome]
    ranges: dict[str, list[RangeState]]
    """The ranges before the batch, with files written in the background."""
    compacted: Sequence[Compacted]
    prepared: Mapping[str, list[Committable]]
    ran_ms: float

    @property
    def acks(self) -> list[Ack]:
        return [ack for outcome in self.rounds for ack in outcome.acks]

    @property
    def reports(self) -> list[list[Report]]:
        return [outcome.reports for outcome in self.rounds]

    @property
    def is_first_batch(self) -> bool:
        """True if the epoch has no batch before this one."""
        return not self.begin.execution.batch

    def list_reported(self, slots: Sequence[int]) -> dict[int, list[str]]:
        """Return per slot the ids of the files it has reported."""
        found: dict[int, list[str]] = {}
        for report in (report for each in self.reports for report in each if report.compacted):
            ids = [file.stored.id for file in report.compacted]
            found.setdefault(slots[report.subtask], []).extend(ids)
        return found

    def advance_operators(
        self, spec: JobSpec, states: Mapping[str, ScopedState], parallelism: int
    ) -> dict[str, EpochOperator]:
        """Return the entries of operators after the batch, by state."""
        ranges = advance_ranges(
            self.ranges,
            [outcome.acks for outcome in self.rounds],
            self.begin.epoch,
            state_held_of(self.rounds[-1].reports),
            {feedback.uid for feedback in spec.feedbacks},
        )
        versions = {op.uid: op.function_version for level in spec.levels for op in level.operators}
        return {
            uid: EpochOperator(
                uid=uid,
                function_version=versions[state.operator],
                key_types=state.key_types,
                states=state.decls,
                scope=state.scope,
                owners=owners_of(state, parallelism),
                parallelism=parallelism,
                ranges=ranges[uid],
            )
            for uid, state in states.items()
        }

    def measure(
        self, spec: JobSpec, newest: Epoch | None, last_commit_ms: float, *, is_published: bool
    ) -> tuple[Timings, Measured]:
        """Return timings and metrics of the epoch as of this batch, which ran on `newest`.

        If the batch `is_published` before its epoch is committed, the manifest has only the
        number of its committables.
        """
        before = None if self.is_first_batch else newest
        reports, sources_ms = self.reports, self.rounds[0].sources_ms
        timings = time_epoch(spec, reports, self.begin, self.ran_ms, sources_ms, last_commit_ms)
        published = None
        if is_published:
            published = {uid: len(given) for uid, given in self.prepared.items()}
        sink_rows = count_sink_rows(self.rounds)
        batch = measure_epoch(
            spec, self.acks, reports, sources_ms, published, sink_rows, self.ran_ms
        )
        metrics = with_totals(
            batch if before is None else add_measured(before.metrics, batch),
            batch,
            timings,
            user_of(reports),
            newest,
            is_first_batch=self.is_first_batch,
        )
        return timings if before is None else add_timings(before.timings, timings), metrics

    def collect_output(self, newest: Epoch | None) -> dict[str, list[Committable]]:
        """Return the output of the epoch as of this batch, which ran on `newest`."""
        before = {} if newest is None or self.is_first_batch else newest.committables
        return {uid: [*before.get(uid, ()), *given] for uid, given in self.prepared.items()}


__all__ = ["Ran"]
