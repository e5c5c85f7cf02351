"""Slots that follow the newest epoch: a standby's, and a leader's that will be used soon.

A standby watches the log and follows each new epoch.

A hot standby sends its slots the versions of each new epoch. They apply the deltas that they lack,
or restore. A warm standby sends one message without state: Spark has compiled the plan of an epoch
then, and the slots have loaded the job.

Always true here:
- nothing is written into the checkpoint, and no record of it is changed;
- an epoch is followed whole, or `epoch` stays as it was: a later try begins with the newest one;
- tokens of these messages are below those of the takeover that may follow, which has a later term.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from cairn.backoff import backoff_s
from cairn.driver.coordinator.division import Division
from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.load import starts_of
from cairn.key_groups import Starts
from cairn.logs import logger
from cairn.protocol.messages import Begin
from cairn.sinks.base import Execution
from cairn.storage.log import Log, record_path
from cairn.storage.manifest import Epoch

POLL_S: Final = 0.2
REPEAT_S: Final = 15.0
"""An epoch is followed again at this interval: a slot that died is started and restored."""
BACKOFF_S_MAX: Final = 10.0


class Follower:
    """Brings the slots of a standby to the newest epoch."""

    def __init__(
        self,
        coordinator: Coordinator,
        follow: Callable[[Begin, Callable[[], bool]], None],
        check: Callable[[Epoch], object],
        *,
        is_hot: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`follow` has the slots act on a message, unless its second argument returns False by
        then; `check` refuses epochs that do not fit.

        The coordinator leads nothing: it has the states and the parallelism of the program.
        """
        self.epoch: int | None = None
        """The newest epoch that the slots hold; None if they hold none."""
        self._coordinator = coordinator
        self._log = Log(coordinator.store)
        self._follow = follow
        self._check = check
        self._is_hot = is_hot
        self._clock = clock
        self._last: int | None = None
        """The newest record when slots were last sent a message."""
        self._followed_s = float("-inf")
        self._stop = threading.Event()

    def run(self, stop: threading.Event) -> None:
        """Follow until `stop` is set; a try that fails is repeated."""
        failed = 0
        self._stop = stop
        while not stop.is_set():
            try:
                self.look()
                failed = 0
            except Exception as error:
                failed += 1
                self.epoch, self._last = None, None
                text = str(error).partition("\n")[0]
                logger.warning("standby: the newest epoch was not followed: %s", text)
            stop.wait(backoff_s(failed, max_s=BACKOFF_S_MAX) if failed else POLL_S)

    def look(self) -> bool:
        """Look once for a later epoch, and follow it. True if slots were sent a message."""
        is_due = self._clock() - self._followed_s >= REPEAT_S
        if self._is_newest() and not is_due:
            return False
        last = self._log.newest_number()
        if last is None:
            return False
        # A Log that has appended nothing lists the store: it finds the records of others.
        newest = self._log.newest_epoch()
        if newest is not None:
            self._check(newest)
        message = self._message(last, newest if self._is_hot else None)
        # Asked after the log was read: a message in the term of the own takeover is never sent.
        if self._stop.is_set():
            return False
        self._follow(message, lambda: not self._stop.is_set())
        if self._followed_s == float("-inf"):
            logger.info("standby: the slots are ready")
        self._last, self._followed_s = last, self._clock()
        if self._is_hot and newest is not None:
            self.epoch = newest.number
            logger.debug("standby: the slots hold epoch %d", newest.number)
        return True

    def _is_newest(self) -> bool:
        """True if no record came after the one that was followed; it may be removed by now."""
        if self._last is None:
            return False
        if not self._is_hot:
            return True
        store = self._coordinator.store
        is_last = not store.exists(record_path(self._last + 1))
        return is_last and store.exists(record_path(self._last))

    def _message(self, last: int, newest: Epoch | None) -> Begin:
        coordinator = self._coordinator
        parallelism, group_count = coordinator.parallelism, coordinator.spec.group_count
        held = None if newest is None else starts_of(newest, parallelism, group_count)
        return _message(coordinator, newest, held or (), self._log.read(last).term, last + 1)


def message_ahead(coordinator: Coordinator) -> Begin | None:
    """Return the message with which a leader's new slots follow the newest epoch in the log.

    None if there is none. It is older than those of the epoch that may be running.
    """
    newest = coordinator.committed
    if newest is None:
        return None
    return _message(
        coordinator, newest, coordinator.subtasks.starts, coordinator.term, newest.number
    )


def _message(
    coordinator: Coordinator, newest: Epoch | None, starts: Starts, term: int, epoch: int
) -> Begin:
    parallelism, group_count = coordinator.parallelism, coordinator.spec.group_count
    division = Division(newest, coordinator.scoped_states, parallelism, group_count, starts)
    return Begin(
        run_id=coordinator.run_id,
        term=term,
        epoch=epoch,
        execution=Execution(),
        parent=None if newest is None else newest.number,
        # State that has expired for this epoch has expired for the first one after it.
        now_ms=0 if newest is None else newest.now_ms,
        watermark_ms=None if newest is None else newest.watermark_ms,
        passed_ms=None if newest is None else newest.passed_ms,
        parallelism=parallelism,
        group_count=group_count,
        inline_bytes_max=0,
        parts=division.parts({}, coordinator.subtasks.slots, None),
        rescaled_from=coordinator.subtasks.rescaled_from,
        follows=True,
    )


__all__ = ["Follower", "message_ahead"]
