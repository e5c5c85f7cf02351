"""Start a job: check the program, take over, and bring Spark to the newest epoch.

    check      compare the program with the newest epoch, or the savepoint
    take over  fence all earlier drivers
    settle     bring Spark's folder to the newest epoch, and publish that epoch again

Always true here:
- a program that does not fit is refused before it fences the running one;
- a program continues only from an epoch that it was checked against;
- a start that fails leaves no sink open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import msgspec

from cairn.crash import crash_point
from cairn.driver import progress
from cairn.driver.coordinator.epoch import Coordinator, clock_ms
from cairn.driver.coordinator.leadership.base import Grant
from cairn.driver.coordinator.resume import check_resume, check_sources
from cairn.driver.coordinator.rewind import Position, give_up, settle
from cairn.driver.executor_check import check_executors
from cairn.driver.memory_budget import Budget, find_budget
from cairn.driver.options import Options, check_options, parallelism_range
from cairn.driver.spark_config import is_cluster
from cairn.driver.spark_place import SparkPlace, choose_place
from cairn.errors import CommitConflictError, PlanError
from cairn.ids import new_id
from cairn.logs import logger
from cairn.plan.deploy import job_spec
from cairn.plan.explain import explain_graph
from cairn.plan.graph import Graph
from cairn.protocol.spec import JobSpec
from cairn.sinks.base import Sink, SinkContext, closed_on_error, refuse_if_away
from cairn.snapshots.load import load_savepoint, open_job
from cairn.snapshots.savepoint import Savepoint, open_savepoint
from cairn.storage.failures import Failures
from cairn.storage.log import check_job
from cairn.storage.manifest import Epoch, JobInfo
from cairn.storage.notes import write_ending, write_graph
from cairn.storage.probe import put_probe
from cairn.storage.source_logs import for_setting
from cairn.storage.spark_log import COMPACT_SETTING, lay_out_from, spark_folder
from cairn.storage.store import HADOOP_JVM_MB, Store, is_hadoop, open_store
from cairn.types.durations import Duration, duration_ms


class Prepared(NamedTuple):
    """A program before its takeover: what can be made while another driver leads."""

    store: Store
    spark_place: SparkPlace
    savepoint: Savepoint | None
    job: JobInfo
    spec: JobSpec
    parallelism: int
    run_id: str
    """The slots of this id are used by the run that follows."""


class Started(NamedTuple):
    store: Store
    spark_place: SparkPlace
    coordinator: Coordinator
    position: Position
    """The position from which Spark continues."""
    failures: Failures


def prepare(graph: Graph, options: Options) -> Prepared:
    """Check the options, the store and the executors, and make the job's spec.

    Nobody is fenced. A refusal leaves nothing in the checkpoint.
    """
    spark = graph.sources[0].dataframe.sparkSession
    parallelism = check_options(graph, options, spark)
    # Spark keeps the logs of as many batches as we keep epochs, so a job can return to each.
    retained = max(100, 2 * options.retained_epochs * options.checkpoint_every)
    spark.conf.set("spark.sql.streaming.minBatchesToRetain", retained)
    store = _open_store(options.checkpoint)
    spark_store = _open_store(options.spark_checkpoint) if options.spark_checkpoint else None
    savepoint = None if options.savepoint is None else open_savepoint(options.savepoint)
    run_id = new_id()
    with _plan_error_on_io(store.url), put_probe(store, run_id) as probe:
        if is_cluster(spark) and graph.needs_slots:
            check_executors(spark, store.url, probe, run_id)
    with _plan_error_on_io(store.url):
        job = open_job(store, graph.name, graph.group_count, savepoint)
    conf = dict(spark.sparkContext.getConf().getAll())
    jvm_mb = HADOOP_JVM_MB if is_hadoop(store.url) else 0
    budget = find_budget(options.slot_memory_mb, conf, parallelism=parallelism, jvm_mb=jvm_mb)
    if budget is not None:
        logger.info("%s", budget.text, extra={"job": graph.name})
    spec = _make_spec(graph, options, job, store.url, budget)
    place = choose_place(store, spark_store, run_id)
    return Prepared(store, place, savepoint, job, spec, parallelism, run_id)


def check_prepared(epoch: Epoch, graph: Graph, options: Options, coordinator: Coordinator) -> None:
    """Raise the error with which an epoch would refuse the program; write nothing.

    Sinks are not opened, so their output is checked by the start alone.
    """
    _check_state(epoch, graph, options, coordinator)


def start(
    graph: Graph,
    options: Options,
    *,
    prepared: Prepared | None = None,
    grant: Grant | None = None,
) -> Started:
    """Become the leader of the job, at its newest epoch.

    With a `grant` the takeover is on its condition: CommitConflictError if the grant is lost, or
    another driver has appended to the log since.
    """
    opened: list[Sink] = []
    with closed_on_error(opened), ExitStack() as on_error:
        # First: a function that cannot be pickled is found before a sink creates its target.
        prepared = prepared or prepare(graph, options)
        on_error.callback(prepared.spark_place.close)
        started = _start(graph, options, prepared, grant, opened)
        on_error.pop_all()
        return started


def _start(
    graph: Graph, options: Options, prepared: Prepared, grant: Grant | None, opened: list[Sink]
) -> Started:
    store, place, savepoint = prepared.store, prepared.spark_place, prepared.savepoint
    _open_sinks(graph, prepared.job, store.url, opened)
    coordinator = make_coordinator(graph, options, prepared)
    _take_over(graph, options, coordinator, prepared.job, grant)
    progress.say(f"job {graph.name!r} is taken over on {store.url}")
    failures = Failures(store, graph.name)
    with note_failed_start(coordinator, failures):
        rewrite: frozenset[str] = frozenset()
        if coordinator.newest is not None:
            # Again: until it was fenced, the previous driver may have committed epochs of another
            # program.
            rewrite = _check(coordinator.newest, graph, options, coordinator)
        elif savepoint is not None:
            rewrite = _load(savepoint, graph, options, coordinator, place)
        coordinator.deploy(coordinator.spec, rewrite=rewrite)
        position = _settle(graph, options, coordinator, place)
        crash_point("driver.rewind.laid")
        coordinator.recover()
    newest = coordinator.newest
    progress.say("no epoch yet" if newest is None else f"going on from epoch {newest.number}")
    _write_graph(store, coordinator.term, graph, options.trigger)
    coordinator.on_failure = failures.note
    return Started(store, place, coordinator, position, failures)


def _open_store(url: str) -> Store:
    with _plan_error_on_io(url):
        return open_store(url)


def _open_sinks(graph: Graph, job: JobInfo, checkpoint: str, opened: list[Sink]) -> None:
    """Open the sinks in the driver, and add each to `opened`."""
    spark = graph.sources[0].dataframe.sparkSession
    for node in graph.sinks:
        opened.append(node.sink)  # First: a sink that fails to open may hold resources.
        schema = graph.input_schema(node)
        context = SinkContext(
            job.job_id, graph.name, node.uid, schema, checkpoint=checkpoint, spark=spark
        )
        with refuse_if_away(node.uid, node.sink):
            node.sink.open(context)


def _make_spec(
    graph: Graph, options: Options, job: JobInfo, checkpoint: str, budget: Budget | None
) -> JobSpec:
    return job_spec(
        graph,
        job_id=job.job_id,
        checkpoint=checkpoint,
        backend=options.backend,
        backend_memory_bytes=options.backend_memory_mb << 20,
        slot_memory_bytes=0 if budget is None else budget.slot_mb << 20,
        on_error=options.on_error,
    )


def make_coordinator(graph: Graph, options: Options, prepared: Prepared) -> Coordinator:
    """Return the coordinator of a program that has not taken over."""
    return Coordinator(
        prepared.spec,
        prepared.store,
        {sink.uid: sink.sink for sink in graph.sinks},
        parallelism=prepared.parallelism,
        parallelism_range=(
            None if options.autoscale == "off" else parallelism_range(options, graph.group_count)
        ),
        retained_epochs=options.retained_epochs,
        retained_s=_seconds(options.retained_for, "retained_for"),
        spark_store=prepared.spark_place.kept,
        run_id=prepared.run_id,
        origins=graph.watermarks,
        guarantee=options.guarantee,
        checkpoint_every=options.checkpoint_every,
        commit_timeout_s=_seconds(options.commit_timeout, "commit_timeout"),
        allow_dropped_output=options.allow_dropped_output,
    )


def _seconds(duration: Duration | None, name: str) -> float | None:
    return None if duration is None else duration_ms(duration, name) / 1000


def _take_over(
    graph: Graph,
    options: Options,
    coordinator: Coordinator,
    job: JobInfo,
    grant: Grant | None,
) -> None:
    """Become the leader, unless the program does not fit the newest epoch.

    RestoreError if the checkpoint was removed meanwhile.
    """
    newest = coordinator.log.newest_epoch()
    if newest is not None:
        _check(newest, graph, options, coordinator)
    with _plan_error_on_io(coordinator.store.url):
        if grant is None:
            coordinator.take_over()
        else:
            coordinator.take_over(
                only_if_last=grant.only_if_last, is_held=lambda: not grant.lost.is_set()
            )
            grant.confirm(coordinator.term)
    check_job(coordinator.store, job)


@contextmanager
def note_failed_start(coordinator: Coordinator, failures: Failures) -> Iterator[None]:
    """Record a start that fails after the takeover.

    This driver leads the job, and the job does not run: the checkpoint must show why.
    """
    try:
        yield
    except Exception as error:
        newest = coordinator.newest
        failures.note_end(error, 0 if newest is None else newest.number + 1)
        if not isinstance(error, CommitConflictError):
            write_ending(coordinator.store, coordinator.term, "failed", error)
        raise


@contextmanager
def _plan_error_on_io(url: str) -> Iterator[None]:
    """Turn errors of the first writes into a PlanError."""
    try:
        yield
    except OSError as error:
        raise PlanError(
            f"checkpoint {url} cannot be used: {error}\n"
            "  next: pass a folder that this program may write to, or correct its permissions",
            checkpoint=url,
        ) from error


def _write_graph(store: Store, term: int, graph: Graph, trigger: str) -> None:
    try:
        write_graph(store, term, msgspec.structs.replace(explain_graph(graph), trigger=trigger))
    except Exception:
        # It is for people who look later; the job itself is fine.
        logger.warning("the graph of the job could not be written", exc_info=True)


def _settle(
    graph: Graph, options: Options, coordinator: Coordinator, place: SparkPlace
) -> Position:
    """Bring Spark's folder to the newest epoch; return the position to continue from."""
    newest, term = coordinator.newest, coordinator.term
    sources, reset, checkpoint = graph.source_names, options.reset_sources, coordinator.store
    interval = compact_interval(graph)
    if options.guarantee == "at-most-once":
        return give_up(
            newest,
            term,
            store=place.kept,
            target=place.store,
            checkpoint=checkpoint,
            sources=sources,
            reset_sources=reset,
            since=coordinator.log.last_restore() or 0,
            compact_interval=interval,
        )
    return settle(
        newest,
        term,
        store=place.kept,
        target=place.store,
        checkpoint=checkpoint,
        sources=sources,
        reset_sources=reset,
        compact_interval=interval,
    )


def compact_interval(graph: Graph) -> int:
    """Return the interval at which Spark's file sources compact their lists in this session."""
    return int(graph.sources[0].dataframe.sparkSession.conf.get(COMPACT_SETTING))


def _check(
    epoch: Epoch, graph: Graph, options: Options, coordinator: Coordinator
) -> frozenset[str]:
    """Refuse a program that cannot continue from an epoch; return the uids to rewrite."""
    rewrite = _check_state(epoch, graph, options, coordinator)
    coordinator.check_output(epoch)
    return rewrite


def _check_state(
    epoch: Epoch, graph: Graph, options: Options, coordinator: Coordinator
) -> frozenset[str]:
    url = coordinator.store.url
    check_sources(
        epoch,
        graph.source_names,
        reset_sources=options.reset_sources,
        job_name=graph.name,
        url=url,
        allow_dropped_state=options.allow_dropped_state,
    )
    return check_resume(
        epoch,
        coordinator.scoped_states,
        job_name=graph.name,
        url=url,
        allow_dropped_state=options.allow_dropped_state,
    )


def _load(
    savepoint: Savepoint,
    graph: Graph,
    options: Options,
    coordinator: Coordinator,
    place: SparkPlace,
) -> frozenset[str]:
    """Make a savepoint the first epoch of an empty checkpoint; return the uids to rewrite."""
    folder = f"{spark_folder(coordinator.term)}-savepoint"
    loaded = load_savepoint(
        savepoint,
        coordinator.store,
        term=coordinator.term,
        number=coordinator.term + 1,
        parallelism=coordinator.parallelism,
        spark_folder=folder,
        wall_ms=clock_ms(),
    )
    rewrite = _check(loaded, graph, options, coordinator)
    files = for_setting(savepoint.source_files(), loaded.spark, compact_interval(graph))
    lay_out_from(loaded.spark, files, folder, target=place.store)
    coordinator.adopt(loaded)
    return rewrite
