"""Epochs without a batch: what is due runs although Spark is silent, and after the last batch.

    tick       while the job runs: when something is due and no epoch is under way
    run_out    until nothing is due and no loop goes on: the input has ended, or somebody waits
    drain      until no timer is left either: time has ended too

Always true here:
- one epoch at a time, whoever runs it: with a batch or without, it holds the run's turn;
- a batch that waits comes before what goes around in a loop, however long that goes on;
- the position of such an epoch is its parent's: to Spark, and to whoever starts next, it
  is a part of the same batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from cairn.crash import crash_point
from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.publisher import StoppedError
from cairn.driver.coordinator.rounds import in_flight, is_pending
from cairn.driver.coordinator.ticker import Pace, is_due, is_event_due, is_idleness_due, pending
from cairn.logs import logger
from cairn.storage.manifest import SparkPosition

DRAIN_EPOCHS_MAX = 100
LOOP_EPOCHS_WARNED = 100
"""After so many epochs without a batch, and again after as many, a loop that goes on is told of."""


class Turn:
    """Whose turn it is to run an epoch. Batches of Spark's do not wait for more than one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._no_batch_waits = threading.Event()
        self._no_batch_waits.set()

    @property
    def is_wanted(self) -> bool:
        """A batch waits."""
        return not self._no_batch_waits.is_set()

    @property
    def is_taken(self) -> bool:
        """An epoch is under way."""
        return self._lock.locked()

    def take_for_batch(self, give_up: Callable[[], None]) -> None:
        """Wait for it, on Spark's thread. `give_up` is called meanwhile, and may raise."""
        self._no_batch_waits.clear()
        try:
            while not self._lock.acquire(timeout=0.1):
                give_up()
        finally:
            self._no_batch_waits.set()

    def take(self) -> None:
        """Wait for it, and let batches go first."""
        self._no_batch_waits.wait()
        self._lock.acquire()

    def take_at_once(self, timeout_s: float = -1) -> bool:
        """Before anybody else: the run ends."""
        return self._lock.acquire(timeout=timeout_s)

    def take_if_free(self) -> bool:
        return not self.is_wanted and self._lock.acquire(blocking=False)

    def give_up(self) -> None:
        self._lock.release()


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
        self, host: Host, coordinator: Coordinator, pace: Pace, turn: Turn, name: str
    ) -> None:
        self._host = host
        self._coordinator = coordinator
        self._pace = pace
        self._turn = turn
        self._name = name

    def tick(self) -> None:
        """Run an epoch, if one is due and none is under way; in a loop, one after another.

        One that waits for batches which do not come is committed without them.
        """
        if self._coordinator.batches and self._pace.is_long_silent and self._turn.take_if_free():
            self._commit()
        while self._is_due() and self._turn.take_if_free():
            if not self._epoch(self._is_due) or not is_pending(self._coordinator.newest):
                return

    def commit(self) -> None:
        """Commit the epoch under way, however few batches it has."""
        self._turn.take()
        self._commit()

    def _commit(self) -> None:
        """The turn being ours, and give it up."""
        try:
            if not self._host.is_ending():
                self._coordinator.commit_epoch()
            return
        except StoppedError as error:
            logger.warning("%s", error, extra={"job": self._name})
            return
        except BaseException as error:
            self._host.fail(error)
        finally:
            self._turn.give_up()
        self._host.stop()

    def run_out(self) -> None:
        """Until no timer waits for nothing but an epoch, and no record is on its way back."""
        epochs = 0
        self._turn.take()
        while self._epoch(self._is_waited_for):
            epochs += 1
            self._warn_of_loops(epochs)
            self._turn.take()

    def drain(self) -> None:
        """Until every timer has fired, and what that sent into loops has come out of them."""
        epochs = idle = 0
        while idle < DRAIN_EPOCHS_MAX:
            self._turn.take()
            if not self._epoch(lambda: True, is_draining=True):
                return
            epochs += 1
            self._warn_of_loops(epochs)
            if is_pending(self._coordinator.newest):
                continue
            if not pending(self._coordinator.newest):
                return
            idle += 1
        left = ", ".join(pending(self._coordinator.newest))
        logger.warning(
            "job %s: after %d epochs of draining, timers are still set by %s; a timer that sets "
            "itself anew never ends",
            self._name, DRAIN_EPOCHS_MAX, left, extra={"job": self._name},
        )  # fmt: skip

    def _warn_of_loops(self, epochs: int) -> None:
        newest = self._coordinator.newest
        if epochs % LOOP_EPOCHS_WARNED == 0 and is_pending(newest):
            logger.warning(
                "job %s: %d epochs after the last batch, %d records still go around in its loops; "
                "a loop that sends back a record for each one it gets never ends",
                self._name, epochs, in_flight(newest), extra={"job": self._name},
            )  # fmt: skip

    def _is_due(self) -> bool:
        newest = self._coordinator.newest
        if is_pending(newest):
            return True
        if newest is None or not self._pace.is_silent:
            return False
        if self._host.is_changing() and self._pace.is_change_overdue:
            return True
        coordinator = self._coordinator
        if is_due(newest, coordinator.now_ms()):
            return True
        if not self._pace.is_long_silent:
            return False
        now_ms, awake_ms = coordinator.now_ms(), coordinator.awake_ms
        return is_idleness_due(newest, coordinator.origins, now_ms, awake_ms)

    def _is_waited_for(self) -> bool:
        newest = self._coordinator.newest
        return is_event_due(newest) or is_pending(newest)

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
        except StoppedError as error:
            logger.warning("%s", error, extra={"job": self._name})
            return False
        except BaseException as error:
            self._host.fail(error)
        finally:
            self._turn.give_up()
        self._host.stop()
        return False
