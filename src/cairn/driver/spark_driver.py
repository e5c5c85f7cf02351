"""Spark's side of the driver: the streaming query, and an epoch as one Spark action.

Always true here:
- an epoch is one action, whose result is the acknowledgements; in a job that needs no slots the
  driver acknowledges when the action has ended;
- what fails in a subtask arrives here as the CairnError it was raised as;
- with several executors, subtasks are pinned to them; after executors came or went, the pin table
  is laid out again when subtasks are crowded.
"""

from __future__ import annotations

import collections
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import pyarrow as pa
from pyspark.accumulators import AccumulatorParam
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from cairn.driver.allocation import watch_allocation
from cairn.driver.coordinator.batch_limit import BATCH_BYTES_MAX, BatchLimit
from cairn.driver.coordinator.partials import PartialChoice
from cairn.driver.coordinator.quiet_collector import pause_collector
from cairn.driver.coordinator.rounds import Outcome
from cairn.driver.departures import Departures, find_departing, read_ahead
from cairn.driver.rehearsal import rehearse_plan, rehearse_rows
from cairn.driver.roster import Roster, SlotInfo
from cairn.driver.spark_config import BATCH_BYTES, is_cluster, set_epoch_config
from cairn.driver.spark_failure import as_cairn_error
from cairn.driver.spark_log import QUERY_PREFIX, TASK_PROPERTY, leave_out_failures
from cairn.driver.spark_tasks import SparkTasks
from cairn.errors import PlanError
from cairn.key_groups import Starts
from cairn.logs import logger
from cairn.plan.dataframe import Planner
from cairn.plan.deploy import incoming, pickle_function
from cairn.plan.frames import (
    calls_python,
    find_file_format,
    lay_again,
    lay_pin,
    no_input,
    plan_pin,
    plan_places,
    streaming_input,
)
from cairn.plan.graph import Graph, TransformNode
from cairn.plan.in_stream import count_rows_of, find_in_stream
from cairn.plan.measures import Observed
from cairn.plan.parts import Batch, count_rows, open_batch
from cairn.plan.pruning import find_read
from cairn.plan.selects import Selects
from cairn.plan.slices import SlicedRows
from cairn.plan.sql import Feed
from cairn.protocol.lookups import DoorSpec, this_host
from cairn.protocol.messages import (
    Ack,
    Begin,
    Report,
    Slice,
    Token,
    ack_decoder,
    begin_encoder,
    report_decoder,
)
from cairn.protocol.spec import JobSpec
from cairn.slot.process import end_slots, start_slot
from cairn.worker.forward import BEGIN_PROPERTY, Forward

DESCRIPTION = "spark.job.description"
START_PATIENCE_S = 10.0
MOVES_CHAINED = 16
"""A pin table that is laid out again reads the one before. The last of this number reads none."""


class _Reports(AccumulatorParam[list[bytes]]):  # type: ignore[misc]
    def zero(self, value: list[bytes]) -> list[bytes]:
        return []

    def addInPlace(self, value1: list[bytes], value2: list[bytes]) -> list[bytes]:
        value1 += value2
        return value1


class SparkDriver:
    """Runs the epochs of one job on one Spark session."""

    def __init__(
        self,
        graph: Graph,
        spec: JobSpec,
        spark: SparkSession,
        *,
        parallelism: int,
        run_id: str,
        starts: Starts = (),
    ) -> None:
        self.graph = graph
        self.spark = spark
        self.run_id = run_id
        leave_out_failures(spark)
        self._reports = spark.sparkContext.accumulator([], _Reports())
        self._planner: Planner | None = None
        self._partials = PartialChoice()
        self._selects = Selects(graph.operators)
        self._batch_limit = _batch_limit(graph)
        self._batch_bytes = BATCH_BYTES_MAX
        self._tasks = SparkTasks(spark.sparkContext)
        self._last_stage = -1
        """The last stage of earlier batches."""
        self._prepared: dict[int, DataFrame] = {}
        """Pin tables of a parallelism to come."""
        self._started: Future[None] | None = None
        """The first slots and the first pin table, while they are being started and laid out."""
        self.door = DoorSpec(
            secrets.token_bytes(32), this_host(), spark.conf.get("spark.driver.host", "") or ""
        )
        self.doors: dict[int, str] = {}
        """Per subtask, where its slot is asked for state: as of the last epoch that ran."""
        self._roster = Roster(self.door.key)
        self._ending = threading.Lock()
        self._acting = threading.Lock()
        """One action at a time is planned and run: an epoch waits for a standby's last message."""
        self._is_cluster = is_cluster(spark)
        self.deploy(spec, parallelism, starts)
        self._session: SparkSession | None = None
        """The one that epochs are planned in, with settings of its own."""
        self._no_input: DataFrame | None = None
        self._in_stream = find_in_stream(graph)
        self._sliced: SlicedRows | None = None
        """The rows of the batch at hand, if they are read in slices."""
        self._departures: Departures | None = None
        self._next_pin: tuple[Planner, DataFrame] | None = None
        """A pin table laid out for a planner: the next epoch is the first with it."""
        self._moves = 0
        self._crowded_epochs = 0
        self.repinned = 0
        is_pinned = self._is_cluster and graph.needs_slots
        self._allocation = watch_allocation(spark) if is_pinned else None

    def deploy(self, spec: JobSpec, parallelism: int, starts: Starts = ()) -> None:
        """Plan the epochs to come: with these functions, subtasks and ranges of key groups."""
        self._wait_for_slots()
        self._spec = spec
        for uid, function in self._selects.functions().items():
            spec = spec.with_function(uid, pickle_function(uid, function))
        spec_id, pickled = replace(spec, door=self.door).pickle()
        is_pinned = self._is_cluster and self.graph.needs_slots
        feeds = [
            Feed(self.graph, level, parallelism, is_pinned, starts) for level in self.graph.levels
        ]
        checked = [feed.checked_starts for feed in feeds]
        forwards = [
            Forward(
                self.run_id,
                level.index,
                tuple(edge.index for edge in self.graph.levels[level.index].edges),
                level.incoming,
                level.outgoing,
                None if owned is None else spec.group_count,
                spec_id,
                pickled,
                self._reports,
                starts=owned or (),
            )
            for level, owned in zip(spec.levels, checked, strict=True)
        ]
        pin = self._take_pin(parallelism) if is_pinned else None
        planner = Planner(self.graph, parallelism, forwards, pin, starts)
        if self._planner is None:
            planner.transforms.read = find_read(planner, self._new_session())
        else:
            planner.transforms.read = self._planner.transforms.read
        self._planner = planner
        self.parallelism = parallelism
        self.starts = starts
        self.placement: dict[int, str] = {}

    def _take_pin(self, parallelism: int) -> DataFrame:
        """Return the pin table for a parallelism: laid out already, or by the first action."""
        pin = self._prepared.pop(parallelism, None)
        is_first = self._planner is None
        if self._planner is not None and self._planner.pin is not None:
            self._prepared.setdefault(self._planner.parallelism, self._planner.pin)
            pin = pin or self._prepared.pop(parallelism, None)
        for unused in self._prepared.values():
            unused.unpersist()
        self._prepared.clear()
        return pin or (plan_pin if is_first else lay_pin)(self.spark, parallelism)

    def start_slots(self, slots: Sequence[int]) -> None:
        """Start the first slots in the background, and lay the first pin table out.

        Meanwhile Spark starts the query, and the first epoch finds its workers and slots there.
        """
        if not self.graph.needs_slots:
            return
        places = self.planner.pin
        if places is None:
            places = plan_places(self.spark, self.parallelism)
        run_id, started = self.run_id, Future[None]()
        self._started = started

        def start(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import cairn.worker.forward  # noqa: F401  # The first epoch's tasks will need it.

            for batch in batches:
                for subtask in batch["pin"].to_pylist():
                    # A forwarder that finds no slot starts one, and says why it cannot.
                    with suppress(Exception):
                        start_slot(run_id, slots[subtask])
                yield batch

        def run() -> None:
            try:
                self.spark.sparkContext.setJobDescription(f"cairn: {self.graph.name}, subtasks")
                places.mapInArrow(start, "pin int").collect()
                started.set_result(None)
            except BaseException as error:
                started.set_exception(error)

        threading.Thread(target=run, daemon=True, name=f"cairn-{self.graph.name}-slots").start()

    def _wait_for_slots(self) -> None:
        """Wait for the first slots and the first pin table. Raises why they failed, once."""
        if self._started is not None:
            try:
                self._started.result()
            finally:
                # If it failed, the next attempt starts slots and lays the table out itself.
                self._started = None

    def prepare(self, parallelism: int, slots: Sequence[int]) -> None:
        """Ahead of `deploy`, while epochs run: start the slots, on the places of a pin table."""
        if not self.graph.needs_slots:
            return
        run_id = self.run_id
        if not self._is_cluster:
            # One place only, and we are there.
            executor = self.spark._jvm.java.lang.ProcessHandle.current().pid()
            with ThreadPoolExecutor() as pool:
                started = [pool.submit(start_slot, run_id, slot, executor) for slot in slots]
                for each in started:
                    each.result()
            return

        def start(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for subtask in batch["pin"].to_pylist():
                    start_slot(run_id, slots[subtask])
                yield batch

        pin = lay_pin(self.spark, parallelism)
        pin.mapInArrow(start, "pin int").collect()
        self._prepared[parallelism] = pin

    @property
    def planner(self) -> Planner:
        assert self._planner is not None, "deployed when made"
        return self._planner

    def start_query(
        self, folder_url: str, trigger: str, run_batch: Callable[[DataFrame, int], None]
    ) -> StreamingQuery:
        rows = (
            streaming_input(self.graph, self.planner.transforms.read)
            if self._in_stream is None
            else self._in_stream.rows
        )
        writer = (
            rows.writeStream.foreachBatch(run_batch)
            .option("checkpointLocation", folder_url)
            .queryName(f"{QUERY_PREFIX}{self.graph.name}-{self.run_id[:8]}")
        )
        if trigger == "available-now":
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=trigger)
        return writer.start()

    def execute(self, rows: DataFrame | None, begin: Begin) -> Outcome:
        """One round of an attempt: one Spark action. Without `rows` it is one without a batch.

        Rounds without a slice have none either: they run on what the one before sent back.
        """
        with self._acting:
            return self._execute(rows, begin)

    def watch_departures(self, message: Callable[[], Begin | None]) -> None:
        """From now on read state ahead when executors have notice to end.

        `message` has slots follow the newest epoch; None if there is none.
        """
        find = find_departing(self.spark) if self._is_cluster and self.graph.needs_slots else None
        if find is not None:
            self._departures = Departures(find, lambda: self.move(message()), name=self.graph.name)
            self._departures.start()

    def move(self, begin: Begin | None) -> None:
        """Lay the pin table out again, and have the slots at new places follow an epoch.

        On any thread, while an epoch runs at the old places.
        """
        planner, places = self.planner, dict(self.placement)
        if planner.pin is None or self._started is not None:
            return  # The first epoch will lay it out.
        self._moves += 1
        is_long = self._moves % MOVES_CHAINED == 0
        pin = lay_pin(self.spark, self.parallelism) if is_long else lay_again(planner.pin)
        unused, self._next_pin = self._next_pin, (planner, pin)
        if unused is not None:
            unused[1].unpersist()
        if begin is None or begin.parallelism != planner.parallelism:
            return
        self.spark.sparkContext.setJobDescription(f"cairn: {self.graph.name}, read ahead")
        try:
            moved = read_ahead(pin, planner.forwards, begin, places)
        finally:
            self._roster.expect_strays()
        logger.info(
            "%d subtasks read their state ahead, as of epoch %d",
            moved,
            begin.epoch,
            extra={"job": self.graph.name},
        )

    def _use_next_pin(self) -> None:
        """Continue with the pin table that was laid out during the epoch before, if any."""
        given, self._next_pin = self._next_pin, None
        if given is None:
            return
        planner, pin = given
        if planner is self._planner:
            planner.use_pin(pin)
        else:
            pin.unpersist()

    def rehearse(self, begin: Begin, stop: threading.Event) -> None:
        """Plan and run epochs without rows, whose tasks get this message; `stop` ends it early.

        See `cairn.driver.rehearsal`.
        """

        def run_batch(rows: DataFrame) -> None:
            with self._acting:
                if stop.is_set():
                    return
                with self._message_to_tasks(begin, "rehearsal"):
                    self._wait_for_slots()
                    self._act(rows, begin, is_batch=True)

        name = f"{QUERY_PREFIX}{self.graph.name}-{self.run_id[:8]}-rehearsal"
        file_format = None if self._is_cluster else find_file_format(self.graph)
        rehearse_rows(self.spark, name, self.parallelism, file_format, stop)
        rehearse_plan(
            self.spark,
            name,
            [source.dataframe for source in self.graph.sources],
            lambda frames: streaming_input(self.graph, self.planner.transforms.read, frames),
            run_batch,
            stop,
        )

    def follow(self, begin: Begin, is_needed: Callable[[], bool]) -> None:
        """Have the slots of a standby follow an epoch, by the plan of an epoch without rows.

        Nothing is sent if the run leads by the time of its turn.
        """
        if not self.graph.needs_slots:
            return
        with self._acting:
            if not is_needed():
                return
            rows = self._no_rows()
            try:
                with self._message_to_tasks(begin, f"standby at record {begin.epoch - 1}"):
                    self._wait_for_slots()
                    batch = self._open_batch(rows, is_batch=False)
                    self.planner.epoch(batch.rows, batch.parts, observed=False).collect()
            except Exception as error:
                raise as_cairn_error(error, begin.epoch) from None

    @contextmanager
    def _message_to_tasks(self, begin: Begin, description: str) -> Iterator[None]:
        """Run Spark actions whose tasks get this message."""
        context = self.spark.sparkContext
        # The thread may be Spark's, whose query has a description, or the user's.
        described = context.getLocalProperty(DESCRIPTION)
        context.setLocalProperty(BEGIN_PROPERTY, begin_encoder.encode(begin).decode())
        context.setLocalProperty(TASK_PROPERTY, "true")
        context.setJobDescription(f"cairn: {self.graph.name}, {description}")
        try:
            yield
        finally:
            context.setLocalProperty(DESCRIPTION, described)
            context.setLocalProperty(BEGIN_PROPERTY, None)
            context.setLocalProperty(TASK_PROPERTY, None)

    def _execute(self, rows: DataFrame | None, begin: Begin) -> Outcome:
        is_batch = rows is not None and begin.slice is not None
        if rows is None or not is_batch:
            rows = self._no_rows()
        else:
            self._use(rows.sparkSession)
        session = rows.sparkSession
        attempt = f", attempt {begin.execution.attempt + 1}" if begin.execution.attempt else ""
        if begin.execution.round:
            attempt += f", round {begin.execution.round + 1}"
        before = len(self._reports.value)
        if not begin.execution.round:
            self._use_next_pin()
        self._limit_batches(session, begin.execution.attempt)
        failure: Exception | None = None
        try:
            if begin.execution.round == 0 and self._selects.plan():
                self.deploy(self._spec, self.parallelism, self.starts)
            self.planner.transforms.grouped = self._partials.choose(begin.epoch)
            with self._message_to_tasks(begin, f"epoch {begin.epoch}{attempt}"):
                self._wait_for_slots()
                if is_batch and begin.slice is not None and begin.slice.count > 1:
                    rows = self._take_slice(rows, begin.slice)
                acks, observed = self._act(rows, begin, is_batch=is_batch)
        except Exception as error:
            failure = error
        if self._sliced and (failure or (begin.slice and begin.slice.is_last)):
            self._sliced.close()
            self._sliced = None
        if failure is not None:
            raise as_cairn_error(failure, begin.epoch)
        with pause_collector():
            decoded = [report_decoder.decode(r) for r in self._reports.value]
        # A task of an attempt before may have ended only now.
        mine = begin.epoch, begin.execution
        reports = [r for r in decoded[before:] if (r.epoch, r.execution) == mine]
        self._reports.value = []
        self._watch_placement(reports)
        outcome = Outcome(
            acks,
            reports,
            observed.times,
            self._sources_ms(reports) if is_batch else 0,
            observed.rows,
        )
        self._partials.learn(outcome.acks)
        self._batch_limit.learn(report.row_bytes for report in reports)
        reported = {(report.level, report.subtask) for report in reports}
        if all((ack.level, ack.subtask) in reported for ack in outcome.acks):
            # Reports of attempts that failed as a whole count too: their slots are there.
            self._roster.update(reports, decoded, begin.token())
        return outcome

    def _act(self, rows: DataFrame, begin: Begin, *, is_batch: bool) -> tuple[list[Ack], Observed]:
        """Run the Spark action of an attempt."""
        if self._in_stream is not None:
            return self._count_in_stream(rows, begin, is_batch=is_batch)
        batch = self._open_batch(rows, is_batch)
        if self.graph.needs_slots:
            planned = self.planner.epoch(batch.rows, batch.parts, observed=is_batch)
            answers = planned.collect()
            with pause_collector():
                acks = [ack_decoder.decode(row.ack) for row in answers]
            count_rows(batch, self.planner.planned)
            return acks, self.planner.read_observed()
        observed = Observed({}, {})
        if is_batch:
            observed = self.planner.count(batch.rows, batch.parts)
            count_rows(batch, self.planner.planned)
        return _acknowledge(begin), observed

    def _count_in_stream(
        self, rows: DataFrame, begin: Begin, *, is_batch: bool
    ) -> tuple[list[Ack], Observed]:
        """Run the Spark action of an attempt where the query has transformed the rows."""
        assert self._in_stream is not None
        assert self._sliced is None, "only slots that are short of memory divide a batch"
        if not is_batch:
            return _acknowledge(begin), Observed({}, {})
        if self._in_stream.is_current():
            return _acknowledge(begin), self.planner.observe_count(count_rows_of(rows))
        batch = self._in_stream.open_source(self.spark, rows)
        observed = self.planner.count(batch.rows)
        count_rows(batch, self.planner.planned)
        return _acknowledge(begin), observed

    def _take_slice(self, rows: DataFrame, slice: Slice) -> DataFrame:
        """Return the rows of a slice. With the first one the batch is computed."""
        if not slice.index:
            self._sliced = SlicedRows(rows)
        assert self._sliced is not None, "a batch is read from its first slice on"
        return self._sliced.take(slice)

    def _limit_batches(self, session: SparkSession, attempt: int) -> None:
        chosen = self._batch_limit.choose(attempt)
        if chosen != self._batch_bytes:
            session.conf.set(BATCH_BYTES, chosen)
            self._batch_bytes = chosen

    def _open_batch(self, rows: DataFrame, is_batch: bool) -> Batch:
        count = len(self.graph.sources)
        if is_batch and self._sliced is None:
            return open_batch(self.spark, rows, count)
        if is_batch:
            return Batch(rows, None, [])
        return Batch(rows, [rows] * count, [])  # There are none.

    def _sources_ms(self, reports: Sequence[Report]) -> int | None:
        """From the first to the last of the tasks that read the sources to finish."""
        first = next((r.stage for r in reports if r.level == 0), None)
        spread_ms = self._tasks.spread_before_ms(first, self._last_stage)
        self._last_stage = max((r.stage for r in reports if r.stage is not None), default=-1)
        return spread_ms

    def _use(self, session: SparkSession) -> None:
        """Plan epochs in this session: Spark makes one for each query, a copy of the user's."""
        known = self._session
        if known is not None and known._jsparkSession.equals(session._jsparkSession):
            return
        set_epoch_config(session)
        self._session, self._no_input = session, None
        self._batch_bytes = BATCH_BYTES_MAX

    def _no_rows(self) -> DataFrame:
        if self._session is None:
            # No batch has come yet. Not in the user's own: our settings would be theirs.
            self._use(self._new_session())
        assert self._session is not None
        if self._no_input is None:
            self._no_input = no_input(self.graph, self._session, self.planner.transforms.read)
        return self._no_input

    def _new_session(self) -> SparkSession:
        """Return a copy of the user's session, with the settings of epochs."""
        copy = SparkSession(self.spark.sparkContext, self.spark._jsparkSession.cloneSession())
        set_epoch_config(copy)
        return copy

    def _watch_placement(self, reports: Sequence[Report]) -> None:
        """Spread subtasks out again when they crowd on the executors that survived a loss."""
        for report in reports:
            self.placement[report.subtask] = report.executor
        # A new dict: other threads keep reading the old one.
        doors = self.doors | {report.subtask: report.door for report in reports}
        # One that could open no door has none, whatever the slot before it had.
        self.doors = {at: door for at, door in doors.items() if door and at < self.parallelism}
        if not self._is_cluster:
            return
        executors = self._executor_count()
        per_executor = collections.Counter(self.placement.values())
        fair = -(-self.parallelism // max(1, executors))
        crowded = executors > len(per_executor) and max(per_executor.values(), default=0) > fair
        # Twice in a row: an executor may just be late for one epoch.
        self._crowded_epochs = self._crowded_epochs + 1 if crowded else 0
        if self._crowded_epochs >= 2:
            self.planner.repin(self.spark)
            self._crowded_epochs = 0
            self.repinned += 1

    @property
    def local_cores(self) -> int | None:
        """The cores that all slots share, if Spark runs on one machine only; None on a cluster."""
        return None if self._is_cluster else int(self.spark.sparkContext.defaultParallelism)

    def _executor_count(self) -> int:
        # One of them is the driver itself. Those that will end get no subtask.
        status = self.spark.sparkContext._jsc.sc().getExecutorMemoryStatus()
        return int(status.size()) - 1 - (self._departures.count if self._departures else 0)

    @property
    def slots(self) -> list[SlotInfo]:
        """Return where the subtasks of the newest epoch ran, and where they log."""
        return self._roster.slots

    def end_left_behind(self) -> None:
        """End the slots that the newest attempt has not used, beside the epochs to come."""
        if self._roster.has_left_behind:
            # Not waited for: one may be stuck.
            threading.Thread(target=self._end_left_behind, daemon=True, name="cairn-slots").start()

    def _end_left_behind(self) -> None:
        if not self._ending.acquire(blocking=False):
            return  # The thread of an epoch before is still at it; a later one looks again.
        try:
            self._roster.end_left_behind(self._end_slots)
        except Exception:
            job = {"job": self.graph.name}
            logger.warning("slots that are not in use could not be ended", exc_info=True, extra=job)
        finally:
            self._ending.release()

    def give_executors_back(self) -> None:
        """Remove executors that no subtask needs. Called between two epochs."""
        if self._allocation is not None:
            self._allocation.after_epoch(is_crowded=self._crowded_epochs > 0)

    def say_goodbye(self) -> None:
        """End the slots on every executor; those that are not reached end by themselves."""
        if self._departures is not None:
            self._departures.stop(START_PATIENCE_S)
        if self._started is not None:
            with suppress(Exception):
                self._started.result(START_PATIENCE_S)
        if self._is_cluster:
            # Also where no subtask is any more.
            self._roster.end_all()
        self._end_slots()
        self._use_next_pin()
        if self.planner.pin is not None:
            self.planner.pin.unpersist()

    def _end_slots(self, keep: Collection[str] = (), as_of: Token | None = None) -> None:
        """Look for slots of the run on all machines that have subtasks, and end them."""
        run_id = self.run_id
        end_slots(run_id, keep, as_of)
        if self.planner.pin is not None:
            self.planner.pin.foreach(lambda _: end_slots(run_id, keep, as_of) and None)


def _acknowledge(begin: Begin) -> list[Ack]:
    """Return the acknowledgements of slots that would have nothing to do."""
    return [Ack(0, subtask, [], {}) for subtask in range(begin.parallelism)]


def _batch_limit(graph: Graph) -> BatchLimit:
    transforms = [node for node in graph.nodes.values() if isinstance(node, TransformNode)]
    return BatchLimit(
        [type_ for level in graph.levels for type_ in incoming(level).columns.values()],
        has_other_functions=any(node.calls_python for node in transforms)
        or any(calls_python(source.dataframe) for source in graph.sources),
    )


def trigger_ms(spark: SparkSession, trigger: str) -> int:
    """Return the interval of a trigger; PlanError if Spark would refuse it later."""
    if trigger == "available-now":
        return 0
    try:
        made = spark._jvm.org.apache.spark.sql.streaming.Trigger.ProcessingTime(trigger)
        return int(made.intervalMs())
    except Exception as error:
        raise PlanError(
            f"trigger {trigger!r} is not an interval\n"
            "  expected: an interval such as '1 second' or '500 milliseconds', or 'available-now'"
        ) from error
