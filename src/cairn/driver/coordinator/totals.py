"""What a job has done in all its epochs: running totals, kept in each of them.

    metrics["totals"]                     epochs, attempts, restored subtasks, times
    metrics["operators"][uid]["totals"]   rows, keys, bytes of an operator
    metrics["operators"][uid]["user"]     what its function has counted

An epoch's totals are those of the epoch before it on its lineage, and its own. So they go on
over restarts, and whoever can read the newest epoch knows them; after a rollback they are as of
the epoch that was gone back to.

Always true here:
- what is in no committed epoch is in no total;
- a job that begins with a savepoint or a branch counts from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cairn.metrics import Collected, followed
from cairn.storage.manifest import Epoch

COUNTED: Final = (
    "rows_in",
    "rows_out",
    "entries_changed",
    "late_rows",
    "untimed_rows",
    "error_rows",
    "delta_bytes",
)
_TIMED: Final = ("begin_ms", "process_ms", "snapshot_ms", "run_ms", "base_ms", "merge_ms")


def with_totals(
    metrics: dict[str, Any],
    batch: Mapping[str, Any],
    timings: Mapping[str, Any],
    user: Mapping[str, Collected],
    newest: Epoch | None,
    *,
    is_first_batch: bool,
) -> dict[str, Any]:
    """The metrics of an epoch with the totals as of its last batch.

    `batch` and `timings` are of that batch alone, `newest` is what it ran on: the epoch
    before, or this one as of the batch before.
    """
    before: Mapping[str, Any] = {} if newest is None else newest.metrics
    operators = {}
    for uid, measured in metrics["operators"].items():
        known = before.get("operators", {}).get(uid, {})
        counted = batch["operators"].get(uid, {})
        last = known.get("totals", {})
        if "keys_changed" in last:
            # An older version counted entries under the name of keys.
            last = {**last, "entries_changed": last["keys_changed"]}
        totals = {name: last.get(name, 0) + counted.get(name, 0) for name in COUNTED}
        operators[uid] = {**measured, "totals": totals}
        if found := followed(known.get("user", {}), user.get(uid, {})):
            operators[uid]["user"] = found
    last = before.get("totals", {})
    done: dict[str, Any] = {
        "epochs": int(is_first_batch),
        "attempts": timings["attempts"],
        "restored": batch["restored"],
        "bases": batch["bases"],
        "base_bytes": batch["base_bytes"],
        "alignment_ms": sum(ms or 0 for ms in timings["alignment_ms"].values()),
        # Of the epoch before: its own is not over when this is written.
        "commits": int(is_first_batch and newest is not None),
        "commit_ms": timings["last_commit_ms"] if is_first_batch else 0,
        **{name: timings[name] for name in _TIMED},
    }
    totals = {name: _rounded(last.get(name, 0) + value) for name, value in done.items()}
    return {**metrics, "operators": operators, "totals": totals}


def _rounded(value: float) -> float:
    return round(value, 1) if isinstance(value, float) else value
