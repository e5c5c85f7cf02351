"""A run: a job that has been started, from the takeover to the goodbye."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from cairn.crash import crash_point
from cairn.driver import progress
from cairn.driver.changes import Changes
from cairn.driver.coordinator.epoch import clock_ms
from cairn.driver.coordinator.measured import summary
from cairn.driver.coordinator.publisher import StoppedError
from cairn.driver.coordinator.ticker import Pace, Ticker
from cairn.driver.history import History
from cairn.driver.idle import Host, IdleEpochs, Turn
from cairn.driver.interrupts import call_aside, held_back, print_no_traceback
from cairn.driver.options import Options
from cairn.driver.spark_batches import BatchFailedError, SparkBatches, StoppingError
from cairn.driver.spark_failure import as_cairn_error, is_concurrent_use
from cairn.driver.start import compact_interval, noted_on_error, start
from cairn.errors import (
    CommitConflictError,
    CommitError,
    CommitUnknownError,
    EpochError,
    FunctionError,
    PlanError,
)
from cairn.functions import Function
from cairn.logs import logger
from cairn.plan.graph import Graph
from cairn.query.doors import Doors
from cairn.query.live import Answer, Answers, LiveState
from cairn.report.notebook import Plot, RunFacts, run_facts, run_html, timeline
from cairn.report.status import Ending, Signs, Status, status_of
from cairn.sinks.base import close_all, closed_on_error
from cairn.snapshots.destination import check_destination
from cairn.snapshots.savepoint import SavepointInfo
from cairn.snapshots.saving import write_savepoint
from cairn.storage.log import Log
from cairn.storage.manifest import SparkPosition
from cairn.storage.notes import write_ending
from cairn.storage.paths import SPARK_FOLDER
from cairn.storage.removal import delete_checkpoint
from cairn.web.lifetime import Web

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from cairn.driver.roster import SlotInfo

STOP_PATIENCE_S = 60.0
AWAITED_AGAIN_S = 2.0


class Run:
    """A running job. Use it as a context manager: leaving the block stops the run.

    What has failed is raised there, unless `wait` has raised it before.
    """

    def __init__(self, graph: Graph, options: Options) -> None:
        from cairn.driver.spark_driver import SparkDriver, trigger_ms

        self.name = graph.name
        self._graph = graph
        self._options = options
        # Before anything else: a port that is taken is known before a job is taken over.
        self._web = Web(options.serve)
        spark = graph.sources[0].dataframe.sparkSession
        with self._web.close_on_error():
            started = start(graph, options)
            with (
                closed_on_error(sink.sink for sink in graph.sinks),
                noted_on_error(started.coordinator, started.failures),
            ):
                self._driver = SparkDriver(
                    graph,
                    started.coordinator.spec,
                    spark,
                    parallelism=started.coordinator.parallelism,
                    run_id=started.coordinator.run_id,
                )
                self._driver.lay_first_pin(started.coordinator.slots)
        self._store = started.store
        self._spark_store = started.spark_store
        self._coordinator = started.coordinator
        self._coordinator.is_stopping = lambda: self._stopping
        self._batches = SparkBatches(
            started.coordinator,
            started.spark_store,
            started.position,
            graph.source_names,
            gives_up=options.guarantee == "at-most-once",
            reset_sources=options.reset_sources,
            compact_interval=compact_interval(graph),
        )
        self._failures = started.failures
        self._ended_as: Ending | None = None
        self._started_ms = clock_ms()
        self.error: BaseException | None = None
        self._is_raised = False
        self._awaiting = 0
        """Number of calls that wait for the end and will raise its error."""
        self._awaited_s = float("-inf")
        """When the last of them left. Some wait again and again, for a moment each."""
        self._turn = Turn()
        self._stopping = False
        self._is_over = False
        """Spark's query has ended, and what follows it."""
        self._stop_called = threading.Event()
        self._ended = threading.Event()
        self._history = History(started.coordinator)
        self._trigger_ms = trigger_ms(spark, options.trigger)
        self._pace = Pace(self._trigger_ms)
        self._changes = Changes(
            graph, started.coordinator, self._driver, self._pace, url=started.store.url
        )
        self._doors = Doors(lambda: self._driver.doors, self._driver.door.key)
        self._live = LiveState(
            self._coordinator, graph.group_count, self._doors.ask, job=graph.name
        )
        host = Host(
            is_ending=lambda: self._is_ending,
            is_changing=lambda: self._changes.is_asked,
            run=self._run_without_batch,
            fail=self._fail,
            stop=self._stop_query,
        )
        self._idle = IdleEpochs(host, self._coordinator, self._pace, self._turn, graph.name)
        try:
            with noted_on_error(self._coordinator, self._failures):
                self._query = self._start_query()
        except BaseException:
            self._let_go()
            raise
        self._ticker = Ticker(self._tick, self._trigger_ms, graph.name)
        self._supervisor = threading.Thread(
            target=self._supervise, daemon=True, name=f"cairn-{graph.name}"
        )
        self._supervisor.start()
        self._web.open(self, self._store)
        self._say("the job runs on %s, with %d subtasks", started.store.url, self.parallelism)

    @classmethod
    def started(cls, graph: Graph, options: Options) -> Run:
        """Start a job. Ctrl-C meanwhile stops the run as soon as it can be stopped."""
        print_no_traceback()
        with held_back() as held:
            run = cls(graph, options)
            if held.is_pending:
                run.stop()
            return run

    def _say(self, message: str, *args: object, level: int = logging.INFO) -> None:
        logger.log(level, message, *args, extra={"job": self.name})

    def _start_query(self) -> Any:
        return self._driver.start_query(self._batches.url, self._options.trigger, self._on_batch)

    @property
    def _is_bounded(self) -> bool:
        return self._options.trigger == "available-now"

    # Epochs, on Spark's thread

    def _on_batch(self, rows: DataFrame, batch_id: int) -> None:
        self._turn.take_for_batch(lambda: self._leave_if_ending(batch_id))
        failure: BaseException | None = None
        try:
            if not self._is_ending:
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
            self.error = self.error or error
            failure = error
        finally:
            self._turn.give_up()
        if failure is not None:
            raise BatchFailedError(failure)
        # Not with the turn: who stops the run waits for it.
        self._refuse_if_ending()

    @property
    def _is_ending(self) -> bool:
        return self._stopping or self._is_over or self.error is not None

    def _refuse_if_ending(self) -> None:
        if not self._is_ending:
            return
        # Only once Spark knows that it is being stopped is the refusal no failure to it.
        self._stop_called.wait(STOP_PATIENCE_S)
        time.sleep(0.2)
        raise StoppingError

    def _leave_if_ending(self, batch_id: int) -> None:
        if self._is_ending:
            self._leave_unread(batch_id)
            self._refuse_if_ending()

    def _leave_unread(self, batch_id: int) -> None:
        if self.error is None:
            self._batches.leave_unread(batch_id)

    def _run_batch(
        self, position: SparkPosition, rows: DataFrame | None, *, is_draining: bool = False
    ) -> None:
        started = time.perf_counter()
        self._pace.begin()
        self._changes.apply()
        epoch = self._coordinator.run_batch(
            position, lambda begin: self._driver.execute(rows, begin), is_draining=is_draining
        )
        spent_ms = (time.perf_counter() - started) * 1000
        self._pace.end()
        was_empty = self._history.is_empty
        self._history.add(epoch.number, spent_ms)
        if was_empty and not self._history.is_empty:
            progress.say(f"the first epoch is committed: {self._history.epochs()[0]['epoch']}")
        self._driver.end_left_behind()

    # Epochs without a batch, on threads of our own

    def _run_without_batch(self, position: SparkPosition, is_draining: bool) -> None:
        self._run_batch(position, None, is_draining=is_draining)

    def _tick(self) -> None:
        if self._pace.is_quiet:
            # Those who look at the checkpoint need not wait for the next epoch to prove it.
            self._coordinator.note_published()
        if not self._is_bounded:
            self._idle.tick()

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error

    def _stop_query(self) -> None:
        self._stop_called.set()
        # Not on a thread whose last call to the JVM may have been cut in two by Ctrl-C.
        call_aside(self._query.stop)

    def _finish_input(self) -> None:
        """After the last batch of a bounded run: what is due fires; with `drain`, everything."""
        self._idle.run_out()
        if self._options.drain:
            self._idle.drain()
        self._idle.commit()

    # The end, on a thread of our own

    def _supervise(self) -> None:
        while True:
            failure: BaseException | None = None
            try:
                self._query.awaitTermination()
            except Exception as error:
                failure = error
            if self.error is None and failure is not None and not self._stopping:
                self._turn.take_at_once()
                try:
                    goes_on = self._go_on_elsewhere(failure)
                except Exception as error:
                    failure, goes_on = error, False
                finally:
                    self._turn.give_up()
                if goes_on:
                    continue
                self.error = self._explained(failure)
            break
        self._ticker.stop()
        if self._is_bounded and not self._is_ending:
            self._finish_input()
        # An epoch without a batch may be under way: it needs its slots. None begins after this.
        self._is_over = True
        if self._turn.take_at_once(STOP_PATIENCE_S):
            self._turn.give_up()
        self._finish_epoch()
        self._notice_takeover()
        if not isinstance(self.error, (CommitConflictError, CommitUnknownError)):
            # A driver that another one has replaced leaves the checkpoint alone.
            self._coordinator.note_published()
        if self.error is not None:
            newest = self._coordinator.newest
            self._failures.note_end(self.error, 0 if newest is None else newest.number + 1)
            is_superseded = isinstance(self.error, CommitConflictError)
            self._ended_as = "superseded" if is_superseded else "failed"
        else:
            self._ended_as = "stopped" if self._stopping else "finished"
        if self._ended_as != "superseded":
            write_ending(self._store, self._coordinator.term, self._ended_as, self.error)
        if self.error is None:
            self._say("the run is over: %s", self._ended_as)
        elif logger.hasHandlers() or not self._is_awaited:
            # Otherwise Python would print it bare, and a call that waits would raise it again.
            self._say("the run failed: %s", self.error, level=logging.ERROR)
        self._let_go()
        if self._options.on_stop == "delete" and self.error is None:
            try:
                self._delete()
            except Exception as error:
                self.error = error
        self._ended.set()

    def _notice_takeover(self) -> None:
        """Fail the run if another driver has ended it.

        Spark stops a query quietly when another one of the same checkpoint starts in its session.
        An epoch that is under way then fails with whatever the interruption has caused.
        """
        if self._stopping or isinstance(self.error, (CommitError, FunctionError, PlanError)):
            return
        try:
            is_leading = self._coordinator.log.is_leading()
        except Exception:
            return  # The store is away: the end of the query is all that is known.
        if not is_leading:
            conflict = self._conflict()
            conflict.__cause__ = self.error
            self.error = conflict

    def _conflict(self) -> CommitConflictError:
        return CommitConflictError(
            f"another driver runs job {self.name!r} on {self._store.url}\n"
            "  next: leave the job to it, or stop it and start again"
        )

    def _let_go(self) -> None:
        with suppress(Exception):
            self._web.close()
        # Spark may be gone already; slots end by themselves then.
        with suppress(Exception):
            self._changes.join(STOP_PATIENCE_S)
            self._driver.say_goodbye()
        with suppress(Exception):
            self._doors.close()
            self._live.close()
        close_all(sink.sink for sink in self._graph.sinks)

    def _finish_epoch(self) -> None:
        """Commit what the last batches have left: the next start would run them again."""
        if self.error is not None or not self._turn.take_at_once(STOP_PATIENCE_S):
            return
        try:
            self._coordinator.commit_epoch()
        except StoppedError as error:
            self._say("%s", error, level=logging.WARNING)
        except BaseException as error:
            self.error = error
        finally:
            self._turn.give_up()

    def _delete(self) -> None:
        if not self._coordinator.log.is_leading():
            raise self._conflict()  # It is another driver's by now.
        self._failures.settle()
        delete_checkpoint(self._store)
        if self._spark_store is not self._store:
            self._spark_store.delete_folder(SPARK_FOLDER)

    def _go_on_elsewhere(self, failure: BaseException) -> bool:
        """Where Spark has failed because another driver still writes to its folder."""
        if not is_concurrent_use(failure):
            return False
        if not self._batches.go_elsewhere():
            return False
        self._query = self._start_query()
        return True

    def _explained(self, failure: BaseException) -> BaseException:
        if is_concurrent_use(failure):
            return self._conflict()
        newest = self._coordinator.newest
        return as_cairn_error(failure, 0 if newest is None else newest.number)

    # What users call

    @property
    def status(self) -> Status:
        """The status of the job, the same word in all views of it: see `cairn.report.status`.

        While the run lives: starting, running, idle, behind, paused or failing. Then it has
        failed, stopped, finished or is superseded.
        """
        committed = self._coordinator.committed
        delays = [mark.delay_ms for mark in self._coordinator.origins.values()]
        return status_of(
            Signs(
                now_ms=clock_ms(),
                ending=self._ended_as,
                is_alive=True,
                is_busy=self._turn.is_taken,
                is_paused=self._coordinator.paused is not None,
                failed_attempts=self._failures.attempts_after(committed),
                started_ms=self._started_ms,
                committed_ms=None if committed is None else committed.wall_ms,
                has_committed=committed is not None and committed.term == self._coordinator.term,
                watermark_ms=None if committed is None else committed.watermark_ms,
                delay_ms=max(delays, default=0),
                trigger_ms=self._trigger_ms,
            )
        )

    @property
    def is_active(self) -> bool:
        """True until the run has ended."""
        return self._ended_as is None

    @property
    def url(self) -> str | None:
        """Where the run is served; None without `serve`."""
        return self._web.url

    @property
    def flight_url(self) -> str | None:
        """Where whole states are served, by Arrow Flight."""
        return self._web.flight_url

    @property
    def paused(self) -> str | None:
        """Why no epoch begins, while a sink cannot publish; the job goes on when it can."""
        paused = self._coordinator.paused
        return None if paused is None else str(paused)

    def wait(self, timeout: float | None = None) -> bool:
        """Until the run has ended; raises what failed. False when `timeout` seconds passed."""
        # In slices, so that Ctrl-C is heard.
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._awaited():
            while not self._ended.wait(0.2):
                if deadline is not None and time.monotonic() > deadline:
                    return False
        self._raise_error()
        return True

    @contextmanager
    def _awaited(self) -> Iterator[None]:
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

    def _raise_error(self) -> None:
        """Raise the error of the run, if any, without the frames of the threads it came from."""
        if self.error is not None:
            self._is_raised = True
            raise self.error.with_traceback(None) from self.error.__cause__

    def process_all_available(self) -> None:
        """Until everything the sources hold now is in committed epochs; raises what failed.

        Timers that the watermark has come to by then have fired, and what loops sent back has
        been processed, until they send back nothing more.
        """
        with self._awaited():
            try:
                call_aside(self._query.processAllAvailable)
            except Exception:
                self._ended.wait(STOP_PATIENCE_S)
                self._raise_error()
                raise
            if not self._query.isActive:
                # It has ended, or another driver has ended it: the supervisor finds out which.
                self._ended.wait(STOP_PATIENCE_S)
            self._idle.run_out()
            self._idle.commit()
            if self.error is not None:
                self._ended.wait(STOP_PATIENCE_S)
                self._raise_error()

    def stop(self, savepoint: str | None = None) -> None:
        """End the run after the epoch under way. Nothing is lost: the next start goes on.

        With `savepoint`, the state as of the last epoch is written there, once the run has ended.
        """
        self.check_stop(savepoint)
        self._stopping = True
        # Spark interrupts what it stops; an epoch that is let finish needs no second run.
        finished = self._turn.take_at_once(STOP_PATIENCE_S)
        try:
            self._stop_query()
        finally:
            if finished:
                self._turn.give_up()
        self._ended.wait(STOP_PATIENCE_S)
        if savepoint is None:
            return
        if not self._coordinator.is_published:
            raise CommitError(
                f"no savepoint: a sink of job {self.name!r} has not taken the newest epoch, and a "
                "job that starts from the savepoint would not publish it\n"
                "  next: start the job on this checkpoint again, then stop it with a savepoint"
            )
        self.savepoint(savepoint)

    def check_stop(self, savepoint: str | None = None) -> None:
        """Raises what `stop` would refuse, before anything is stopped."""
        if savepoint is None:
            return
        if self._options.on_stop == "delete":
            raise PlanError(
                "the checkpoint is deleted when this run stops (on_stop='delete')\n"
                "  next: take run.savepoint(path) first, then stop"
            )
        check_destination(savepoint)

    def savepoint(self, path: str) -> SavepointInfo:
        """Write the newest committed epoch to a folder: full, self-contained, movable.

        The run goes on meanwhile.
        """
        newest = self._coordinator.committed
        if newest is None:
            raise EpochError(
                f"job {self.name!r} has no committed epoch yet\n"
                "  next: wait for the first one, for example with run.process_all_available()"
            )
        self._coordinator.note_published()
        written = write_savepoint(self._store, newest.number, path, spark_store=self._spark_store)
        self._say("savepoint of epoch %d written to %s", newest.number, path)
        return written

    @property
    def parallelism(self) -> int:
        """How many subtasks the newest epoch of this run ran with, or the first one will."""
        return self._coordinator.parallelism

    def rescale(self, parallelism: int) -> None:
        """From the next epoch on, run with this many subtasks. No state is rewritten."""
        self._check_running()
        self._changes.rescale(parallelism)

    def upgrade(self, uid: str, function: Function, *, allow_dropped_state: bool = False) -> None:
        """From the next epoch on, run this function in place of an operator's. It keeps its state.

        Refused when the state it declares cannot be made of what there is.
        """
        self._check_running()
        self._changes.upgrade(uid, function, allow_dropped_state=allow_dropped_state)

    def _check_running(self) -> None:
        if self._ended.is_set() or self._stopping:
            raise EpochError(f"the run of job {self.name!r} has ended\n  next: start it anew")

    def query(self, operator: str, state: str, key: Any) -> Answer:
        """State of a key as of the last committed epoch, whatever the epoch under way has done.

        Of several key columns a tuple. Of state of a subtask the key is its number.
        """
        return self._live.query(operator, state, key)

    def query_many(self, operator: str, state: str, keys: Iterable[Any]) -> Answers:
        """State of many keys, all of it as of one committed epoch."""
        return self._live.query_many(operator, state, keys)

    def epochs(self) -> list[dict[str, Any]]:
        """The retained epochs on the current lineage, newest first."""
        return [summary(epoch) for epoch in Log(self._store).lineage()]

    def metrics(self) -> dict[str, Any]:
        """What the newest committed epoch of this run measured; empty before the first.

        Rows, sizes and times; `["operators"][uid]` has those of an operator, with its rows by
        subtask and key group, its hot keys, and what its function counted (`user`, in all epochs
        so far). docs/metrics.md has every name.
        """
        return self._history.newest()

    def history(self) -> list[dict[str, Any]]:
        """What the last thousand epochs of this run measured, oldest first.

        Longer than `epochs()`, which gives those that are kept. Rows by subtask and key group, hot
        keys and what functions counted are left out: `metrics()` has those of the newest.
        """
        return self._history.epochs()

    def slots(self) -> list[SlotInfo]:
        """Return where each subtask of the newest epoch ran, and the log file of its slot.

        Functions print into that file, on the host of the executor. Empty before the first epoch
        of this run.
        """
        return self._driver.slots

    def plot(self) -> Plot:
        """The timeline of the last epochs: where the time of each went. A notebook shows it."""
        return timeline(self._facts())

    def _facts(self) -> RunFacts:
        epochs = map(summary, Log(self._store).lineage())
        return run_facts(self, self._store.url, epochs, self._coordinator.last_commit_ms)

    def _repr_html_(self) -> str:
        return run_html(self._facts())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._ended.is_set():
            if kind is not None and issubclass(kind, KeyboardInterrupt):
                progress.say("stopping after the current epoch; Ctrl-C again stops at once")
            with self._awaited():
                self.stop()
        if kind is None and not self._is_raised:
            self._raise_error()

    def __repr__(self) -> str:
        newest = self._coordinator.newest
        at = "no epoch yet" if newest is None else f"epoch {newest.number}"
        return f"<run of {self.name}: {self.status}, {at}>"
