"""What the subtasks of an attempt have acknowledged, before it counts.

Always true here:
- an attempt counts when every subtask of every level has said one thing;
- subtasks that hold the same state have made the same changes to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cairn.errors import EpochError, FunctionError
from cairn.slot.entry import EntrySpec
from cairn.slot.protocol import Ack
from cairn.slot.spec import JobSpec


def complete(acks: Sequence[Ack], spec: JobSpec, parallelism: int) -> list[Ack]:
    """One acknowledgement of every subtask of every level, which said one thing only."""
    found: dict[tuple[int, int], Ack] = {}
    for ack in acks:
        if found.setdefault((ack.level, ack.subtask), ack) != ack:
            raise EpochError(
                f"subtask {ack.subtask} of level {ack.level} acknowledged two different "
                "results in one attempt; the epoch runs again"
            )
    expected = {(level.index, subtask) for level in spec.levels for subtask in range(parallelism)}
    missing = expected - found.keys()
    if missing:
        raise EpochError(f"no acknowledgement of (level, subtask) {sorted(missing)}")
    # What is said twice counts once: its output must not be published twice.
    return [found[at] for at in sorted(expected)]


def check_shared(acks: Sequence[Ack], entries: Mapping[str, EntrySpec]) -> None:
    """Subtasks that hold the same state have made the same changes to it."""
    said: dict[str, dict[str | None, list[int]]] = {}
    for ack in acks:
        for op in ack.operators:
            if op.uid in entries and entries[op.uid].scope == "shared":
                delta = None if op.delta is None else op.delta.id
                said.setdefault(op.uid, {}).setdefault(delta, []).append(ack.subtask)
    for uid, by_delta in said.items():
        if len(by_delta) > 1:
            operator = entries[uid].operator
            rest = sorted(by_delta.values(), key=len)[:-1]
            differing = sorted(subtask for subtasks in rest for subtask in subtasks)
            raise FunctionError(
                f"process_broadcast() of operator {operator!r} has left different broadcast "
                "state in different subtasks\n"
                f"  found: subtasks {differing} differ from the others\n"
                "  expected: what it writes depends on the rows and on ctx.broadcast alone\n"
                "  next: take out what differs between subtasks: ctx.subtask, state of keys, "
                "clocks, random numbers, attributes of the function",
                operator=operator,
                subtasks=differing,
            )
