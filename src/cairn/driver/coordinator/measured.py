"""Measure an epoch: acknowledgements and reports of subtasks become the figures of its manifest.

An epoch of several batches is measured batch by batch: `add_timings` and `add_measured` put the
figures together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

import msgspec

from cairn.driver.coordinator.alignment import alignment_ms, level_alignment_ms
from cairn.metrics import UserMetrics, add_metrics, merge_subtasks
from cairn.protocol.letters import SAMPLE_MAX
from cairn.protocol.messages import Ack, Begin, Compacted, OperatorAck, Report
from cairn.protocol.spec import JobSpec
from cairn.report.epoch import (
    NOTHING_MEASURED,
    HotKey,
    LetterSample,
    Measured,
    OperatorMeasured,
    SubtaskTimes,
    Timings,
)
from cairn.slot.heat import bucket_count, hottest
from cairn.storage.manifest import Held

_PHASES = ("begin_ms", "process_ms", "snapshot_ms")
_COUNTED = ("rows_in", "rows_out", "late_rows", "untimed_rows", "error_rows")
"""Figures that have one name in acknowledgements, manifests and totals."""
_SUMMED = (*_COUNTED, "entries_changed", "delta_bytes")


def collect_announced(reports: Sequence[Report]) -> list[Compacted]:
    """Return the files that slots have written in the background, each once, oldest first.

    Files are named by content: empty bases of two ranges have one name.
    """
    found = {
        (file.stored.id, file.uid, file.first_group): file
        for report in reports
        for file in report.compacted
    }
    return sorted(found.values(), key=lambda file: (file.as_of, file.uid, file.first_group))


def state_held_of(reports: Sequence[Report]) -> dict[tuple[str, int], Held]:
    """Return how much each operator holds in each subtask."""
    return {
        (uid, report.subtask): held for report in reports for uid, held in report.state_held.items()
    }


def latest(reports: Sequence[Report]) -> list[Report]:
    """Return one report of each subtask of each level: the last one, if its stage ran twice."""
    found = {(r.level, r.subtask): r for r in sorted(reports, key=lambda r: r.finished_ms)}
    return list(found.values())


def user_of(rounds: Sequence[Sequence[Report]]) -> dict[str, UserMetrics]:
    """Return the metrics of each operator's function, over all subtasks and rounds."""
    found: dict[str, UserMetrics] = {}
    for reports in rounds:
        if not any(report.user for report in reports):
            continue
        counted: dict[str, list[UserMetrics]] = {}
        for report in latest(reports):
            for uid, user in report.user.items():
                counted.setdefault(uid, []).append(user)
        for uid, parts in counted.items():
            found[uid] = add_metrics(found.get(uid, UserMetrics()), merge_subtasks(parts))
    return found


def letters_of(rounds: Sequence[Sequence[Report]]) -> dict[str, list[LetterSample]]:
    """Return per operator a few of the rows that were put aside, of all subtasks and rounds."""
    found: dict[str, list[LetterSample]] = {}
    for reports in rounds:
        if not any(report.letters for report in reports):
            continue
        for report in sorted(latest(reports), key=lambda r: (r.level, r.subtask)):
            for uid, sample in report.letters.items():
                found[uid] = [*found.get(uid, ()), *sample][:SAMPLE_MAX]
    return found


def time_epoch(
    spec: JobSpec,
    rounds: Sequence[Sequence[Report]],
    begin: Begin,
    ran_ms: float,
    sources_ms: int | None = None,
    last_commit_ms: float = 0.0,
) -> Timings:
    """Return the times of a batch: the slowest subtask of each phase, alignment per level.

    Phases of several rounds add up; subtasks are those of the first round. `last_commit_ms` is of
    the epoch before: its sinks publish after its record is written.
    """
    phases = {
        name: round(sum(max((getattr(r, name) for r in each), default=0.0) for each in rounds), 1)
        for name in _PHASES
    }
    reports = [report for each in rounds for report in each]
    waited = level_alignment_ms(spec.levels, reports, sources_ms, ran_ms)
    first_round = sorted(rounds[0] if rounds else (), key=lambda r: (r.level, r.subtask))
    return Timings(
        run_ms=round(ran_ms, 1),
        attempts=begin.execution.attempt + 1,
        rounds=len(rounds),
        last_commit_ms=round(last_commit_ms, 1),
        **phases,
        base_ms=_slowest_ms(reports, "base"),
        merge_ms=_slowest_ms(reports, "merge"),
        alignment_ms={str(level): ms for level, ms in waited.items()},
        subtasks=[
            SubtaskTimes(
                level=r.level,
                subtask=r.subtask,
                executor=r.executor,
                restored=r.restored,
                begin_ms=round(r.begin_ms, 1),
                process_ms=round(r.process_ms, 1),
                snapshot_ms=round(r.snapshot_ms, 1),
                base_ms=round(sum(c.ms for c in r.compacted if c.kind == "base"), 1),
            )
            for r in first_round
        ],
    )


def _slowest_ms(reports: Sequence[Report], kind: str) -> float:
    times = (file.ms for file in collect_announced(reports) if file.kind == kind)
    return round(max(times, default=0.0), 1)


def measure_epoch(
    spec: JobSpec,
    acks: Sequence[Ack],
    rounds: Sequence[Sequence[Report]],
    sources_ms: int | None = None,
    published: dict[str, int] | None = None,
    sink_rows: Mapping[str, int] = MappingProxyType({}),
    ran_ms: float = math.inf,
) -> Measured:
    """Return the figures of a batch: rows of all rounds together, state as of the last one.

    `ran_ms` is the time that it took, and `sink_rows` are the rows that Spark has counted for sinks
    that drop them.
    """
    reports = [report for each in rounds for report in each]
    acked: dict[str, list[OperatorAck]] = {}
    subtasks: dict[str, dict[int, int]] = {}
    for ack in acks:
        for op in ack.operators:
            acked.setdefault(op.uid, []).append(op)
            rows = subtasks.setdefault(op.uid, {})
            rows[ack.subtask] = rows.get(ack.subtask, 0) + op.rows_in
    counted = {uid: _sum_up(each) for uid, each in acked.items()}
    keys, entries = dict.fromkeys(counted, 0), dict.fromkeys(counted, 0)
    for (uid, _), held in state_held_of(rounds[-1] if rounds else ()).items():
        if uid in counted:
            keys[uid] += held.keys
            entries[uid] += held.entries
    compacted = collect_announced(reports)
    waited = alignment_ms(spec.levels, reports, sources_ms, ran_ms)
    group_rows, hot_keys = _heat_of(rounds, spec.group_count)
    letters = letters_of(rounds)
    functions = {op.uid for level in spec.levels for op in level.operators}
    return Measured(
        operators={
            uid: msgspec.structs.replace(
                NOTHING_MEASURED,
                **sums,
                state_keys=keys[uid],
                state_entries=entries[uid],
                alignment_ms=waited.get(uid),
                subtask_rows=(
                    [rows for _, rows in sorted(subtasks[uid].items())] if uid in functions else []
                ),
                group_rows=group_rows.get(uid, []),
                hot_keys=hot_keys.get(uid, []),
                error_sample=letters.get(uid, []),
            )
            for uid, sums in counted.items()
        },
        restored=sum(report.restored for report in reports),
        bases=sum(file.kind == "base" for file in compacted),
        base_bytes=sum(f.stored.uploaded_bytes or f.stored.length for f in compacted),
        base_failures=sorted({r.base_failed for r in reports if r.base_failed}),
        published=published,
        sink_rows=_add_counts(sink_rows, *(ack.sink_rows for ack in acks)),
    )


def _sum_up(acked: Sequence[OperatorAck]) -> dict[str, int]:
    """Return the figures of an operator over all subtasks and rounds."""
    sums = {name: sum(map(attrgetter(name), acked)) for name in _COUNTED}
    sums["entries_changed"] = sum(op.keys_changed for op in acked)
    sums["delta_bytes"] = sum(op.delta.length for op in acked if op.delta is not None)
    return sums


def _heat_of(
    rounds: Sequence[Sequence[Report]], group_count: int
) -> tuple[dict[str, list[int]], dict[str, list[HotKey]]]:
    """Return rows by key group and hot keys of each operator with keys."""
    groups: dict[str, list[int]] = {}
    keys: dict[str, list[tuple[str, int]]] = {}
    for reports in rounds:
        for report in latest(reports):
            for uid, (first, rows) in report.group_rows.items():
                if uid not in groups:
                    groups[uid] = [0] * bucket_count(group_count)
                sums = groups[uid]
                for bucket, count in enumerate(rows, first):
                    sums[bucket] += count
                keys.setdefault(uid, []).extend(report.hot_keys.get(uid, ()))
    return groups, {uid: [HotKey(*each) for each in hottest(found)] for uid, found in keys.items()}


# Several batches of an epoch


def add_timings(before: Timings, last: Timings) -> Timings:
    """Return the times of an epoch so far and its last batch together; subtasks of the last."""
    summed = ("run_ms", *_PHASES, "base_ms", "merge_ms")
    return msgspec.structs.replace(
        last,
        attempts=before.attempts + last.attempts,
        rounds=before.rounds + last.rounds,
        alignment_ms={
            level: _add_known(before.alignment_ms.get(level), ms)
            for level, ms in last.alignment_ms.items()
        },
        **{name: round(getattr(before, name) + getattr(last, name), 1) for name in summed},
    )


def add_measured(before: Measured, last: Measured) -> Measured:
    """Return the figures of an epoch so far and its last batch together.

    Rows and bytes add up; state is as of the last batch.
    """
    published = last.published
    if before.published is not None and published is not None:
        published = _add_counts(before.published, published)
    return Measured(
        operators={
            uid: _add_operator(before.operators.get(uid, NOTHING_MEASURED), each)
            for uid, each in last.operators.items()
        },
        restored=before.restored + last.restored,
        bases=before.bases + last.bases,
        base_bytes=before.base_bytes + last.base_bytes,
        base_failures=sorted({*before.base_failures, *last.base_failures}),
        published=published,
        sink_rows=_add_counts(before.sink_rows, last.sink_rows),
    )


def _add_counts(*counts: Mapping[str, int]) -> dict[str, int]:
    return {
        uid: sum(each.get(uid, 0) for each in counts)
        for uid in dict.fromkeys(uid for each in counts for uid in each)
    }


def _add_operator(before: OperatorMeasured, last: OperatorMeasured) -> OperatorMeasured:
    hot = [(each.key, each.rows) for each in (*before.hot_keys, *last.hot_keys)]
    return msgspec.structs.replace(
        last,
        alignment_ms=_add_known(before.alignment_ms, last.alignment_ms),
        subtask_rows=_add_lists(before.subtask_rows, last.subtask_rows),
        group_rows=_add_lists(before.group_rows, last.group_rows),
        hot_keys=[HotKey(*each) for each in hottest(hot)],
        error_sample=[*before.error_sample, *last.error_sample][:SAMPLE_MAX],
        **{name: getattr(before, name) + getattr(last, name) for name in _SUMMED},
    )


def _add_known(before: float | None, last: float | None) -> float | None:
    return last if before is None or last is None else round(before + last, 1)


def _add_lists(before: list[int], last: list[int]) -> list[int]:
    if len(before) != len(last):
        return last
    return [first + second for first, second in zip(before, last, strict=True)]
