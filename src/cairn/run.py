"""A run: a job that has been started, as users see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cairn.driver import progress
from cairn.driver.coordinator.leadership.base import Grant, Member
from cairn.driver.coordinator.reports import report_of
from cairn.driver.engine import Engine
from cairn.driver.group import Group
from cairn.driver.interrupts import hold_interrupts, print_no_traceback
from cairn.driver.lives import Lives
from cairn.driver.options import Options
from cairn.driver.spark_failure import is_spark_gone
from cairn.driver.standby import Standby
from cairn.driver.start import note_failed_start, start
from cairn.errors import CommitError, EpochError, PlanError
from cairn.functions import Function
from cairn.logs import logger
from cairn.plan.graph import Graph
from cairn.query.doors import Doors
from cairn.query.live import Answer, Answers, LiveState
from cairn.report.balance import Balance
from cairn.report.epoch import EpochReport
from cairn.report.notebook import Plot, RunFacts, run_facts, run_html, timeline
from cairn.report.scaling import ScalingReport
from cairn.report.status import Restart, Status
from cairn.sinks.base import closed_on_error
from cairn.snapshots.destination import check_destination
from cairn.snapshots.savepoint import SavepointInfo
from cairn.snapshots.saving import write_savepoint
from cairn.storage.log import Log
from cairn.storage.store import open_store
from cairn.web.lifetime import Web

if TYPE_CHECKING:
    from cairn.driver.roster import SlotInfo


class Run:
    """A running job. Use it as a context manager: leaving the block stops the run.

    The error of a run is raised there, unless `wait` has raised it before.
    """

    def __init__(
        self,
        graph: Graph,
        options: Options,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = graph.name
        self._options = options
        # Before anything else: a port that is taken is known before a job is taken over.
        self._web = Web(options.serve)
        shown = None if options.serve is None else options.serve.public_url
        with self._web.close_on_error():
            self._lives = Lives(
                graph,
                options,
                begin_life=partial(self._begin_life, graph),
                url=shown or self._web.url,
                on_end=self._web.close,
                is_interrupted=is_interrupted,
                is_spark_gone=lambda: is_spark_gone(graph.sources[0].dataframe.sparkSession),
            )
            if options.ha is not None:
                # A standby serves while it waits: its status, and where the leader is.
                self._web.open(self, open_store(options.checkpoint))
            self._lives.begin()
        if options.ha is None and self._lives.life is not None:
            with self._web.close_on_error(), self._stop_on_error():
                self._web.open(self, self._lives.life.store)

    @classmethod
    def start(cls, graph: Graph, options: Options) -> Run:
        """Start a job. Ctrl-C meanwhile stops the run as soon as it can be stopped."""
        print_no_traceback()
        with hold_interrupts() as held:
            run = cls(graph, options, lambda: held.is_pending)
            if held.is_pending:
                run.stop()
            return run

    @contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def _begin_life(self, graph: Graph, standby: Standby | None, grant: Grant | None) -> _Life:
        options = self._options
        if options.reset_sources and self._lives.has_committed:
            # An epoch of an earlier life has them behind it: a reset is done once.
            options = replace(options, reset_sources=())
        return _Life(
            graph,
            options,
            standby,
            grant,
            on_end=lambda: None if self._lives.is_repeated else self._web.close(),
        )

    @property
    def _life(self) -> _Life:
        life = self._lives.life
        if life is None:
            raise EpochError(
                f"the run of job {self.name!r} was stopped before it led\n  next: start it again"
            )
        return life

    @property
    def _engine(self) -> Engine:
        return self._life.engine

    @property
    def leader(self) -> Member | None:
        """The driver that leads the group of `ha`: this one, another one, or None if unknown."""
        return self._lives.leader()

    @property
    def restarts(self) -> int:
        """The number of times that this run has begun again after a failure."""
        return self._lives.restarts

    @property
    def is_waiting(self) -> bool:
        """True while another driver of the group may lead the job: this one waits for the lead."""
        return self._lives.is_waiting

    def restart_history(self) -> list[Restart]:
        """Return the last restarts of this run, oldest first: time, cause and pause of each."""
        return list(self._lives.restart_history)

    @property
    def failovers(self) -> int:
        """The number of times that this process has continued the job of another one."""
        return self._lives.failovers

    def group(self) -> Group | None:
        """Return the drivers of the group of `ha`: who leads, who waits.

        None without `ha`, and after the end of the run.
        """
        return self._lives.group()

    def resign(self, to: str | None = None) -> Member:
        """Finish the epoch, pass the lead to a standby and wait as one; return the new leader.

        `to` is the host or the identity of a standby; without it a hot one is preferred.
        EpochError if no standby of the group could continue the job.
        """
        return self._lives.resign(to)

    @property
    def error(self) -> BaseException | None:
        """The error that ended the run; None before that, and if it ended well."""
        if self._lives.is_repeated:
            return self._lives.error
        return self._engine.turn.error

    @property
    def status(self) -> Status:
        """The status of the job, the same word in all views of it: see `cairn.report.status`.

        While the run lives: starting, running, idle, behind, paused or failing; between two lives
        standby or restarting. Then it has failed, stopped, finished or is superseded.
        """
        return self._lives.status

    @property
    def is_active(self) -> bool:
        """True until the run has ended."""
        return self._lives.ended_as is None

    @property
    def url(self) -> str | None:
        """The address that the run is served at; None without `serve`."""
        return self._web.url

    @property
    def flight_url(self) -> str | None:
        """The address that whole states are served at, by Arrow Flight."""
        return self._web.flight_url

    @property
    def paused(self) -> str | None:
        """Why no epoch begins, while a sink cannot publish; the job goes on when it can."""
        paused = self._engine.coordinator.paused
        return None if paused is None else str(paused)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended, and raise its error. False after `timeout` seconds."""
        return self._lives.wait(timeout)

    def process_all_available(self) -> None:
        """Wait until everything the sources hold now is in committed epochs; raise an error.

        By then, timers that the watermark has reached have fired, and records in loops have been
        processed until the loops send back nothing more.
        """
        self._engine.process_all_available()

    def stop(self, savepoint: str | None = None) -> None:
        """End the run after the epoch under way. Nothing is lost: the next start goes on.

        With `savepoint`, the state as of the last epoch is written there, once the run has ended.
        """
        self.check_stop(savepoint)
        self._lives.stop()
        if savepoint is None:
            return
        if not self._engine.coordinator.is_published:
            raise CommitError(
                f"no savepoint: a sink of job {self.name!r} has not taken the newest epoch, and a "
                "job that starts from the savepoint would not publish it\n"
                "  next: start the job on this checkpoint again, then stop it with a savepoint"
            )
        self.savepoint(savepoint)

    def check_stop(self, savepoint: str | None = None) -> None:
        """Raise the error that `stop` would raise, before anything is stopped."""
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
        newest = self._engine.coordinator.committed
        if newest is None:
            raise EpochError(
                f"job {self.name!r} has no committed epoch yet\n"
                "  next: wait for the first one, for example with run.process_all_available()"
            )
        self._engine.coordinator.note_published()
        written = write_savepoint(
            self._engine.store, newest.number, path, spark_store=self._life.spark_place.kept
        )
        logger.info(
            "savepoint of epoch %d written to %s", newest.number, path, extra={"job": self.name}
        )
        return written

    @property
    def parallelism(self) -> int:
        """Subtasks of each operator, in the newest epoch of this run or in its first to come."""
        return self._engine.coordinator.parallelism

    def rescale(self, parallelism: int) -> None:
        """Run with this many subtasks from the next epoch on. No state is rewritten."""
        self._check_running()
        self._engine.changes.rescale(parallelism)

    @property
    def scaling(self) -> ScalingReport:
        """The last decision of autoscaling, the changes of parallelism so far, and the backlog."""
        life = self._lives.life
        if life is None:
            return ScalingReport(mode=self._options.autoscale)
        return life.engine.scaling.report()

    def rebalance(self) -> Balance:
        """Cut the ranges of key groups by their load, from the next epoch on.

        Subtasks then carry equal load instead of equally many key groups. Returns how the busiest
        subtask compares with the mean before and after, and the key group that limits it. The
        ranges stay if a change would gain little. No state is rewritten.
        """
        self._check_running()
        return self._engine.changes.rebalance()

    def upgrade(self, uid: str, function: Function, *, allow_dropped_state: bool = False) -> None:
        """Run this function in place of an operator's from the next epoch on, on its state.

        Raises an error if the present state cannot be converted to the one it declares.
        """
        self._check_running()
        self._engine.changes.upgrade(uid, function, allow_dropped_state=allow_dropped_state)

    def _check_running(self) -> None:
        if self._engine.ended.is_set() or self._engine.turn.is_stopping:
            raise EpochError(f"the run of job {self.name!r} has ended\n  next: start it again")

    def query(self, operator: str, state: str, key: Any) -> Answer:
        """Return the state of a key as of the last committed epoch.

        The key is a tuple if there are several key columns; for state of a subtask it is the
        number of the subtask.
        """
        return self._life.live.query(operator, state, key)

    def query_many(self, operator: str, state: str, keys: Iterable[Any]) -> Answers:
        """Return the state of many keys, all of it as of one committed epoch."""
        return self._life.live.query_many(operator, state, keys)

    def epochs(self) -> list[EpochReport]:
        """Return the retained epochs on the current lineage, newest first."""
        return [report_of(epoch) for epoch in Log(self._engine.store).lineage()]

    def metrics(self) -> EpochReport | None:
        """Return the report of the newest committed epoch of this run; None before the first.

        It has rows, sizes and times; `.operators[uid]` has those of an operator, with its rows by
        subtask and key group, its hot keys, and the metrics of its function (`user`, over all
        epochs so far). docs/metrics.md has every name.
        """
        return self._engine.history.newest()

    def history(self) -> list[EpochReport]:
        """Return the last thousand epochs of this run, oldest first.

        These are more than `epochs()` returns, which has the retained ones. Rows by subtask and
        key group, hot keys and metrics of functions are left out: `metrics()` has those of the
        newest.
        """
        return self._engine.history.epochs()

    def slots(self) -> list[SlotInfo]:
        """Return where each subtask of the newest epoch ran, and the log file of its slot.

        Functions print into that file, on the host of the executor. Empty before the first epoch
        of this run, and in a job without operators whose sinks drop all rows.
        """
        return self._engine.driver.slots

    def plot(self) -> Plot:
        """Return a timeline of the last epochs with the parts of their time, for a notebook."""
        return timeline(self._facts())

    def _facts(self) -> RunFacts:
        epochs = map(report_of, Log(self._engine.store).lineage())
        return run_facts(
            self, self._engine.store.url, epochs, self._engine.coordinator.last_commit_ms
        )

    def _repr_html_(self) -> str:
        return run_html(self._facts())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        life = self._lives.life
        if life is not None and self._lives.ended_as is None:
            if kind is not None and issubclass(kind, KeyboardInterrupt):
                progress.say("stopping after the current epoch; Ctrl-C again stops at once")
            with life.engine.count_waiting():
                self.stop()
        if kind is None:
            self._lives.raise_error(again=False)

    def __repr__(self) -> str:
        life = self._lives.life
        newest = None if life is None else life.engine.coordinator.newest
        at = "no epoch yet" if newest is None else f"epoch {newest.number}"
        return f"<run of {self.name}: {self.status}, {at}>"


class _Life:
    """The job, led by this process: from a takeover to its end, with the ways to ask it.

    One that fails to begin leaves no sink open, and notes its failure in the checkpoint.
    """

    def __init__(
        self,
        graph: Graph,
        options: Options,
        standby: Standby | None,
        grant: Grant | None,
        on_end: Callable[[], None],
    ) -> None:
        from cairn.driver.spark_driver import SparkDriver, trigger_ms

        spark = graph.sources[0].dataframe.sparkSession
        prepared = None if standby is None else standby.prepared
        started = start(graph, options, prepared=prepared, grant=grant)
        coordinator = started.coordinator
        with (
            closed_on_error(sink.sink for sink in graph.sinks),
            note_failed_start(coordinator, started.failures),
        ):
            if standby is not None and coordinator.spec == standby.prepared.spec:
                driver = standby.driver
                ranges = coordinator.parallelism, coordinator.subtasks.starts
                if (driver.parallelism, driver.starts) != ranges:
                    driver.deploy(coordinator.spec, *ranges)
            else:
                driver = SparkDriver(
                    graph,
                    coordinator.spec,
                    spark,
                    parallelism=coordinator.parallelism,
                    run_id=coordinator.run_id,
                    starts=coordinator.subtasks.starts,
                )
                driver.start_slots(coordinator.subtasks.slots)
        self.store = started.store
        self.spark_place = started.spark_place
        self._on_end = on_end
        self._doors = Doors(lambda: driver.doors, driver.door.key)
        self.live = LiveState(coordinator, graph.group_count, self._doors.ask, job=graph.name)
        self.engine = Engine(
            graph,
            options,
            started,
            driver,
            trigger_ms=trigger_ms(spark, options.trigger),
            on_end=self._close,
        )
        self.engine.begin()

    def _close(self) -> None:
        """Close the ways to ask this life: none of them answers after its end."""
        try:
            self._on_end()
        finally:
            self._doors.close()
            self.live.close()
