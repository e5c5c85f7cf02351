"""The guarantees of a job for its output after a crash.

exactly-once     each input row counts once, in state and output
at-least-once    output is published before the epoch commits: after a crash, the output since
                 the last commit is published again; state counts each row once
at-most-once     the same, and no input is read twice: after a crash, the input since the last
                 commit is missing in state, and may be missing in output
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from cairn.errors import PlanError

Guarantee = Literal["exactly-once", "at-least-once", "at-most-once"]

GUARANTEES: Final[tuple[str, ...]] = get_args(Guarantee)
CHECKPOINT_EVERY_MAX: Final = 10_000
"""Limit of the batches of an epoch, which all run again after a crash."""


def check_guarantee(guarantee: str, checkpoint_every: int) -> None:
    if guarantee not in GUARANTEES:
        found = ", ".join(GUARANTEES)
        raise PlanError(f"no guarantee {guarantee!r}\n  found: {found}")
    if not 1 <= checkpoint_every <= CHECKPOINT_EVERY_MAX:
        raise PlanError(
            f"checkpoint_every must be between 1 and {CHECKPOINT_EVERY_MAX}, "
            f"found {checkpoint_every}"
        )
