"""Spark's side of the driver: the streaming query, and an epoch as one Spark action.

Always true here:
- an epoch is one action, whose result is the acknowledgements; in a job that needs no slots the
  driver acknowledges when the action has ended;
- what fails in a subtask arrives here as the CairnError it was raised as;
- one action at a time is planned and run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pyspark.accumulators import AccumulatorParam
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from cairn.driver.coordinator.batch_limit import BATCH_BYTES_MAX, BatchLimit
from cairn.driver.coordinator.partials import PartialChoice
from cairn.driver.coordinator.quiet_collector import pause_collector
from cairn.driver.coordinator.rounds import Outcome
from cairn.driver.departures import read_ahead
from cairn.driver.placement import Placement
from cairn.driver.rehearsal import rehearse_plan, rehearse_rows
from cairn.driver.spark_config import BATCH_BYTES, is_cluster, set_epoch_config
from cairn.driver.spark_failure import as_cairn_error
from cairn.driver.spark_log import QUERY_PREFIX, TASK_PROPERTY, leave_out_failures
from cairn.driver.spark_slots import SparkSlots
from cairn.driver.spark_tasks import SparkTasks
from cairn.errors import PlanError
from cairn.key_groups import Starts
from cairn.logs import logger
from cairn.plan.dataframe import Planner
from cairn.plan.deploy import incoming, pickle_function
from cairn.plan.frames import (
    calls_python,
    find_file_format,
    lay_pin,
    no_input,
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
from cairn.protocol.messages import (
    Ack,
    Begin,
    Report,
    Slice,
    ack_decoder,
    begin_encoder,
    report_decoder,
)
from cairn.protocol.spec import JobSpec
from cairn.worker.forward import BEGIN_PROPERTY, Forward

DESCRIPTION = "spark.job.description"


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
        self._acting = threading.Lock()
        """One action at a time is planned and run: an epoch waits for a standby's last message."""
        self._is_cluster = is_cluster(spark)
        self.placement = Placement(spark, is_pinned=self._is_cluster and graph.needs_slots)
        self.slots = SparkSlots(spark, graph.name, run_id, lambda: self.planner.pin)
        self.deploy(spec, parallelism, starts)
        self._session: SparkSession | None = None
        """The one that epochs are planned in, with settings of its own."""
        self._no_input: DataFrame | None = None
        self._in_stream = find_in_stream(graph)
        self._sliced: SlicedRows | None = None
        """The rows of the batch at hand, if they are read in slices."""

    def deploy(self, spec: JobSpec, parallelism: int, starts: Starts = ()) -> None:
        """Plan the epochs to come: with these functions, subtasks and ranges of key groups."""
        self.slots.wait()
        self._spec = spec
        for uid, function in self._selects.functions().items():
            spec = spec.with_function(uid, pickle_function(uid, function))
        spec_id, pickled = replace(spec, door=self.slots.door).pickle()
        is_pinned = self.placement.is_pinned
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
        pin = self.placement.take_pin(self._planner, parallelism)
        planner = Planner(self.graph, parallelism, forwards, pin, starts)
        if self._planner is None:
            planner.transforms.read = find_read(planner, self._new_session())
        else:
            planner.transforms.read = self._planner.transforms.read
        self._planner = planner
        self.parallelism = parallelism
        self.starts = starts
        self.placement.executors = {}

    def start_slots(self, slots: Sequence[int]) -> None:
        """Start the first slots in the background, and lay the first pin table out."""
        if not self.graph.needs_slots:
            return
        pin = self.planner.pin
        places = plan_places(self.spark, self.parallelism) if pin is None else pin
        self.slots.start(places, slots)

    def prepare(self, parallelism: int, slots: Sequence[int]) -> None:
        """Ahead of `deploy`, while epochs run: start the slots, on the places of a pin table."""
        if not self.graph.needs_slots:
            return
        if not self.placement.is_pinned:
            self.slots.start_here(slots)
            return
        pin = lay_pin(self.spark, parallelism)
        self.slots.start_at(pin, slots)
        self.placement.keep(parallelism, pin)

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
        self.placement.watch_departures(lambda: self.move(message()), self.graph.name)

    def move(self, begin: Begin | None) -> None:
        """Lay the pin table out again, and have the slots at new places follow an epoch.

        On any thread, while an epoch runs at the old places.
        """
        planner, places = self.planner, dict(self.placement.executors)
        if planner.pin is None or self.slots.are_starting:
            return  # The first epoch will lay it out.
        pin = self.placement.lay_next(planner)
        if begin is None or begin.parallelism != planner.parallelism:
            return
        self.spark.sparkContext.setJobDescription(f"cairn: {self.graph.name}, read ahead")
        try:
            moved = read_ahead(pin, planner.forwards, begin, places)
        finally:
            self.slots.roster.expect_strays()
        logger.info(
            "%d subtasks read their state ahead, as of epoch %d",
            moved,
            begin.epoch,
            extra={"job": self.graph.name},
        )

    def rehearse(self, begin: Begin, stop: threading.Event) -> None:
        """Plan and run epochs without rows, whose tasks get this message; `stop` ends it early.

        See `cairn.driver.rehearsal`.
        """

        def run_batch(rows: DataFrame) -> None:
            with self._acting:
                if stop.is_set():
                    return
                with self._message_to_tasks(begin, "rehearsal"):
                    self.slots.wait()
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
                    self.slots.wait()
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
            self.placement.use_next(self.planner)
        self._limit_batches(session, begin.execution.attempt)
        failure: Exception | None = None
        try:
            if begin.execution.round == 0 and self._selects.plan():
                self.deploy(self._spec, self.parallelism, self.starts)
            self.planner.transforms.grouped = self._partials.choose(begin.epoch)
            with self._message_to_tasks(begin, f"epoch {begin.epoch}{attempt}"):
                self.slots.wait()
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
        self.slots.note_doors(reports, self.parallelism)
        self.placement.watch(self.planner, reports)
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
            self.slots.roster.update(reports, decoded, begin.token())
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

    @property
    def local_cores(self) -> int | None:
        """The cores that all slots share, if Spark runs on one machine only; None on a cluster."""
        return None if self._is_cluster else int(self.spark.sparkContext.defaultParallelism)

    def say_goodbye(self) -> None:
        """End the slots on every executor; those that are not reached end by themselves."""
        self.placement.stop_watching()
        self.slots.end_all(is_cluster=self._is_cluster)
        self.placement.release(self.planner)


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
