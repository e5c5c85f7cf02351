"""Has the sinks publish, again and again until they have.

A commit that keeps failing pauses the job: no epoch begins before it has succeeded. So does
a target that is away when slots write to it. So a slow sink slows the job down, and
nothing is dropped.

Always true here:
- waiting ends by success, by the end of the run, by a takeover, or after `timeout_s`; and
  what is committed in the log and not published is published by the next start;
- with at-most-once, a sink that cannot tell a repeated commit is told once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cairn.backoff import backoff_s
from cairn.crash import crash_point
from cairn.driver.coordinator.guarantees import Guarantee
from cairn.driver.coordinator.output import Output, check_output
from cairn.errors import CommitConflictError, CommitError
from cairn.logs import logger
from cairn.sinks.base import Committable, Sink, refuse_if_away
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch
from cairn.storage.published import has_output, is_known_published, note_path, note_published

TRIES_BEFORE_PAUSE = 5
BACKOFF_FIRST_S = 0.2
LISTEN_S = 0.2
"""So often a commit that waits looks whether the run is to end."""


class StoppedError(CommitError):
    """The run is to end, and a sink has not published."""


class Paused(NamedTuple):
    """Why the job stands still."""

    sink: str
    epoch: int
    error: str
    tries: int

    def __str__(self) -> str:
        return (
            f"sink {self.sink!r} cannot take epoch {self.epoch}, tried {self.tries} times: "
            f"{self.error}"
        )


class Publisher:
    """The sinks of a job, as its leader talks to them."""

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        log: Log,
        *,
        guarantee: Guarantee = "exactly-once",
        timeout_s: float | None = None,
        allow_dropped_output: bool = False,
        clock: Callable[[], int],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.sinks = dict(sinks)
        self.paused: Paused | None = None
        self.last_ms = 0.0
        """How long the last epoch took to be published."""
        self.dropped = 0
        """Batches that a sink has failed on, and was not told of again."""
        self.is_stopping: Callable[[], bool] = lambda: False
        self._published: Epoch | None = None
        """The last epoch of the log that every sink of it has published."""
        self._noted: Epoch | None = None
        self._noting = threading.Lock()
        self._log = log
        self._guarantee = guarantee
        self._timeout_s = timeout_s
        self._allow_dropped_output = allow_dropped_output
        self._clock = clock
        self._sleep = sleep

    def check_output(self, newest: Epoch) -> Output:
        """Return which sinks publish the newest epoch at a start. PlanError if output is lost."""
        return check_output(
            newest,
            self.sinks,
            is_published=lambda: is_known_published(self._log, newest),
            allow_dropped_output=self._allow_dropped_output,
        )

    def recover(self, newest: Epoch | None, term: int) -> None:
        """Publish the newest epoch again, it may not have been; clear what nobody will publish."""
        if newest is not None:
            output = self.check_output(newest)
            given = newest.committables.items()
            ours = {uid: prepared for uid, prepared in given if uid in output.sinks}
            self.publish(newest.number, ours, is_start=True)
            if output.is_whole:
                self._published = newest
                self.note_published()
        for uid, sink in self.sinks.items():
            # The number of the takeover itself may have been tried by the driver before.
            with refuse_if_away(uid, sink):
                sink.recover(term + 1)

    def publish_epoch(self, epoch: Epoch) -> None:
        """Have every sink publish an epoch of the log that this driver has written."""
        self.publish(epoch.number, epoch.committables)
        self._published = epoch

    def note_published(self) -> None:
        """Write down which epoch is published last, where that is not yet. Never raises.

        Safe on any thread. The note of before goes: its epoch has a child in the log.
        """
        with self._noting:
            epoch, noted = self._published, self._noted
            if epoch is None or epoch is noted or not has_output(epoch):
                return
            try:
                note_published(self._log.store, epoch.number, epoch.nonce)
                self._noted = epoch
                if noted is not None:
                    self._log.store.delete([note_path(noted.number)])
            except AssertionError:
                raise
            except Exception as error:
                # Then the next start publishes the epoch again, and sinks leave out what they have.
                logger.warning("epoch %d is published, but not noted: %s", epoch.number, error)

    def publish(
        self,
        epoch: int,
        committables: Mapping[str, Sequence[Committable]],
        batch: int = 0,
        *,
        is_start: bool = False,
    ) -> None:
        """Publish with every sink, an epoch or a batch of it. At a start, tries are bounded."""
        started = time.perf_counter()
        for uid, prepared in committables.items():
            self._commit(uid, self.sinks[uid], epoch, prepared, batch, is_start)
            crash_point("driver.sink.committed")
        if committables:
            self.last_ms = (time.perf_counter() - started) * 1000

    def _commit(
        self,
        uid: str,
        sink: Sink,
        epoch: int,
        prepared: Sequence[Committable],
        batch: int,
        is_start: bool,
    ) -> None:
        began_ms, tries = self._clock(), 0
        while True:
            crash_point("driver.sink.begun")
            try:
                sink.commit(epoch, prepared, batch)
                break
            except AssertionError:
                raise
            except Exception as error:
                tries += 1
                if self._guarantee == "at-most-once" and sink.promise != "exactly-once":
                    logger.warning(
                        "sink %r failed to publish epoch %d and is not told again "
                        "(at-most-once): %s", uid, epoch, error,
                    )  # fmt: skip
                    self.dropped += 1
                    break
                self.wait_for(uid, epoch, error, tries, began_ms, is_start=is_start)
        self.resume()

    def resume(self) -> None:
        """What the job waited for has come about."""
        if self.paused is not None:
            logger.warning("sink %r is back: the job goes on", self.paused.sink)
            self.paused = None

    def wait_for(
        self,
        uid: str,
        epoch: int,
        error: Exception,
        tries: int,
        began_ms: int,
        *,
        is_start: bool = False,
    ) -> None:
        """Until it is time to try again; the job is paused meanwhile. Raises to end it."""
        self._give_up(uid, epoch, error, tries, began_ms, is_start)
        self._wait(uid, epoch, backoff_s(tries, first_s=BACKOFF_FIRST_S, factor=3))

    def _give_up(
        self, uid: str, epoch: int, error: Exception, tries: int, began_ms: int, is_start: bool
    ) -> None:
        """Pause, or raise when trying on is of no use."""
        if tries < TRIES_BEFORE_PAUSE:
            return
        was_paused, self.paused = self.paused, Paused(uid, epoch, str(error), tries)
        if self._is_taken_over():
            raise CommitConflictError(
                f"another driver has taken over, and goes on with epoch {epoch}\n"
                "  next: leave the job to it, or stop it and start again",
                epoch=epoch,
            ) from error
        waited_s = (self._clock() - began_ms) / 1000
        if is_start or (self._timeout_s is not None and waited_s >= self._timeout_s):
            raise CommitError(
                f"sink {uid!r} did not take epoch {epoch}: {error}\n"
                f"  found: tried {tries} times; nothing is lost\n"
                "  next: see to the sink, then start the job again; it goes on with the epoch",
                sink=uid,
                epoch=epoch,
            ) from error
        if was_paused is None:
            logger.warning("the job is paused until this is over: %s", self.paused)

    def _is_taken_over(self) -> bool:
        try:
            return not self._log.is_leading()
        except Exception:
            return False  # The store may be away too: asked again the next time.

    def _wait(self, uid: str, epoch: int, seconds: float) -> None:
        while seconds > 0:
            if self.is_stopping():
                self.paused = None
                raise StoppedError(
                    f"sink {uid!r} has not taken epoch {epoch} when the run was stopped; "
                    "the next start goes on with it",
                    sink=uid,
                    epoch=epoch,
                )
            self._sleep(min(LISTEN_S, seconds))
            seconds -= LISTEN_S


__all__ = ["Paused", "Publisher", "StoppedError"]
