"""Idle epochs: run what is due while Spark has no batch, and after the last one.

    tick       run an epoch if something is due and none is running
    run_out    run epochs until nothing is due and all loops are empty: the input has ended
    drain      run epochs until no timer is left either: event time has ended too

Always true here:
- one batch at a time runs, Spark's or an idle one: it holds the run's turn;
- a batch of Spark that waits comes before the next idle epoch, even while a loop has records;
- an idle epoch has the position of its parent: for Spark and for the next start, it belongs to
  the same batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from cairn.crash import crash_point
from cairn.driver.changes import Changes
from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.publisher import StoppedError
from cairn.driver.coordinator.rounds import in_flight, is_pending
from cairn.driver.coordinator.ticker import Pace, is_due, is_event_due, is_idleness_due, pending
from cairn.logs import logger
from cairn.storage.manifest import SparkPosition

DRAIN_EPOCHS_MAX = 100
LOOP_EPOCHS_WARNED = 100
"""Warn of a loop that does not end each time this many idle epochs have run."""


class Turn:
    """The right to run a batch: one holder at a time, until the run ends.

    A batch of Spark waits for one idle epoch at most.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """The error that ends the run."""
        self.is_stopping = False
        """The user has asked the run to stop."""
        self.is_over = False
        """Spark's query has ended, and the idle epochs after it."""
        self._lock = threading.Lock()
        self._no_batch_waits = threading.Event()
        self._no_batch_waits.set()

    @property
    def is_wanted(self) -> bool:
        """True while a batch of Spark waits."""
        return not self._no_batch_waits.is_set()

    @property
    def is_taken(self) -> bool:
        """True while a batch runs."""
        return self._lock.locked()

    @property
    def is_ending(self) -> bool:
        """True if no further batch may begin."""
        return self.is_stopping or self.is_over or self.error is not None

    def fail(self, error: BaseException) -> None:
        """End the run with an error, unless an earlier one has."""
        self.error = self.error or error

    def take_for_batch(self, give_up: Callable[[], None]) -> None:
        """Wait for the turn, on Spark's thread, and call `give_up` meanwhile, which may raise."""
        self._no_batch_waits.clear()
        try:
            while not self._lock.acquire(timeout=0.1):
                give_up()
        finally:
            self._no_batch_waits.set()

    def take(self) -> None:
        """Wait for the turn, and let batches of Spark go first."""
        self._no_batch_waits.wait()
        self._lock.acquire()

    def take_at_once(self, timeout_s: float = -1) -> bool:
        """Wait for the turn without letting others go first, because the run ends."""
        return self._lock.acquire(timeout=timeout_s)

    def take_if_free(self) -> bool:
        return not self.is_wanted and self._lock.acquire(blocking=False)

    def give_up(self) -> None:
        self._lock.release()


class IdleEpochs:
    def __init__(
        self,
        coordinator: Coordinator,
        pace: Pace,
        turn: Turn,
        changes: Changes,
        *,
        run_batch: Callable[[SparkPosition, bool], None],
        stop_query: Callable[[], None],
        name: str,
    ) -> None:
        """`run_batch` runs a batch without rows, the last ones while draining.

        `stop_query` ends Spark's query after an idle epoch has failed.
        """
        self._coordinator = coordinator
        self._pace = pace
        self._turn = turn
        self._changes = changes
        self._run_batch = run_batch
        self._stop_query = stop_query
        self._name = name

    def tick(self) -> None:
        """Run an epoch if one is due and none is running; while loops have records, several.

        An epoch that waits for further batches is committed if none come.
        """
        if self._coordinator.batches and self._pace.is_long_silent and self._turn.take_if_free():
            self._commit()
        while self._is_due() and self._turn.take_if_free():
            if not self._epoch(self._is_due) or not is_pending(self._coordinator.newest):
                return

    def commit(self) -> None:
        """Commit the running epoch with the batches it has."""
        self._turn.take()
        self._commit()

    def _commit(self) -> None:
        """Commit while holding the turn, and give it up."""
        try:
            if not self._turn.is_ending:
                self._coordinator.commit_epoch()
            return
        except StoppedError as error:
            logger.warning("%s", error, extra={"job": self._name})
            return
        except BaseException as error:
            self._turn.fail(error)
        finally:
            self._turn.give_up()
        self._stop_query()

    def run_out(self) -> None:
        """Run epochs until no timer is due and no loop has records."""
        epochs = 0
        self._turn.take()
        while self._epoch(self._is_waited_for):
            epochs += 1
            self._warn_of_loops(epochs)
            self._turn.take()

    def drain(self) -> None:
        """Run epochs until every timer has fired and all loops are empty."""
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
            "job %s: after %d epochs of draining, %s still has timers; a timer that sets "
            "itself again never ends",
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
        if self._changes.is_asked and self._pace.is_change_overdue:
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
        """Run an epoch while holding the turn, and give it up. False if nothing was due."""
        newest = self._coordinator.newest
        try:
            if self._turn.is_ending or newest is None or not is_due():
                return False
            crash_point("driver.idle.due")
            self._run_batch(newest.spark, is_draining)
            crash_point("driver.idle.ended")
            return True
        except StoppedError as error:
            logger.warning("%s", error, extra={"job": self._name})
            return False
        except BaseException as error:
            self._turn.fail(error)
        finally:
            self._turn.give_up()
        self._stop_query()
        return False
