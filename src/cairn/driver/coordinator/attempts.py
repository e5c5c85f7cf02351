"""Attempts at a batch: count failures, wait before the next one, give up after too many.

Always true here:
- the error raised in the end is the first one: later failures may follow from it;
- a sink that is away uses up no attempts: the batch waits until it is back, the run ends, another
  driver takes over, or the sink has been away for `commit_timeout` without a break;
- a slot that has lost its state does not use them up either, up to a limit, nor does one that
  was short of memory, if the next attempt needs less;
- an error that another attempt cannot fix is raised at once, for example an error of a user's
  function that a slot has seen before in this epoch, with the same text.
"""

from __future__ import annotations

from collections.abc import Callable

from cairn.backoff import backoff_s
from cairn.driver.coordinator import events
from cairn.driver.coordinator.publisher import Place, Publisher
from cairn.errors import CairnError, CommitError, EpochError, PlanError, RestoreError

LOSSES_MAX = 1000
"""Limit of lost slots during one batch."""


class Attempts:
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
        """Failed attempts so far: the number of the next one."""
        self._epoch = epoch
        self._publisher = publisher
        self._failures_max = failures_max
        self._on_failure = on_failure
        self._clock = clock
        self._sleep = sleep
        self._away_tries = 0
        """Latest attempts in a row that failed because a sink or database was away."""
        self._away_since_ms = 0
        """The time of the first of them."""
        self._losses = 0
        self._failures = 0
        self._first: CairnError | None = None

    def fail(self, cause: Exception, *, is_divided: bool = False) -> None:
        """Count a failed attempt; return when it is time for the next one, or raise.

        `is_divided`: it was short of memory, and the next one has its rows in more slices.
        """
        if isinstance(cause, CommitError | RestoreError | PlanError):
            raise cause
        # Stores raise errors of many types.
        error = cause if isinstance(cause, CairnError) else _as_epoch_error(self._epoch, cause)
        self.failed += 1
        self._on_failure(error, self._epoch, self.failed)
        if error.facts.get("is_away"):
            self._wait_for_place(error)
            return
        self._away_tries = 0
        if is_divided:
            events.log_failed_attempt(self._epoch, self.failed, error)
            return
        if error.facts.get("is_lost") and self._losses < LOSSES_MAX:
            self._losses += 1
            events.log_failed_attempt(self._epoch, self.failed, error)
            return  # The next attempt begins with the lost state written down.
        self._failures += 1
        if error.facts.get("is_repeated"):
            self._first = error  # It happened first in its own subtask.
        self._first = self._first or error
        if self._failures == self._failures_max or error.facts.get("is_repeated"):
            self._first.facts["attempts"] = self.failed
            raise self._first
        events.log_failed_attempt(self._epoch, self.failed, error)
        self._sleep(backoff_s(self._failures, factor=4))

    def _wait_for_place(self, error: CairnError) -> None:
        if not self._away_tries:
            self._away_since_ms = self._clock()
        self._away_tries += 1
        # During a long wait executors come and go; earlier failures no longer matter.
        self._failures, self._first = 0, None
        self._publisher.wait_for(
            _place_of(error), self._epoch, error, self._away_tries, self._away_since_ms
        )


def _place_of(error: CairnError) -> Place:
    if "sink" in error.facts:
        return Place("sink", str(error.facts["sink"]))
    return Place("database", str(error.facts.get("database", "of the job's state")))


def _as_epoch_error(epoch: int, cause: Exception) -> EpochError:
    error = EpochError(f"epoch {epoch} failed: {cause}", epoch=epoch)
    error.__cause__ = cause
    return error
