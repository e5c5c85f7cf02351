"""The distribution of an operator's keys over its key groups and subtasks.

The rows that came in were measured in the epoch. The stored rows are counted from the indexes of
its files, without reading the files. They are an upper bound: deltas may have a key twice.

Always true here:
- a value stands for `step` key groups;
- a skew is the largest share divided by the mean: 1.0 is even, None stands for no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cairn.backends.files import group_counts
from cairn.errors import CairnError, StateNotFoundError
from cairn.report.epoch import NOTHING_MEASURED
from cairn.slot.heat import bucket_groups, bucket_rows
from cairn.storage.manifest import Epoch, EpochOperator, RangeState
from cairn.storage.store import Store

Facts = dict[str, Any]

FILES_READ_MAX: Final = 400


def spread_of(store: Store, epoch: Epoch, operator: str | None, group_count: int) -> Facts:
    """Return the groups and subtasks of a keyed operator, by default the one with most keys."""
    keyed = {uid: entry for uid, entry in epoch.operators.items() if entry.scope == "keyed"}
    facts: Facts = {"epoch": epoch.number, "operators": sorted(keyed), "operator": operator}
    if operator is None:
        operator = max(keyed, key=lambda uid: _entries(keyed[uid]), default=None)
    if operator is None:
        return {**facts, "groups": None, "subtasks": [], "skew": None, "hot_keys": []}
    if operator not in keyed:
        known = ", ".join(sorted(keyed)) or "none"
        raise StateNotFoundError(
            f"epoch {epoch.number} has no keyed operator {operator!r}\n"
            f"  found: {known}\n  next: /api/groups without operator= lists them",
            operator=operator,
        )
    measured = epoch.metrics.operators.get(operator, NOTHING_MEASURED)
    parts = keyed[operator].ranges
    rows = measured.subtask_rows
    subtasks = [
        {
            "subtask": index,
            "first_group": part.first_group,
            "group_count": part.group_count,
            "state_keys": part.state_keys,
            "state_entries": part.state_entries,
            "state_bytes": part.state_bytes,
            "rows": rows[index] if index < len(rows) else None,
        }
        for index, part in enumerate(parts)
    ]
    stored, is_exact = _count_stored_rows(store, parts, group_count)
    # The other subtasks own nothing: the operator has a parallelism of its own.
    owners = [index for index, part in enumerate(parts) if part.group_count]
    return {
        **facts,
        "operator": operator,
        "groups": {
            "count": group_count,
            "step": bucket_groups(group_count),
            "stored_rows": [round(rows) for rows in bucket_rows(stored)],
            "is_exact": is_exact,
            "rows": measured.group_rows or None,
        },
        "subtasks": subtasks,
        "skew": {
            "state_entries": skew([parts[at].state_entries for at in owners]),
            "rows": skew([rows[at] for at in owners if at < len(rows)]),
        },
        "hot_keys": measured.hot_keys,
    }


def skew(shares: Sequence[float]) -> float | None:
    """Return the largest share divided by the mean."""
    total = sum(shares)
    return round(max(shares) * len(shares) / total, 2) if total > 0 else None


def _entries(entry: EpochOperator) -> int:
    return sum(part.state_entries for part in entry.ranges)


def _count_stored_rows(
    store: Store, parts: Sequence[RangeState], group_count: int
) -> tuple[npt.NDArray[np.float64], bool]:
    """Return the rows per key group, and True if they come from the index of every file."""
    counts = np.zeros(group_count)
    is_exact, read = True, 0
    for part in parts:
        mine = part.groups
        for ref in part.files:
            read += 1
            if read <= FILES_READ_MAX:
                try:
                    for state in group_counts(store, ref).values():
                        for group, rows in state.items():
                            if group in mine:
                                counts[group] += rows
                    continue
                except (CairnError, KeyError, OSError):
                    pass  # The file was removed meanwhile.
            # No index was read: as if the rows were spread evenly.
            is_exact = False
            for group in mine:
                counts[group] += ref.rows / len(mine)
    return counts, is_exact
