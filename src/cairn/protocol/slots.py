"""The slot of each subtask, after any number of changes of the parallelism.

A run begins with slot *i* for subtask *i*. With each change a subtask moves to the slot that holds
most of its key groups. So the parallelisms of a run determine the slots of its subtasks, and a
message need not list them. The choice looks at equal ranges. Ranges by load overlap these for the
most part; where they do not, a subtask restores the key groups that its slot does not hold.

Always true here:
- no two subtasks have the same slot;
- the result depends on the arguments alone: driver and workers find the same slots.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

from cairn.key_groups import groups_of, overlap

CHANGES_MAX = 64
"""After this number of changes a run begins again with slot *i* for subtask *i*."""


@functools.lru_cache(maxsize=8)
def slots_after(parallelisms: tuple[int, ...], group_count: int) -> tuple[int, ...]:
    """Return the slot of each subtask of the last of these parallelisms, oldest first."""
    if len(parallelisms) == 1:
        return tuple(range(parallelisms[0]))
    before = slots_after(parallelisms[:-1], group_count)
    return tuple(slots_for(before, parallelisms[-1], group_count))


def slots_for(before: Sequence[int], parallelism: int, group_count: int) -> list[int]:
    """Return the slot of each subtask: the one with most of its key groups, or a new one.

    `before` has the slots of the present subtasks. Slots are numbered from 0.
    """
    if len(before) == parallelism:
        return list(before)
    found: dict[int, int] = {}
    taken: set[int] = set()
    overlaps = _overlaps(len(before), parallelism, group_count)
    for _, new, old in sorted(overlaps, key=lambda each: (-each[0], each[1:])):
        if new not in found and old not in taken:
            found[new] = before[old]
            taken.add(old)
    held = set(before)
    free = (slot for slot in itertools.count() if slot not in held)
    return [found[new] if new in found else next(free) for new in range(parallelism)]


def _overlaps(before: int, after: int, group_count: int) -> Iterator[tuple[int, int, int]]:
    """Yield (shared key groups, new subtask, old subtask) where ranges overlap, in order."""
    old = new = 0
    while old < before and new < after:
        theirs, ours = groups_of(old, before, group_count), groups_of(new, after, group_count)
        shared = len(overlap(theirs, ours))
        if shared:
            yield shared, new, old
        if theirs.stop <= ours.stop:
            old += 1
        else:
            new += 1
