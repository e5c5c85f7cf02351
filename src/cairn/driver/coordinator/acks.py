"""What the subtasks of an attempt have acknowledged, before it counts.

Always true here:
- an attempt counts when every subtask of every level has said one thing;
- subtasks that hold the same state have made the same changes to it;
- a row of a broadcast is put aside by all subtasks of an operator, or by none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cairn.errors import EpochError, FunctionError
from cairn.protocol.messages import Ack
from cairn.protocol.scoped_state import ScopedState
from cairn.protocol.spec import JobSpec

Said = dict[str | None, list[int]]
"""Subtasks, by what they have said."""


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


def check_shared(acks: Sequence[Ack], states: Mapping[str, ScopedState]) -> None:
    """Subtasks that get the same rows have made the same of them."""
    deltas: dict[str, Said] = {}
    aside: dict[str, Said] = {}
    for ack in acks:
        for op in ack.operators:
            state = states.get(op.uid)
            if state is None:
                continue
            if state.scope == "shared":
                delta = None if op.delta is None else op.delta.id
                deltas.setdefault(state.operator, {}).setdefault(delta, []).append(ack.subtask)
            aside.setdefault(op.uid, {}).setdefault(op.broadcast_aside, []).append(ack.subtask)
    # First: what a row that failed has not written is a difference in state, too.
    for operator, said in aside.items():
        _check_alike(
            operator,
            said,
            "fails on different rows in different subtasks",
            "a row that it fails on is put aside in every subtask, or in none",
        )
    for operator, said in deltas.items():
        _check_alike(
            operator,
            said,
            "has left different broadcast state in different subtasks",
            "what it writes depends on the rows and on ctx.broadcast alone",
        )


def _check_alike(operator: str, said: Said, what: str, expected: str) -> None:
    if len(said) == 1:
        return
    rest = sorted(said.values(), key=len)[:-1]
    differing = sorted(subtask for subtasks in rest for subtask in subtasks)
    raise FunctionError(
        f"process_broadcast() of operator {operator!r} {what}\n"
        f"  found: subtasks {differing} differ from the others\n"
        f"  expected: {expected}\n"
        "  next: take out what differs between subtasks: ctx.subtask, state of keys, "
        "clocks, random numbers, attributes of the function",
        operator=operator,
        subtasks=differing,
    )
