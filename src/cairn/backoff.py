"""Return how long to wait before the next attempt."""

from __future__ import annotations

import random

FIRST_S = 0.1
MAX_S = 5.0


def backoff_s(
    failures: int, *, first_s: float = FIRST_S, factor: float = 2, max_s: float = MAX_S
) -> float:
    """Return the wait after this many failures in a row: `first_s` after the first one."""
    # The bound keeps the power small: somebody may retry for years.
    wait_s: float = first_s * factor ** min(failures - 1, 30)
    return min(max_s, wait_s)


def jitter(wait_s: float) -> float:
    """Return between half and all of a wait, so that many clients do not retry in step."""
    return wait_s * random.uniform(0.5, 1)
