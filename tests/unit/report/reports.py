"""Reports of epochs that never ran."""

from __future__ import annotations

from typing import Any

import msgspec

from cairn.report.epoch import (
    NOTHING_MEASURED,
    EpochReport,
    OperatorMeasured,
    OperatorReport,
    Timings,
    split_time,
)

TIMINGS = Timings(
    run_ms=100.0,
    begin_ms=1.0,
    process_ms=40.0,
    snapshot_ms=9.0,
    alignment_ms={"0": 20.0, "1": None},
    last_commit_ms=5.0,
)


def epoch_report(
    number: int = 1, timings: Timings = TIMINGS, commit_ms: float | None = None, **other: Any
) -> EpochReport:
    report = EpochReport(
        epoch=number,
        parent=number - 1,
        term=1,
        wall_ms=0,
        rows_in=1000 * number,
        rows_out=0,
        late_rows=0,
        untimed_rows=0,
        error_rows=0,
        rows_per_s=10_000,
        watermark_ms=None,
        state_keys=7,
        state_entries=7,
        state_bytes=2048,
        delta_bytes=10,
        in_flight=0,
        epoch_ms=timings.run_ms,
        commit_ms=commit_ms,
        parts=split_time(timings, commit_ms),
        attempts=timings.attempts,
        rounds=1,
        parallelism=1,
        restored=0,
        bases=0,
        base_bytes=0,
        operators={},
        totals=None,
        timings=timings,
    )
    return msgspec.structs.replace(report, **other)


def operator_report(**other: Any) -> OperatorReport:
    return OperatorReport(**{**msgspec.structs.asdict(NOTHING_MEASURED), "state_bytes": 0, **other})


def measured(**figures: Any) -> OperatorMeasured:
    return msgspec.structs.replace(NOTHING_MEASURED, **figures)
