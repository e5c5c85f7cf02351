"""Check the acknowledgements of an attempt before it counts.

Always true here:
- an attempt counts if every subtask of every level has acknowledged one result;
- subtasks that hold the same state have changed it in the same way;
- a broadcast row becomes a dead letter in all subtasks of an operator, or in none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cairn.errors import EpochError, FunctionError
from cairn.protocol.messages import Ack
from cairn.protocol.scoped_state import ScopedState
from cairn.protocol.spec import JobSpec

Results = dict[str | None, list[int]]
"""Subtasks by result."""


def check_complete(acks: Sequence[Ack], spec: JobSpec, parallelism: int) -> list[Ack]:
    """Return one acknowledgement per level and subtask; EpochError if one is missing."""
    found: dict[tuple[int, int], Ack] = {}
    for ack in acks:
        if found.setdefault((ack.level, ack.subtask), ack) != ack:
            raise EpochError(
                f"subtask {ack.subtask} of level {ack.level} acknowledged two different "
                "results in one attempt; the epoch runs again"
            )
    levels = sorted(level.index for level in spec.levels)
    expected = [(level, subtask) for level in levels for subtask in range(parallelism)]
    missing = [at for at in expected if at not in found]
    if missing:
        raise EpochError(f"no acknowledgement of (level, subtask) {missing}")
    # Deduplicated: stages that ran twice must not publish their output twice.
    return [found[at] for at in expected]


def check_shared(acks: Sequence[Ack], states: Mapping[str, ScopedState]) -> None:
    """Raise FunctionError if subtasks with the same rows have different results."""
    deltas: dict[str, Results] = {}
    aside: dict[str, Results] = {}
    for ack in acks:
        for op in ack.operators:
            state = states.get(op.uid)
            if state is None:
                continue
            if state.scope == "shared":
                delta = None if op.delta is None else op.delta.id
                deltas.setdefault(state.operator, {}).setdefault(delta, []).append(ack.subtask)
            aside.setdefault(op.uid, {}).setdefault(op.broadcast_aside, []).append(ack.subtask)
    # First: a row that failed in some subtasks also makes their state differ.
    for operator, results in aside.items():
        _check_alike(
            operator,
            results,
            "fails on different rows in different subtasks",
            "a row fails in every subtask, or in none",
        )
    for operator, results in deltas.items():
        _check_alike(
            operator,
            results,
            "has left different broadcast state in different subtasks",
            "writes depend only on the rows and on ctx.broadcast",
        )


def _check_alike(operator: str, results: Results, what: str, expected: str) -> None:
    if len(results) == 1:
        return
    rest = sorted(results.values(), key=len)[:-1]
    differing = sorted(subtask for subtasks in rest for subtask in subtasks)
    raise FunctionError(
        f"process_broadcast() of operator {operator!r} {what}\n"
        f"  found: subtasks {differing} differ from the others\n"
        f"  expected: {expected}\n"
        "  next: remove everything that differs between subtasks: ctx.subtask, state of keys, "
        "clocks, random numbers, attributes of the function",
        operator=operator,
        subtasks=differing,
    )
