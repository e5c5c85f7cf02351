"""The attempts at a batch: which have failed, how long until the next, and when to give up.

Always true here:
- what is raised in the end is the first cause, which the later failures may follow from;
- a sink that is away does not use up the tries of a batch: it is waited for until it is back,
  the run ends, another driver takes over, or it has been away for `commit_timeout`;
- a slot that has lost its state does not use them up either, up to a limit;
- what no attempt can mend is raised at once; an error of a user's function that a slot has seen
  before, in this epoch and in the same words, is such.
"""

from __future__ import annotations

from collections.abc import Callable

from cairn.backoff import backoff_s
from cairn.driver.coordinator import said
from cairn.driver.coordinator.publisher import Publisher
from cairn.errors import CairnError, CommitError, EpochError, PlanError, RestoreError

LOSSES_MAX = 1000
"""More slots than die during one batch, unless something is wrong with all of them."""


class Attempts:
    """Those at one batch of an epoch."""

    def __init__(
        self,
        epoch: int,
        publisher: Publisher,
        *,
        failures_max: int,
        on_failure: Callable[[CairnError, int, int], None],
        clock: Callable[[], int],
        sleep: Callable[[float], None],
    ) -> None:
        self.failed = 0
        """How many have failed: the number of the next."""
        self._epoch = epoch
        self._publisher = publisher
        self._failures_max = failures_max
        self._on_failure = on_failure
        self._clock = clock
        self._sleep = sleep
        self._away_tries = 0
        """Attempts that failed because a sink was away."""
        self._away_since_ms = 0
        """When the first of them did."""
        self._losses = 0
        self._failures = 0
        self._first: CairnError | None = None

    def fail(self, cause: Exception) -> None:
        """One has failed: returns when it is time for the next, or raises."""
        if isinstance(cause, CommitError | RestoreError | PlanError):
            raise cause
        # A store says what is wrong in errors of many kinds: its own, the system's.
        error = cause if isinstance(cause, CairnError) else _failed(self._epoch, cause)
        self.failed += 1
        self._on_failure(error, self._epoch, self.failed)
        if error.facts.get("is_away"):
            self._wait_for_sink(error)
            return
        if error.facts.get("is_lost") and self._losses < LOSSES_MAX:
            self._losses += 1
            said.tries_again(self._epoch, self.failed, error)
            return  # What the slot has lost is written down for the next attempt.
        self._failures += 1
        if error.facts.get("is_repeated"):
            self._first = error  # It came before any other, too, if only in its own subtask.
        self._first = self._first or error
        if self._failures == self._failures_max or error.facts.get("is_repeated"):
            self._first.facts["attempts"] = self.failed
            raise self._first
        said.tries_again(self._epoch, self.failed, error)
        self._sleep(backoff_s(self._failures, factor=4))

    def _wait_for_sink(self, error: CairnError) -> None:
        if not self._away_tries:
            self._away_since_ms = self._clock()
        self._away_tries += 1
        # A long wait sees executors come and go. What went wrong before it is long over.
        self._failures, self._first = 0, None
        sink = str(error.facts.get("sink"))
        self._publisher.wait_for(sink, self._epoch, error, self._away_tries, self._away_since_ms)


def _failed(epoch: int, cause: Exception) -> EpochError:
    error = EpochError(f"epoch {epoch} failed: {cause}", epoch=epoch)
    error.__cause__ = cause
    return error
