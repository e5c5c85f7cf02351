"""What a job promises of its output, whatever crashes.

exactly-once     each row of input counts once, in state and output
at-least-once    output is published before the epoch commits: after a crash, what followed
                 the last commit is published again; state counts each row once
at-most-once     as above, and what was read is never read again: after a crash, what
                 followed the last commit is missing in state, and may be in output
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from cairn.errors import PlanError

Guarantee = Literal["exactly-once", "at-least-once", "at-most-once"]

GUARANTEES: Final[tuple[str, ...]] = get_args(Guarantee)
CHECKPOINT_EVERY_MAX: Final = 10_000
"""Batches of one epoch: all of them are run again after a crash."""


def check_guarantee(guarantee: str, checkpoint_every: int) -> None:
    if guarantee not in GUARANTEES:
        found = ", ".join(GUARANTEES)
        raise PlanError(f"no guarantee {guarantee!r}\n  found: {found}")
    if not 1 <= checkpoint_every <= CHECKPOINT_EVERY_MAX:
        raise PlanError(
            f"checkpoint_every must be between 1 and {CHECKPOINT_EVERY_MAX}, "
            f"found {checkpoint_every}"
        )
