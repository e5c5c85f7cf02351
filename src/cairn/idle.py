"""Epochs without a batch: what is due runs although Spark is silent, and after the last batch.

    tick       while the job runs: when something is due and no epoch is under way
    run_out    until nothing is due: the input has ended, or somebody waits for that
    drain      until no timer is left either: time has ended too

Always true here:
- one epoch at a time, whoever runs it: with a batch or without, it holds the run's turn;
- the position of such an epoch is its parent's: to Spark, and to whoever starts next, it
  is a part of the same batch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from cairn.coordinator.epoch import Coordinator, clock_ms
from cairn.coordinator.ticker import Pace, is_due, is_event_due, is_idleness_due, pending
from cairn.crash import crash_point
from cairn.storage.manifest import SparkPosition

_logger = logging.getLogger("cairn")

DRAIN_EPOCHS_MAX = 100


@dataclass(frozen=True)
class Host:
    """The run that the epochs are of."""

    is_ending: Callable[[], bool]
    """No epoch is to begin any more."""
    is_changing: Callable[[], bool]
    """Somebody has asked for a change: it takes effect in the next epoch."""
    run: Callable[[SparkPosition, bool], None]
    """Run an epoch over no rows, or the last ones of a drain, and commit it."""
    fail: Callable[[BaseException], None]
    """An epoch has failed, and the run with it: none begins from here on."""
    stop: Callable[[], None]
    """Spark cannot know of that: end its query."""


class IdleEpochs:
    """Runs the epochs of one run that Spark knows nothing of."""

    def __init__(
        self, host: Host, coordinator: Coordinator, pace: Pace, turn: threading.Lock, name: str
    ) -> None:
        self._host = host
        self._coordinator = coordinator
        self._pace = pace
        self._turn = turn
        self._name = name

    def tick(self) -> None:
        """Run an epoch, if one is due and none is under way."""
        if self._is_due() and self._turn.acquire(blocking=False):
            self._epoch(self._is_due)

    def run_out(self) -> None:
        """Until no timer waits for nothing but an epoch."""
        while self._turn.acquire() and self._epoch(self._is_event_due):
            pass

    def drain(self) -> None:
        """Until every timer has fired."""
        for _ in range(DRAIN_EPOCHS_MAX):
            self._turn.acquire()
            if not self._epoch(lambda: True, is_draining=True):
                return
            if not pending(self._coordinator.newest):
                return
        left = ", ".join(pending(self._coordinator.newest))
        _logger.warning(
            "job %s: after %d epochs of draining, timers are still set by %s; a timer that sets "
            "itself anew never ends",
            self._name, DRAIN_EPOCHS_MAX, left,
        )  # fmt: skip

    def _is_due(self) -> bool:
        newest = self._coordinator.newest
        if newest is None or not self._pace.is_silent:
            return False
        if self._host.is_changing() and self._pace.is_change_overdue:
            return True
        if is_due(newest, clock_ms()):
            return True
        if not self._pace.is_long_silent:
            return False
        coordinator = self._coordinator
        return is_idleness_due(newest, coordinator.origins, clock_ms(), coordinator.awake_ms)

    def _is_event_due(self) -> bool:
        return is_event_due(self._coordinator.newest)

    def _epoch(self, is_due: Callable[[], bool], *, is_draining: bool = False) -> bool:
        """Run an epoch, the turn being ours, and give it up. False: there was nothing to do."""
        newest = self._coordinator.newest
        try:
            if self._host.is_ending() or newest is None or not is_due():
                return False
            crash_point("driver.idle.due")
            self._host.run(newest.spark, is_draining)
            crash_point("driver.idle.ended")
            return True
        except BaseException as error:
            self._host.fail(error)
        finally:
            self._turn.release()
        self._host.stop()
        return False
