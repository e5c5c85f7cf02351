"""Restarts: how often a run that failed begins again, and after what pause.

    none                                never
    fixed(3, 10 seconds)                up to 3 restarts, 10 seconds after each failure
    exponential(1 second, 5 minutes)    1, 2, 4 ... seconds, at most 5 minutes; without an end
    rate(5 per 10 minutes)              at once, while fewer than 5 were within 10 minutes

Always true here:
- a failure that repetition cannot fix is never followed by a restart, also where each life sees
  it for the first time: a row is counted over all lives until a quiet time;
- after a quiet time the count begins again: see `quiet_s`;
- the clock is monotonic and passed in; nothing sleeps here.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from cairn.errors import (
    CommitConflictError,
    CorruptFileError,
    FunctionError,
    KeyGroupCountError,
    PlanError,
    StateSchemaError,
)
from cairn.protocol.letters import steady
from cairn.storage.store import is_transient
from cairn.types.durations import duration_ms

Kind = Literal["none", "fixed", "exponential", "rate"]

QUIET_MIN_S: Final = 60.0
SAME_ROW_MAX: Final = 3
"""Lives that may end with the same error of the same row."""
ROWS_KEPT: Final = 1000

_CALL: Final = re.compile(r"\s*([a-z]+)\s*(?:\(([^()]*)\))?\s*")
_RATE: Final = re.compile(r"\s*(\d+)\s+per\s+(.+)")
_HOPELESS: Final = (PlanError, StateSchemaError, KeyGroupCountError, CorruptFileError)


@dataclass(frozen=True)
class RestartPolicy:
    """A parsed `restart` argument."""

    kind: Kind = "none"
    restarts_max: int = 0
    """For `fixed` and `rate`."""
    first_s: float = 0.0
    """For `fixed`: each pause. For `exponential`: the first one."""
    most_s: float = 0.0
    """For `exponential`: the longest pause. For `rate`: the time within which it counts."""

    @property
    def quiet_s(self) -> float:
        """A life at least this long is taken for a recovery: earlier restarts no longer count."""
        return max(QUIET_MIN_S, 2 * self.most_s, 2 * self.first_s)


def parse_restart(text: object) -> RestartPolicy:
    """Return the policy for a `restart` argument, or raise PlanError."""
    match = _CALL.fullmatch(text.lower()) if isinstance(text, str) else None
    if match is None:
        raise _wrong(text)
    kind, given = match[1], match[2]
    if kind == "none" and given is None:
        return RestartPolicy()
    parts = [part.strip() for part in (given or "").split(",")]
    if kind == "fixed" and len(parts) == 2 and parts[0].isdecimal() and int(parts[0]) > 0:
        return RestartPolicy("fixed", int(parts[0]), first_s=_seconds(parts[1]))
    if kind == "exponential" and len(parts) == 2:
        first_s, most_s = _seconds(parts[0]), _seconds(parts[1])
        if not 0 < first_s <= most_s:
            raise PlanError(
                f"restart: the first pause must be positive and not longer than the longest, "
                f"found {text!r}"
            )
        return RestartPolicy("exponential", first_s=first_s, most_s=most_s)
    rate = _RATE.fullmatch(given or "")
    if kind == "rate" and rate is not None and int(rate[1]) > 0:
        most_s = _seconds(rate[2])
        if most_s > 0:
            return RestartPolicy("rate", int(rate[1]), most_s=most_s)
    raise _wrong(text)


def _seconds(text: str) -> float:
    return duration_ms(text, "restart") / 1000


def _wrong(text: object) -> PlanError:
    return PlanError(
        f"restart {text!r} is not a way to restart\n"
        "  expected: 'none', 'fixed(3, 10 seconds)', 'exponential(1 second, 5 minutes)' or "
        "'rate(5 per 10 minutes)'"
    )


class Restarts:
    """Decides after each failed life of a run."""

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self.count = 0
        """Restarts of this process so far."""
        self.is_over = False
        """True if repetition cannot fix the last error, whatever the policy."""
        self._clock = clock
        self._in_a_row = 0
        self._began_s = clock()
        self._at_s: deque[float] = deque()
        self._rows: Counter[tuple[str, ...]] = Counter()
        """Lives since the last quiet time that ended with each error of each row."""

    def begin(self) -> None:
        """Note the start of a life."""
        self._began_s = self._clock()

    def after(self, error: BaseException) -> float | None:
        """Return the pause before the next life in seconds; None if the run ends with the error."""
        now_s = self._clock()
        if now_s - self._began_s >= self.policy.quiet_s:
            self._in_a_row = 0
            self._rows.clear()
        if not isinstance(error, Exception) or self._is_hopeless(error):
            self.is_over = True
            return None
        pause_s = self._pause_s(now_s)
        if pause_s is not None:
            self.count += 1
        return pause_s

    def _is_hopeless(self, error: BaseException) -> bool:
        """True if another life would fail in the same way."""
        if isinstance(error, (*_HOPELESS, CommitConflictError)):
            return not _may_pass(error)
        if not isinstance(error, FunctionError) or error.facts.get("is_of_system"):
            return False
        # A slot has seen the function fail twice on this row, in the same way.
        return bool(error.facts.get("is_repeated")) or self._count_row(error) >= SAME_ROW_MAX

    def _count_row(self, error: FunctionError) -> int:
        """Return how many lives have ended with this very error; 0 if its row is not known."""
        facts = error.facts
        if facts.get("row") is None and facts.get("timer") is None:
            return 0
        row = tuple(str(facts.get(name)) for name in ("operator", "key", "row", "timer"))
        # The lines about the slot's log name another file in each life.
        same = (*row, steady(error.message.partition("\n  log: ")[0]))
        if len(self._rows) >= ROWS_KEPT and same not in self._rows:
            self._rows.clear()
        self._rows[same] += 1
        return self._rows[same]

    def _pause_s(self, now_s: float) -> float | None:
        policy = self.policy
        if policy.kind == "none":
            return None
        if policy.kind == "rate":
            while self._at_s and now_s - self._at_s[0] >= policy.most_s:
                self._at_s.popleft()
            if len(self._at_s) >= policy.restarts_max:
                return None
            self._at_s.append(now_s)
            return 0.0
        self._in_a_row += 1
        if policy.kind == "fixed":
            return policy.first_s if self._in_a_row <= policy.restarts_max else None
        doubled = policy.first_s * 2.0 ** min(self._in_a_row - 1, 60)
        return min(policy.most_s, doubled)


def _may_pass(error: BaseException) -> bool:
    """True for a start that could not use its checkpoint at that moment: the store was away."""
    cause = error.__cause__
    return isinstance(error, PlanError) and cause is not None and is_transient(cause)
