"""The engine of a run: Spark's streaming query, epochs without a batch, and their end.

Batches run on Spark's thread, due timers on a ticker's, and a supervisor waits for the end of the
query. The end may be a stop, the end of the input, a failure, or another driver's takeover.

Always true here:
- one epoch at a time runs, on whatever thread: it has the turn;
- after the supervisor has seen the end, no epoch begins;
- a driver that was replaced leaves the checkpoint alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from cairn.backends.files import drop_external
from cairn.crash import crash_point
from cairn.driver import progress
from cairn.driver.changes import Changes
from cairn.driver.coordinator.epoch import clock_ms
from cairn.driver.coordinator.publisher import StoppedError
from cairn.driver.coordinator.ticker import Pace, Ticker
from cairn.driver.following import message_ahead
from cairn.driver.history import History
from cairn.driver.idle import IdleEpochs, Turn
from cairn.driver.interrupts import call_aside
from cairn.driver.options import Options
from cairn.driver.scaling import Scaling
from cairn.driver.spark_batches import BatchFailedError, SparkBatches, StoppingError
from cairn.driver.spark_failure import as_cairn_error, is_concurrent_use
from cairn.driver.start import Started, compact_interval, note_failed_start
from cairn.errors import (
    CommitConflictError,
    CommitError,
    CommitUnknownError,
    FunctionError,
    PlanError,
)
from cairn.logs import logger
from cairn.plan.graph import Graph
from cairn.report.status import Ending, Signs, Status, status_of
from cairn.sinks.base import close_all
from cairn.storage.manifest import SparkPosition
from cairn.storage.notes import write_ending
from cairn.storage.paths import SPARK_FOLDER
from cairn.storage.removal import delete_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from cairn.driver.spark_driver import SparkDriver

STOP_PATIENCE_S = 60.0
AWAITED_AGAIN_S = 2.0


class Engine:
    """Runs the epochs of a started job until it ends."""

    def __init__(
        self,
        graph: Graph,
        options: Options,
        started: Started,
        driver: SparkDriver,
        *,
        trigger_ms: int,
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` is called when no epoch runs any more, before the slots end."""
        self.name = graph.name
        self.driver = driver
        self.store = started.store
        self.coordinator = started.coordinator
        self.turn = Turn()
        self.coordinator.is_stopping = lambda: self.turn.is_stopping
        self.failures = started.failures
        self.history = History(started.coordinator)
        self.ended_as: Ending | None = None
        self.ended = threading.Event()
        self._graph = graph
        self._options = options
        self._on_end = on_end
        self._spark_place = started.spark_place
        self._batches = SparkBatches(
            started.coordinator,
            started.spark_place,
            started.position,
            graph.source_names,
            gives_up=options.guarantee == "at-most-once",
            reset_sources=options.reset_sources,
            compact_interval=compact_interval(graph),
        )
        self._started_ms = clock_ms()
        self._trigger_ms = trigger_ms
        self._is_raised = False
        self._awaiting = 0
        """Number of calls that wait for the end and will raise its error."""
        self._awaited_s = float("-inf")
        """The time the last of them left: some wait repeatedly, for a moment each."""
        self._stop_called = threading.Event()
        self._pace = Pace(trigger_ms)
        self.changes = Changes(graph, self.coordinator, driver, self._pace, url=self.store.url)
        self.scaling = Scaling(
            options,
            self.coordinator,
            self.changes,
            self.history,
            graph.source_names,
            trigger_ms=trigger_ms,
            cores=driver.local_cores,
            progress=lambda: self.query.lastProgress,
        )
        self.idle = IdleEpochs(
            self.coordinator,
            self._pace,
            self.turn,
            self.changes,
            run_batch=self._run_without_rows,
            stop_query=self._stop_query,
            name=graph.name,
        )

    def begin(self) -> None:
        """Start Spark's query, the ticker and the supervisor."""
        try:
            with note_failed_start(self.coordinator, self.failures):
                self.query = self._start_query()
        except BaseException:
            self._let_go()
            raise
        self.driver.watch_departures(lambda: message_ahead(self.coordinator))
        self._ticker = Ticker(self._tick, self._trigger_ms, self.name)
        threading.Thread(target=self._supervise, daemon=True, name=f"cairn-{self.name}").start()
        self._say(
            "the job runs on %s, with %d subtasks", self.store.url, self.coordinator.parallelism
        )

    @property
    def status(self) -> Status:
        """The status of the job: see `cairn.report.status`."""
        committed = self.coordinator.committed
        delays = [mark.delay_ms for mark in self.coordinator.origins.values()]
        return status_of(
            Signs(
                now_ms=clock_ms(),
                ending=self.ended_as,
                is_alive=True,
                is_busy=self.turn.is_taken,
                is_paused=self.coordinator.paused is not None,
                failed_attempts=self.failures.attempts_after(committed),
                started_ms=self._started_ms,
                committed_ms=None if committed is None else committed.wall_ms,
                has_committed=committed is not None and committed.term == self.coordinator.term,
                watermark_ms=None if committed is None else committed.watermark_ms,
                delay_ms=max(delays, default=0),
                trigger_ms=self._trigger_ms,
            )
        )

    # Waiting for the end, on the user's threads

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end and raise the error of the run. False after `timeout` seconds."""
        # In slices, so that Ctrl-C is heard.
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.count_waiting():
            while not self.ended.wait(0.2):
                if deadline is not None and time.monotonic() > deadline:
                    return False
        self.raise_error()
        return True

    @contextmanager
    def count_waiting(self) -> Iterator[None]:
        """Count a call that waits for the end and will raise its error."""
        self._awaiting += 1
        try:
            yield
        finally:
            self._awaiting -= 1
            self._awaited_s = time.monotonic()

    @property
    def _is_awaited(self) -> bool:
        return self._awaiting > 0 or time.monotonic() - self._awaited_s < AWAITED_AGAIN_S

    def raise_error(self, *, again: bool = True) -> None:
        """Raise the error of the run, if any, without the frames of the threads it came from.

        Unless `again`, an error that was raised before is not raised.
        """
        if self.turn.error is not None and (again or not self._is_raised):
            self._is_raised = True
            raise self.turn.error.with_traceback(None) from self.turn.error.__cause__

    def process_all_available(self) -> None:
        """Wait until everything the sources hold now is in committed epochs."""
        with self.count_waiting():
            try:
                call_aside(self.query.processAllAvailable)
            except Exception:
                self.ended.wait(STOP_PATIENCE_S)
                self.raise_error()
                raise
            if not self.query.isActive:
                # It has ended, or another driver has ended it: the supervisor finds out which.
                self.ended.wait(STOP_PATIENCE_S)
            self.idle.run_out()
            self.idle.commit()
            if self.turn.error is not None:
                self.ended.wait(STOP_PATIENCE_S)
                self.raise_error()

    def stop(self) -> None:
        """End the run after the epoch under way, and wait for it."""
        self.turn.is_stopping = True
        # Spark interrupts what it stops; an epoch that is let finish needs no second run.
        finished = self.turn.take_at_once(STOP_PATIENCE_S)
        try:
            self._stop_query()
        finally:
            if finished:
                self.turn.give_up()
        self.ended.wait(STOP_PATIENCE_S)

    def abandon(self) -> None:
        """End the run before its next epoch: another driver may lead the job."""
        if self.ended_as is None and not self.turn.is_stopping:
            self.turn.fail(
                CommitConflictError(
                    f"this driver has lost the lead of job {self.name!r} on {self.store.url}\n"
                    "  next: none; a standby continues the job"
                )
            )
            self._stop_query()

    def _say(self, message: str, *args: object, level: int = logging.INFO) -> None:
        logger.log(level, message, *args, extra={"job": self.name})

    def _start_query(self) -> Any:
        return self.driver.start_query(self._batches.url, self._options.trigger, self._on_batch)

    @property
    def _is_bounded(self) -> bool:
        return self._options.trigger == "available-now"

    # Batches, on Spark's thread

    def _on_batch(self, rows: DataFrame, batch_id: int) -> None:
        self.turn.take_for_batch(lambda: self._leave_if_ending(batch_id))
        failure: BaseException | None = None
        try:
            if not self.turn.is_ending:
                position = self._batches.to_run(batch_id)
                if position is not None:
                    self._run_batch(position, rows)
                crash_point("driver.epoch.ended")
                return
            self._leave_unread(batch_id)
        except StoppedError as error:
            # The epoch is in the log, or its batch is read again: nothing is lost.
            self._say("%s", error, level=logging.WARNING)
        except BaseException as error:
            self.turn.fail(error)
            failure = error
        finally:
            self.turn.give_up()
        if failure is not None:
            raise BatchFailedError(failure)
        # Without the turn: `stop` waits for it.
        self._refuse_if_ending()

    def _refuse_if_ending(self) -> None:
        if not self.turn.is_ending:
            return
        # Spark takes the refusal for a failure unless it knows that it is being stopped.
        self._stop_called.wait(STOP_PATIENCE_S)
        time.sleep(0.2)
        raise StoppingError

    def _leave_if_ending(self, batch_id: int) -> None:
        if self.turn.is_ending:
            self._leave_unread(batch_id)
            self._refuse_if_ending()

    def _leave_unread(self, batch_id: int) -> None:
        if self.turn.error is None:
            self._batches.leave_unread(batch_id)

    def _run_batch(
        self, position: SparkPosition, rows: DataFrame | None, *, is_draining: bool = False
    ) -> None:
        self._pace.begin()
        self.changes.apply()
        self.coordinator.run_batch(
            position,
            lambda begin: self.driver.execute(rows, begin),
            is_draining=is_draining,
            has_rows=rows is not None,
        )
        self._pace.end()
        was_empty = self.history.is_empty
        self.history.add_newest()
        self.scaling.after_batch()
        if was_empty and not self.history.is_empty:
            progress.say(f"the first epoch is committed: {self.history.epochs()[0].epoch}")
        self.driver.end_left_behind()
        self.driver.give_executors_back()

    # Epochs without a batch, on threads of our own

    def _run_without_rows(self, position: SparkPosition, is_draining: bool) -> None:
        self._run_batch(position, None, is_draining=is_draining)

    def _tick(self) -> None:
        if self._pace.is_quiet:
            # Readers of the checkpoint need not wait for the next epoch to prove it.
            self.coordinator.note_published()
            self.scaling.while_quiet()
        if not self._is_bounded:
            self.idle.tick()

    def _stop_query(self) -> None:
        self._stop_called.set()
        # Ctrl-C may have interrupted this thread's last call to the JVM.
        call_aside(self.query.stop)

    def _finish_input(self) -> None:
        """After the last batch of a bounded run, fire due timers; with `drain`, all timers."""
        self.idle.run_out()
        if self._options.drain:
            self.idle.drain()
        self.idle.commit()

    # The end, on a thread of our own

    def _supervise(self) -> None:
        while True:
            failure: BaseException | None = None
            try:
                self.query.awaitTermination()
            except Exception as error:
                failure = error
            if self.turn.error is None and failure is not None and not self.turn.is_stopping:
                self.turn.take_at_once()
                try:
                    goes_on = self._go_on_elsewhere(failure)
                except Exception as error:
                    failure, goes_on = error, False
                finally:
                    self.turn.give_up()
                if goes_on:
                    continue
                self.turn.error = self._explain(failure)
            break
        self._ticker.stop()
        if self._is_bounded and not self.turn.is_ending:
            self._finish_input()
        # An epoch without a batch may be under way: it needs its slots. None begins after this.
        self.turn.is_over = True
        if self.turn.take_at_once(STOP_PATIENCE_S):
            self.turn.give_up()
        self._finish_epoch()
        self._notice_takeover()
        if not isinstance(self.turn.error, (CommitConflictError, CommitUnknownError)):
            # A driver that another one has replaced leaves the checkpoint alone.
            self.coordinator.note_published()
        self._note_ending()
        self._let_go()
        if self._options.on_stop == "delete" and self.turn.error is None:
            try:
                self._delete()
            except Exception as error:
                self.turn.error = error
        self.ended.set()

    def _note_ending(self) -> None:
        """Write how the run ended: in the checkpoint, and in the log."""
        if self.turn.error is None:
            self.ended_as = "stopped" if self.turn.is_stopping else "finished"
        else:
            newest = self.coordinator.newest
            self.failures.note_end(self.turn.error, 0 if newest is None else newest.number + 1)
            is_superseded = isinstance(self.turn.error, CommitConflictError)
            self.ended_as = "superseded" if is_superseded else "failed"
        if self.ended_as != "superseded":
            write_ending(self.store, self.coordinator.term, self.ended_as, self.turn.error)
        if self.turn.error is None:
            self._say("the run is over: %s", self.ended_as)
        elif logger.hasHandlers() or not self._is_awaited:
            # Without a handler Python would print it bare, and a waiting call raises it anyway.
            self._say("the run failed: %s", self.turn.error, level=logging.ERROR)

    def _notice_takeover(self) -> None:
        """Fail the run if another driver has ended it.

        Spark stops a query quietly when another one of the same checkpoint starts in its session.
        An epoch that is under way then fails with whatever the interruption has caused.
        """
        if self.turn.is_stopping or isinstance(
            self.turn.error, (CommitError, FunctionError, PlanError)
        ):
            return
        try:
            is_leading = self.coordinator.log.is_leading()
        except Exception:
            return  # The store cannot be reached: only the end of the query is known.
        if not is_leading:
            conflict = self._conflict()
            conflict.__cause__ = self.turn.error
            self.turn.error = conflict

    def _conflict(self) -> CommitConflictError:
        return CommitConflictError(
            f"another driver runs job {self.name!r} on {self.store.url}\n"
            "  next: leave the job to it, or stop it and start again"
        )

    def _let_go(self) -> None:
        with suppress(Exception):
            self._on_end()
        # Spark may be gone already; slots end by themselves then.
        with suppress(Exception):
            self.changes.join(STOP_PATIENCE_S)
            self.driver.say_goodbye()
        close_all(sink.sink for sink in self._graph.sinks)
        self._spark_place.close()

    def _finish_epoch(self) -> None:
        """Commit the last batches: the next start would run them again."""
        if self.turn.error is not None or not self.turn.take_at_once(STOP_PATIENCE_S):
            return
        try:
            self.coordinator.commit_epoch()
        except StoppedError as error:
            self._say("%s", error, level=logging.WARNING)
        except BaseException as error:
            self.turn.error = error
        finally:
            self.turn.give_up()

    def _delete(self) -> None:
        if not self.coordinator.log.is_leading():
            raise self._conflict()  # It is another driver's by now.
        self.failures.settle()
        delete_checkpoint(self.store, clean=drop_external)
        if self._spark_place.kept is not self.store:
            self._spark_place.kept.delete_folder(SPARK_FOLDER)

    def _go_on_elsewhere(self, failure: BaseException) -> bool:
        """Start again in another folder if another driver still writes to Spark's; True if so."""
        if not is_concurrent_use(failure):
            return False
        if not self._batches.go_elsewhere():
            return False
        self.query = self._start_query()
        return True

    def _explain(self, failure: BaseException) -> BaseException:
        """Return the error of the run for a failure of Spark's query."""
        if is_concurrent_use(failure):
            return self._conflict()
        newest = self.coordinator.newest
        return as_cairn_error(failure, 0 if newest is None else newest.number)
