"""The report of an epoch, which all views read: terminal, JSON, HTTP, Prometheus, notebook.

    Timings, Measured    written into the manifest by the coordinator
    EpochReport          both of them, with totals over operators and the split of time

`epoch_ms` is the time from the begin of an epoch until its manifest is written. Publishing comes
after it: `commit_ms` is known once the sinks are done, and the next epoch's manifest notes it.

Always true here:
- nothing is read or measured, and names are stable: fields are added, never renamed;
- the parts of an epoch's time add up to `epoch_ms` and `commit_ms`: overlapping times count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Self

import msgspec

from cairn.metrics import UserMetrics
from cairn.report.scaling import Decision


class SubtaskTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one subtask of a level, in the first round of the epoch."""

    level: int = 0
    subtask: int = 0
    executor: str = ""
    restored: bool = False
    """It read its state from storage."""
    begin_ms: float = 0.0
    process_ms: float = 0.0
    snapshot_ms: float = 0.0
    base_ms: float = 0.0


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of an epoch. Of the phases of subtasks, those of the slowest one."""

    run_ms: float = 0.0
    """From the begin until the manifest is written."""
    attempts: int = 1
    rounds: int = 1
    last_commit_ms: float | None = None
    """The time that sinks took to publish the epoch before; None: not known."""
    begin_ms: float = 0.0
    """Until the parent's state is at hand, restores included."""
    process_ms: float = 0.0
    snapshot_ms: float = 0.0
    """Writing what the epoch changed."""
    base_ms: float = 0.0
    """Writing bases, beside the epochs."""
    merge_ms: float = 0.0
    alignment_ms: dict[str, float | None] = {}
    """Per level, from its first upstream subtask to finish to the last; None: not known."""
    subtasks: list[SubtaskTimes] = []


class TimeParts(msgspec.Struct, frozen=True, kw_only=True):
    """The split of an epoch's time, in ms."""

    begin: float
    process: float
    alignment: float
    """Levels waited for their input while nothing else took the time."""
    snapshot: float
    commit: float
    """0 while it is not known."""
    other: float
    """Planning, scheduling and shuffling."""

    def items(self) -> list[tuple[str, float]]:
        """Return each part under the name that people see."""
        return [(_PART_NAMES.get(name, name), getattr(self, name)) for name in PARTS]


PARTS: Final = TimeParts.__struct_fields__
_PART_NAMES: Final = {"other": "spark"}


def split_time(timings: Timings, commit_ms: float | None) -> TimeParts:
    """Return how the time of an epoch divides into parts."""
    phases_ms = timings.begin_ms + timings.process_ms + timings.snapshot_ms
    rest_ms = max(0.0, timings.run_ms - phases_ms)
    waited_ms = sum(ms or 0.0 for ms in timings.alignment_ms.values())
    alignment_ms = min(rest_ms, waited_ms)
    return TimeParts(
        begin=timings.begin_ms,
        process=timings.process_ms,
        alignment=round(alignment_ms, 1),
        snapshot=timings.snapshot_ms,
        commit=commit_ms or 0.0,
        other=round(rest_ms - alignment_ms, 1),
    )


class HotKey(msgspec.Struct, frozen=True):
    """A key with many rows."""

    key: str
    rows: int


class LetterSample(msgspec.Struct, frozen=True):
    """A row that was put aside, cut short: for people who look at the epoch."""

    error: str
    key: str | None
    row: str
    input: str | None = None
    at: str | None = None
    """The place in the user's code: FILE:LINE in FUNCTION."""


class OperatorTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of an operator over all epochs so far."""

    rows_in: int = 0
    rows_out: int = 0
    entries_changed: int = 0
    late_rows: int = 0
    untimed_rows: int = 0
    error_rows: int = 0
    delta_bytes: int = 0


# Fields without a default are always written; the long ones only if there is something in them.
# A field that an older manifest lacks is read as NOTHING_MEASURED has it.
class OperatorMeasured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of an operator in an epoch, as its manifest has them."""

    rows_in: int
    rows_out: int
    late_rows: int
    untimed_rows: int
    error_rows: int
    entries_changed: int
    state_keys: int | None
    """Keys that hold state; None: not counted."""
    state_entries: int
    delta_bytes: int
    alignment_ms: float | None = None
    """From the first upstream subtask to finish to the last; None: not known, or no operator."""
    subtask_rows: list[int] = []
    group_rows: list[int] = []
    """Rows by key group, neighbours together where there are many."""
    hot_keys: list[HotKey] = []
    error_sample: list[LetterSample] = []
    """A few of the rows put aside: data, so it is shown like state and is in no metric."""
    totals: OperatorTotals | None = None
    """None: this epoch came from a savepoint or a branch."""
    user: UserMetrics | None = None
    """Metrics of its function, over all epochs so far."""


NOTHING_MEASURED: Final = OperatorMeasured(
    rows_in=0,
    rows_out=0,
    late_rows=0,
    untimed_rows=0,
    error_rows=0,
    entries_changed=0,
    state_keys=0,
    state_entries=0,
    delta_bytes=0,
)


class OperatorReport(OperatorMeasured, frozen=True, kw_only=True):
    """Figures of an operator in an epoch, with the size of its state."""

    state_bytes: int

    def brief(self) -> Self:
        """Return it without the long lists."""
        return msgspec.structs.replace(
            self, subtask_rows=[], group_rows=[], hot_keys=[], error_sample=[], user=None
        )


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a job over all epochs so far; times of phases too."""

    epochs: int = 0
    attempts: int = 0
    restored: int = 0
    bases: int = 0
    base_bytes: int = 0
    commits: int = 0
    """Epochs whose time to publish is in `commit_ms`."""
    commit_ms: float = 0.0
    alignment_ms: float = 0.0
    begin_ms: float = 0.0
    process_ms: float = 0.0
    snapshot_ms: float = 0.0
    run_ms: float = 0.0
    base_ms: float = 0.0
    merge_ms: float = 0.0


class Measured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of an epoch, as its manifest has them."""

    operators: dict[str, OperatorMeasured] = {}
    """By entry: broadcast state has an entry of its own, `operator:state`."""
    restored: int = 0
    """Subtasks that read their state from storage."""
    bases: int = 0
    base_bytes: int = 0
    base_failures: list[str] = []
    totals: Totals | None = None
    """None: this epoch came from a savepoint or a branch."""
    published: dict[str, int] | None = None
    """Committables per sink, where they are published before the manifest is written."""
    sink_rows: dict[str, int] = {}
    """Per sink that no operator of its level feeds, the rows that came to it."""


class EpochReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="epoch"):
    """Figures of a committed epoch."""

    epoch: int
    parent: int | None
    term: int
    wall_ms: int
    """The time of the commit."""
    rows_in: int
    rows_out: int
    late_rows: int
    untimed_rows: int
    error_rows: int
    rows_per_s: int
    watermark_ms: int | None
    state_keys: int | None
    """None: not counted, in epochs of older versions and of savepoints."""
    state_entries: int
    state_bytes: int
    delta_bytes: int
    in_flight: int
    """Records on their way back in loops."""
    epoch_ms: float
    commit_ms: float | None
    """The time that sinks took to publish it; None: not known yet."""
    parts: TimeParts
    attempts: int
    rounds: int
    parallelism: int
    restored: int
    bases: int
    base_bytes: int
    operators: Mapping[str, OperatorReport]
    totals: Totals | None
    timings: Timings
    decision: Decision | None = None
    """The decision about the parallelism before the epoch; None: it stayed."""
    dropped_batches: int | None = None
    """Batches that a sink failed on in this run, with at-most-once; None: not of a run."""

    def brief(self) -> Self:
        """Return it without the long lists of operators."""
        operators = {uid: each.brief() for uid, each in self.operators.items()}
        return msgspec.structs.replace(self, operators=operators)

    def with_commit(self, commit_ms: float) -> Self:
        """Return it with the time that publishing took."""
        parts = split_time(self.timings, commit_ms)
        return msgspec.structs.replace(self, commit_ms=commit_ms, parts=parts)


def total_keys(operators: Iterable[OperatorMeasured]) -> int | None:
    """Return the keys of all operators; None if one of them was not counted."""
    total = 0
    for each in operators:
        if each.state_keys is None:
            return None
        total += each.state_keys
    return total
