"""Read committed epochs as reports: the one place where an `EpochReport` is made."""

from __future__ import annotations

import msgspec

from cairn.driver.coordinator.rounds import in_flight
from cairn.report.epoch import (
    EpochReport,
    OperatorMeasured,
    OperatorReport,
    OperatorTotals,
    split_time,
    total_keys,
)
from cairn.storage.manifest import Epoch, operator_uids


def report_of(epoch: Epoch, commit_ms: float | None = None) -> EpochReport:
    """Return the report of an epoch; `commit_ms` is the time its sinks took, where known."""
    operators = operators_of(epoch)
    found, timings = operators.values(), epoch.timings
    # Rows that no operator has seen come in and go out where their sink is.
    sink_rows = sum(epoch.metrics.sink_rows.values())
    rows_in = sum(each.rows_in for each in found) + sink_rows
    return EpochReport(
        epoch=epoch.number,
        parent=epoch.parent,
        term=epoch.term,
        wall_ms=epoch.wall_ms,
        rows_in=rows_in,
        rows_out=sum(each.rows_out for each in found) + sink_rows,
        late_rows=sum(each.late_rows for each in found),
        untimed_rows=sum(each.untimed_rows for each in found),
        error_rows=sum(each.error_rows for each in found),
        rows_per_s=round(rows_in / timings.run_ms * 1000) if timings.run_ms else 0,
        watermark_ms=epoch.watermark_ms,
        state_keys=total_keys(found),
        state_entries=sum(each.state_entries for each in found),
        state_bytes=sum(
            part.state_bytes for entry in epoch.operators.values() for part in entry.ranges
        ),
        # Records of loops are written too.
        delta_bytes=sum(each.delta_bytes for each in epoch.metrics.operators.values()),
        in_flight=in_flight(epoch),
        epoch_ms=timings.run_ms,
        commit_ms=commit_ms,
        parts=split_time(timings, commit_ms),
        attempts=timings.attempts,
        rounds=timings.rounds,
        parallelism=max((e.parallelism for e in epoch.operators.values()), default=0),
        restored=epoch.metrics.restored,
        bases=epoch.metrics.bases,
        base_bytes=epoch.metrics.base_bytes,
        operators=operators,
        totals=epoch.metrics.totals,
        timings=timings,
        decision=epoch.decision,
    )


def operators_of(epoch: Epoch) -> dict[str, OperatorReport]:
    """Return the figures of each operator, with those of its broadcast state.

    Records of loops are not state of an operator: `in_flight` counts them.
    """
    found: dict[str, OperatorMeasured] = {}
    for uid, measured in epoch.metrics.operators.items():
        entry = epoch.operators.get(uid)
        if entry is not None and entry.scope == "feedback":
            continue
        is_shared = entry is not None and entry.scope == "shared"
        owner = uid.partition(":")[0] if is_shared else uid
        found[owner] = _add_shared(found[owner], measured) if owner in found else measured
    return {
        uid: OperatorReport(**msgspec.structs.asdict(each), state_bytes=_state_bytes(epoch, uid))
        for uid, each in found.items()
    }


def _add_shared(own: OperatorMeasured, shared: OperatorMeasured) -> OperatorMeasured:
    """Return the figures of an operator with those of its broadcast state."""
    totals = own.totals
    if totals is not None:
        more = shared.totals or OperatorTotals()
        totals = msgspec.structs.replace(
            totals,
            entries_changed=totals.entries_changed + more.entries_changed,
            delta_bytes=totals.delta_bytes + more.delta_bytes,
        )
    return msgspec.structs.replace(
        own,
        entries_changed=own.entries_changed + shared.entries_changed,
        state_entries=own.state_entries + shared.state_entries,
        delta_bytes=own.delta_bytes + shared.delta_bytes,
        totals=totals,
    )


def _state_bytes(epoch: Epoch, operator: str) -> int:
    entries = (epoch.operators[uid] for uid in operator_uids(epoch.operators, operator))
    return sum(part.state_bytes for entry in entries for part in entry.ranges)
