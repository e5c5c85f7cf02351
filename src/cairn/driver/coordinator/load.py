"""The load of key groups, measured, and ranges that divide it equally.

The load of a key group is the time that its rows take: rows per operator with keys, each weighted
with the mean time of a row in the operator's level. Reports count rows in at most 128 buckets of
neighbouring key groups; within a bucket the rows count as spread evenly.

Always true here:
- ranges by load are contiguous, cover every key group, and leave no subtask without one;
- no other contiguous ranges have a busiest subtask with less load;
- ranges change only if the busiest subtask gets lighter by GAIN_MIN at least: measured rows
  vary from epoch to epoch, and each change moves state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cairn.key_groups import Starts, groups_of, subtask_of
from cairn.protocol.spec import JobSpec
from cairn.report.balance import Balance
from cairn.report.epoch import HotKey
from cairn.slot.heat import bucket_groups
from cairn.storage.manifest import Epoch

Loads = npt.NDArray[np.float64]

KEPT_SHARE: Final = 0.9
"""The weight of earlier epochs shrinks by this factor with each epoch that has rows."""
ROWS_PER_SUBTASK_MIN: Final = 400
"""With fewer rows, chance alone makes one subtask some 10 % busier than another."""
GAIN_MIN: Final = 0.1
LIMIT_MIN: Final = 1.1
"""A key group with this multiple of a subtask's mean load limits what ranges can do."""


class Load:
    """Rows by key group and times of levels, over the last epochs of a run."""

    def __init__(self, group_count: int) -> None:
        self._group_count = group_count
        self._rows: dict[str, Loads] = {}
        self._busy: dict[int, tuple[float, float]] = {}
        """Per level, milliseconds and rows."""
        self._levels: dict[str, int] = {}
        self._hot: dict[str, list[HotKey]] = {}

    def note(self, epoch: Epoch, spec: JobSpec) -> None:
        """Count an epoch in; one without rows says nothing about the load."""
        measured = epoch.metrics.operators
        parallelism = max((each.parallelism for each in epoch.operators.values()), default=0)
        # An operator with a parallelism of its own has equal ranges, whatever its load.
        levels = {
            op.uid: level.index
            for level in spec.levels
            for op in level.operators
            if not 0 < op.parallelism < parallelism
        }
        found = {
            uid: _spread(each.group_rows, self._group_count)
            for uid, each in measured.items()
            if uid in levels and any(each.group_rows)
        }
        if not found:
            return
        nothing: Loads = np.zeros(self._group_count)
        known = {uid: KEPT_SHARE * rows for uid, rows in self._rows.items() if uid in levels}
        self._rows = {
            uid: known.get(uid, nothing) + found.get(uid, nothing) for uid in {**known, **found}
        }
        self._hot = {uid: measured[uid].hot_keys for uid in found}
        for level in {levels[uid] for uid in found}:
            ms = sum(each.process_ms for each in epoch.timings.subtasks if each.level == level)
            rows = sum(measured[uid].rows_in for uid in found if levels[uid] == level)
            old_ms, old_rows = self._busy.get(level, (0.0, 0.0))
            self._busy[level] = (KEPT_SHARE * old_ms + ms, KEPT_SHARE * old_rows + rows)
        self._levels = levels

    def per_group(self) -> Loads:
        """Return the load of each key group, in milliseconds; in rows while no time is known."""
        loads: Loads = np.zeros(self._group_count)
        weights = {level: ms / rows for level, (ms, rows) in self._busy.items() if rows}
        is_timed = all(weight > 0 for weight in weights.values())
        for uid, rows in self._rows.items():
            loads += rows * (weights.get(self._levels[uid], 1.0) if is_timed else 1.0)
        return loads

    def heaviest_share(self) -> float:
        """Return the share of the load in the heaviest key group; 0 while too little is known."""
        loads = self.per_group()
        rows = sum(float(each.sum()) for each in self._rows.values())
        total = float(loads.sum())
        return float(loads.max()) / total if total and rows >= ROWS_PER_SUBTASK_MIN else 0.0

    def ranges_for(self, parallelism: int, present: Starts = ()) -> tuple[Starts, Balance]:
        """Return the ranges to run with, and how they compare with the present ones.

        `present` are ranges of the same parallelism. They stay unless others are clearly better.
        """
        rows = sum(float(each.sum()) for each in self._rows.values())
        if parallelism < 2 or rows < ROWS_PER_SUBTASK_MIN * parallelism:
            none = Balance(
                parallelism=parallelism, busiest_before=None, busiest_after=None, groups_moved=0
            )
            return present, none
        loads = self.per_group()
        mean = float(loads.sum()) / parallelism
        before = busiest(loads, parallelism, present)
        starts = divide(loads, parallelism)
        after = busiest(loads, parallelism, starts)
        if after > (1 - GAIN_MIN) * before:
            starts = present
        balance = Balance(
            parallelism=parallelism,
            busiest_before=round(before / mean, 3),
            busiest_after=round(after / mean, 3),
            groups_moved=count_moved(parallelism, self._group_count, present, starts),
            limit=self._limit(loads, mean),
        )
        return starts, balance

    def _limit(self, loads: Loads, mean: float) -> str | None:
        """Name the key group, or the bucket of them, that is heavier than a subtask's share."""
        width = bucket_groups(self._group_count)
        sums = np.add.reduceat(loads, np.arange(0, len(loads), width))
        at = int(sums.argmax())
        if sums[at] < LIMIT_MIN * mean:
            return None
        first, last = at * width, min(len(loads), (at + 1) * width) - 1
        name = f"key group {first} has" if width == 1 else f"key groups {first} to {last} have"
        text = f"{name} {sums[at] / loads.sum():.0%} of the load, more than a subtask's share"
        bucket_rows = sum(float(rows[first : last + 1].sum()) for rows in self._rows.values())
        all_rows = sum(float(rows.sum()) for rows in self._rows.values())
        hot = max(
            (key for keys in self._hot.values() for key in keys),
            key=lambda key: key.rows,
            default=None,
        )
        if hot is not None and bucket_rows > all_rows / 4:
            text += f"; the hottest key is {hot.key!r}"
        return text


def _spread(buckets: Sequence[int], group_count: int) -> Loads:
    """Return the rows of each key group, from rows by bucket."""
    width = bucket_groups(group_count)
    sizes = np.minimum(width, group_count - np.arange(len(buckets)) * width)
    spread: Loads = np.repeat(np.asarray(buckets, np.float64) / sizes, sizes)
    return spread


def busiest(loads: Loads, parallelism: int, starts: Starts) -> float:
    """Return the load of the busiest subtask."""
    group_count = len(loads)
    ranges = (groups_of(each, parallelism, group_count, starts) for each in range(parallelism))
    return max(float(loads[each.start : each.stop].sum()) for each in ranges)


def count_moved(parallelism: int, group_count: int, before: Starts, after: Starts) -> int:
    """Return how many key groups have another subtask."""
    return sum(
        subtask_of(group, parallelism, group_count, before)
        != subtask_of(group, parallelism, group_count, after)
        for group in range(group_count)
    )


def divide(loads: Loads, parallelism: int) -> Starts:
    """Return ranges whose busiest subtask is as light as possible, and the others near the mean.

    Key groups are never divided, so one heavy key group has a range of its own at best.
    """
    group_count = len(loads)
    assert 1 <= parallelism <= group_count, "every subtask owns a key group"
    # Groups without load count a little: ranges without rows are divided by number.
    even = max(float(loads.sum()), 1.0) * 1e-6 / group_count
    ends = np.concatenate([[0.0], np.cumsum(loads + even)])
    total = float(ends[-1])
    low, high = max(float(np.diff(ends).max()), total / parallelism), total
    for _ in range(50):
        middle = (low + high) / 2
        if _fits(ends, parallelism, middle):
            high = middle
        else:
            low = middle
    # From the last subtask backwards: where its range must begin for all later ones to fit.
    earliest = [group_count] * (parallelism + 1)
    for subtask in reversed(range(parallelism)):
        end = earliest[subtask + 1]
        earliest[subtask] = max(subtask, _reach_back(ends, end, high))
    starts = [0]
    for subtask in range(1, parallelism):
        furthest = min(_reach(ends, starts[-1], high), group_count - (parallelism - subtask))
        wanted = int(np.abs(ends - total * subtask / parallelism).argmin())
        nearest = min(max(wanted, earliest[subtask], starts[-1] + 1), furthest)
        starts.append(max(nearest, starts[-1] + 1))
    return tuple(starts)


def _reach(ends: npt.NDArray[Any], start: int, limit: float) -> int:
    """Return the end of the longest range from `start` within a limit of load."""
    return int(np.searchsorted(ends, ends[start] + limit * (1 + 1e-9), side="right")) - 1


def _reach_back(ends: npt.NDArray[Any], end: int, limit: float) -> int:
    """Return the start of the longest range up to `end` within a limit of load."""
    return int(np.searchsorted(ends, ends[end] - limit * (1 + 1e-9), side="left"))


def _fits(ends: npt.NDArray[Any], parallelism: int, limit: float) -> bool:
    start, last = 0, len(ends) - 1
    for _ in range(parallelism):
        start = _reach(ends, start, limit)
        if start >= last:
            return True
    return False


def starts_of(epoch: Epoch, parallelism: int, group_count: int) -> Starts | None:
    """Return the ranges that an epoch's state lies in; None if it has another parallelism.

    Ranges that are equal are the empty tuple.
    """
    for operator in epoch.operators.values():
        if operator.scope == "keyed" and len(operator.ranges) == parallelism:
            if not all(each.group_count for each in operator.ranges):
                continue  # It has a parallelism of its own.
            starts = tuple(each.first_group for each in operator.ranges)
            equal = tuple(groups_of(i, parallelism, group_count).start for i in range(parallelism))
            return () if starts == equal else starts
    return None
