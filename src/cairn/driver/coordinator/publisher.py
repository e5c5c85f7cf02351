"""Publish with the sinks, and repeat until they succeed.

A commit that keeps failing pauses the job: no epoch begins before it has succeeded. A target
that is away when slots write to it does the same. A slow sink slows the job down, and no output
is dropped.

Always true here:
- waiting ends with success, the end of the run, a takeover, or after `timeout_s`;
- an epoch that is in the log and not published is published by the next start;
- with at-most-once, a sink that cannot detect a repeated commit is called once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

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
"""Interval at which a waiting commit checks whether the run is stopping."""


class StoppedError(CommitError):
    """The run is stopping, and a sink has not published."""


class Place(NamedTuple):
    """The place outside of the job that an epoch waits for."""

    kind: Literal["sink", "database"]
    name: str
    """The uid of the sink, or the address of the database with the job's state."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


class Paused(NamedTuple):
    """The reason why the job is paused."""

    place: Place
    epoch: int
    error: str
    tries: int

    def __str__(self) -> str:
        return (
            f"{self.place} cannot take epoch {self.epoch}, tried {self.tries} times: {self.error}"
        )


class Publisher:
    """Publishes with the sinks of a job."""

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
        """Duration of the last publication."""
        self.dropped = 0
        """Batches that a sink failed to publish, with at-most-once."""
        self.is_stopping: Callable[[], bool] = lambda: False
        self._published: Epoch | None = None
        """The last epoch in the log that all its sinks have published."""
        self._noted: Epoch | None = None
        self._noting = threading.Lock()
        self._log = log
        self._guarantee = guarantee
        self._timeout_s = timeout_s
        self._allow_dropped_output = allow_dropped_output
        self._clock = clock
        self._sleep = sleep

    def check_output(self, newest: Epoch) -> Output:
        """Return the sinks that publish the newest epoch at a start, or raise PlanError."""
        return check_output(
            newest,
            self.sinks,
            is_published=lambda: is_known_published(self._log, newest),
            allow_dropped_output=self._allow_dropped_output,
        )

    def recover(self, newest: Epoch | None, term: int) -> None:
        """Publish the newest epoch again, and remove the output of abandoned attempts."""
        if newest is not None:
            output = self.check_output(newest)
            given = newest.committables.items()
            ours = {uid: prepared for uid, prepared in given if uid in output.sinks}
            self.publish(newest.number, ours, is_start=True)
            if output.is_whole:
                self._published = newest
                self.note_published()
        for uid, sink in self.sinks.items():
            # The previous driver may have tried the number of the takeover itself.
            with refuse_if_away(uid, sink):
                sink.recover(term + 1)

    def publish_epoch(self, epoch: Epoch) -> None:
        """Publish an epoch of the log with every sink."""
        self.publish(epoch.number, epoch.committables)
        self._published = epoch

    def note_published(self) -> None:
        """Write the note of the last published epoch, unless it is there. Never raises.

        Any thread may call it. The previous note is deleted: a child in the log proves its epoch.
        """
        with self._noting:
            epoch, noted = self._published, self._noted
            if epoch is None or epoch is noted or not has_output(epoch):
                return
            try:
                note_published(self._log.store, epoch.number, epoch.nonce)
            except AssertionError:
                raise
            except Exception as error:
                # The next start publishes the epoch again, which changes nothing in the sinks.
                logger.warning("epoch %d is published, but not noted: %s", epoch.number, error)
                return
            self._noted = epoch
            if noted is not None:
                self._delete_note(noted)

    def _delete_note(self, epoch: Epoch) -> None:
        try:
            self._log.store.delete([note_path(epoch.number)])
        except AssertionError:
            raise
        except Exception as error:
            logger.warning("the old note of epoch %d could not be deleted: %s", epoch.number, error)

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
                        "sink %r failed to publish epoch %d and is not called again "
                        "(at-most-once): %s", uid, epoch, error,
                    )  # fmt: skip
                    self.dropped += 1
                    break
                self.wait_for(Place("sink", uid), epoch, error, tries, began_ms, is_start=is_start)
        self.resume()

    def resume(self) -> None:
        """End the pause."""
        if self.paused is not None:
            logger.warning("%s is back: the job goes on", self.paused.place)
            self.paused = None

    def wait_for(
        self,
        place: Place,
        epoch: int,
        error: Exception,
        tries: int,
        began_ms: int,
        *,
        is_start: bool = False,
    ) -> None:
        """Wait until it is time to try again, and pause the job; raises to give up."""
        self._give_up(place, epoch, error, tries, began_ms, is_start)
        self._wait(place, epoch, backoff_s(tries, first_s=BACKOFF_FIRST_S, factor=3))

    def _give_up(
        self, place: Place, epoch: int, error: Exception, tries: int, began_ms: int, is_start: bool
    ) -> None:
        """Pause the job, or raise if another try is pointless."""
        if tries < TRIES_BEFORE_PAUSE:
            return
        was_paused, self.paused = self.paused, Paused(place, epoch, str(error), tries)
        if self._is_taken_over():
            raise CommitConflictError(
                f"another driver has taken over, and goes on with epoch {epoch}\n"
                "  next: leave the job to it, or stop it and start again",
                epoch=epoch,
            ) from error
        waited_s = (self._clock() - began_ms) / 1000
        if is_start or (self._timeout_s is not None and waited_s >= self._timeout_s):
            raise CommitError(
                f"{place} did not take epoch {epoch}: {error}\n"
                f"  found: tried {tries} times; nothing is lost\n"
                f"  next: fix the {place.kind} and start the job again; it goes on with that epoch",
                epoch=epoch,
                **{place.kind: place.name},
            ) from error
        if was_paused is None:
            logger.warning("the job is paused until this is over: %s", self.paused)

    def _is_taken_over(self) -> bool:
        try:
            return not self._log.is_leading()
        except Exception:
            return False  # The store may be away too; the next try checks again.

    def _wait(self, place: Place, epoch: int, seconds: float) -> None:
        while seconds > 0:
            if self.is_stopping():
                self.paused = None
                raise StoppedError(
                    f"{place} has not taken epoch {epoch} when the run was stopped; "
                    "the next start goes on with it",
                    epoch=epoch,
                    **{place.kind: place.name},
                )
            self._sleep(min(LISTEN_S, seconds))
            seconds -= LISTEN_S


__all__ = ["Paused", "Publisher", "StoppedError"]
