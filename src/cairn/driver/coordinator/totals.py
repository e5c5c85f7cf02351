"""Running totals of a job over all its epochs, kept in each of them.

    metrics.totals                     epochs, attempts, restored subtasks, times
    metrics.operators[uid].totals      rows, entries, bytes of an operator
    metrics.operators[uid].user        metrics of its function

An epoch's totals are those of the epoch before it on its lineage, and its own. So they go on
over restarts, and the newest epoch alone has them all; after a rollback they are as of the epoch
that the job went back to.

Always true here:
- totals count committed epochs only;
- a job that begins with a savepoint or a branch counts from 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cairn.metrics import UserMetrics, add_metrics
from cairn.report.epoch import (
    NOTHING_MEASURED,
    Measured,
    OperatorMeasured,
    OperatorTotals,
    Timings,
    Totals,
)
from cairn.storage.manifest import Epoch


def with_totals(
    metrics: Measured,
    batch: Measured,
    timings: Timings,
    user: Mapping[str, UserMetrics],
    newest: Epoch | None,
    *,
    is_first_batch: bool,
) -> Measured:
    """Return the metrics of an epoch with the totals as of its last batch.

    `batch` and `timings` are of that batch alone; the batch ran on `newest`: the epoch before,
    or this one as of the batch before.
    """
    before = Measured() if newest is None else newest.metrics
    done = Totals(
        epochs=int(is_first_batch),
        attempts=timings.attempts,
        restored=batch.restored,
        bases=batch.bases,
        base_bytes=batch.base_bytes,
        # The commit time of the previous epoch: this one has not been published yet.
        commits=int(is_first_batch and newest is not None),
        commit_ms=(timings.last_commit_ms or 0.0) if is_first_batch else 0.0,
        alignment_ms=sum(ms or 0.0 for ms in timings.alignment_ms.values()),
        begin_ms=timings.begin_ms,
        process_ms=timings.process_ms,
        snapshot_ms=timings.snapshot_ms,
        run_ms=timings.run_ms,
        base_ms=timings.base_ms,
        merge_ms=timings.merge_ms,
    )
    operators = {
        uid: _with_totals(
            measured,
            batch.operators.get(uid, NOTHING_MEASURED),
            user.get(uid),
            before.operators.get(uid, NOTHING_MEASURED),
        )
        for uid, measured in metrics.operators.items()
    }
    last = before.totals or Totals()
    names = Totals.__struct_fields__
    sums = {name: _add(getattr(last, name), getattr(done, name)) for name in names}
    totals = msgspec.structs.replace(done, **sums)
    return msgspec.structs.replace(metrics, operators=operators, totals=totals)


def _with_totals(
    measured: OperatorMeasured,
    batch: OperatorMeasured,
    user: UserMetrics | None,
    before: OperatorMeasured,
) -> OperatorMeasured:
    last = before.totals or OperatorTotals()
    names = OperatorTotals.__struct_fields__
    totals = OperatorTotals(**{n: getattr(last, n) + getattr(batch, n) for n in names})
    known = before.user
    if user is not None:
        known = add_metrics(known or UserMetrics(), user)
    return msgspec.structs.replace(measured, totals=totals, user=known)


def _add(before: float, last: float) -> float:
    total = before + last
    return round(total, 1) if isinstance(total, float) else total
