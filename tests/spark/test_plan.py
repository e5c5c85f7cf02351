"""The plan Spark gets for an epoch, and what it makes of it: a chain of levels, one job."""

from __future__ import annotations

import functools
import re

import pytest

from cairn import Job, KeyedProcess, sinks
from cairn.driver.spark_config import EPOCH_CONFIG
from cairn.driver.spark_driver import _Reports
from cairn.key_groups import key_group, subtask_of
from cairn.plan.dataframe import Planner, lay_pin
from cairn.plan.deploy import job_spec
from cairn.protocol.spec import envelope_schema
from cairn.worker.forward import Forward
from tests.marks import for_soak
from tests.spark.support import epochs, finish


class Echo(KeyedProcess):
    def process(self, row, ctx):
        yield row


ROWS = "k bigint, t timestamp, s string"


def chain(spark, rows, *, event_time=None, transform=False):
    """Three levels; the source feeds the first and, past the second, the third."""
    job = Job("chain", max_parallelism=16)
    source = job.source("rows", rows.stream(spark), event_time=event_time)
    first = source.key_by("k").process(Echo(), schema=ROWS, uid="first")
    first.sink_to(sinks.Noop(), uid="sink")
    if transform:
        first = first.transform(lambda df: df.where("k > 0"))
    second = first.key_by("s").process(Echo(), schema=ROWS, uid="second")
    second.union(source).key_by("k").process(Echo(), schema=ROWS, uid="third")
    return job


def plan_of(spark, job, rows, parallelism=4, batch=None):
    """The executed plan of an epoch, as text; after it the plans of what its branches share."""
    graph = job.graph()
    spec = job_spec(graph, job_id="plan", checkpoint="memory:", backend="heap")
    reports = spark.sparkContext.accumulator([], _Reports())
    forwards = [
        Forward("run", level.index, (), envelope_schema(level.lanes), "", b"", reports)
        for level in spec.levels
    ]
    session = spark.newSession()
    for setting, value in EPOCH_CONFIG.items():
        session.conf.set(setting, value)
    planner = Planner(graph, parallelism, forwards, lay_pin(spark, parallelism))
    try:
        schema = rows.stream(spark).schema
        if batch is None:
            batch = session.read.schema(schema).parquet(str(rows.folder))
        else:
            batch = session.createDataFrame(batch, schema)
        frames = [planner.epoch(batch), *planner._cuts]
        return "\n".join(f._jdf.queryExecution().executedPlan().toString() for f in frames)
    finally:
        planner.pin.unpersist()


@pytest.fixture
def rows(make_input):
    return make_input(ROWS).add((1, None, "a"), (2, None, "b"))


@pytest.mark.parametrize("event_time", [None, "t"])
def test_epoch_is_a_chain_with_one_exchange_per_level_hash_joined_to_the_pin(
    spark, rows, event_time
):
    plan = plan_of(spark, chain(spark, rows, event_time=event_time), rows)
    assert re.findall(r"(\w*Join)\b", plan) == ["ShuffledHashJoin"] * 3, plan
    # The hash table is built on the right: the pin's one row, not the epoch's rows.
    assert len(re.findall(r"ShuffledHashJoin .*RightOuter, BuildRight", plan)) == 3, plan
    assert plan.count("MapInArrow") == 3
    assert len(exchanges(plan)) == 3, plan
    assert all("direct_shuffle_partition_id(subtask#" in line for line in exchanges(plan)), plan
    assert "Union" not in plan
    assert plan.count("Sort [time") == (3 if event_time else 0), plan


def exchanges(plan):
    """Shuffles and broadcasts of an epoch; how the pin was laid out once does not count."""
    return [line for line in plan.splitlines() if "Exchange " in line and "(pin#" not in line]


def test_only_a_transform_makes_a_branch_and_both_branches_read_one_shuffle(spark, rows):
    plan = plan_of(spark, chain(spark, rows, transform=True), rows)
    assert plan.count("Union") == 1
    scans = [line for line in plan.splitlines() if "Scan ExistingRDD" in line]
    assert sum("lane#" in line for line in scans) == 2, plan
    # No operator is planned twice, and none is behind a cache that could be computed again.
    assert plan.count("MapInArrow") == 3, plan
    assert all("pin#" in line for line in plan.splitlines() if "InMemoryTableScan" in line), plan
    assert len(exchanges(plan)) == 4, plan


@pytest.mark.parametrize("transform", [False, True])
def test_rows_of_a_single_subtask_are_one_partition_whatever_size_spark_expects(
    spark, rows, transform
):
    job = chain(spark, rows, transform=transform)
    # Rows of a list are of unknown size to Spark, as those of most sources are.
    plan = plan_of(spark, job, rows, parallelism=1, batch=[(1, None, "a")])
    assert "ENSURE_REQUIREMENTS" not in plan, plan
    assert plan.count("ShuffledHashJoin") == 3, plan


class Route(KeyedProcess):
    """Connected streams and a broadcast in, two ways out."""

    def process_broadcast(self, row, ctx):
        pass

    def on_a(self, row, ctx):
        ctx.output("odd", row)
        return row

    def on_b(self, row, ctx):
        return row


def forked(spark, rows):
    """Two levels: connected streams with a broadcast; then what forks there, side by side."""
    job = Job("forked", max_parallelism=16)
    source = job.source("rows", rows.stream(spark))
    routed = (
        job.connect(a=source.key_by("k"), b=source.key_by("k"))
        .broadcast(source)
        .process(Route(), schema=ROWS, uid="route")
    )
    routed.sink_to(sinks.Noop(), uid="all")
    routed.side("odd", ROWS).key_by("s").process(Echo(), schema=ROWS, uid="odd")
    routed.key_by("s").process(Echo(), schema=ROWS, uid="rest").sink_to(sinks.Noop(), uid="out")
    return job


@pytest.mark.parametrize(
    ("build", "stages"),
    [
        (chain, 4),
        for_soak(functools.partial(chain, transform=True), 5),
        (forked, 3),
    ],
)
def test_epoch_is_one_spark_job_that_says_what_it_is(spark, rows, tmp_path, build, stages):
    rows.add((3, None, "c"))
    job = build(spark, rows)
    run = finish(job, tmp_path / "checkpoint", parallelism=2)
    described = spark_jobs(spark, run)
    numbers = [epoch.number for epoch in epochs(tmp_path / "checkpoint")]
    # A stage for the source, one per level, and one for what a transform branches from.
    assert described == [(f"cairn: {job.name}, epoch {number}", stages) for number in numbers]


class Countdown(KeyedProcess):
    def process(self, row, ctx):
        if row.k:
            yield row.k - 1, row.t, row.s


def test_each_round_of_an_epoch_is_one_spark_job(spark, make_input, tmp_path):
    rows = make_input(ROWS).add((2, None, "a")).add((0, None, "b"))
    job = Job("loop", max_parallelism=16)

    def body(loop):
        counted = loop.key_by("s").process(Countdown(), schema=ROWS, uid="countdown")
        return counted, counted

    job.source("rows", rows.stream(spark)).iterate(
        body, uid="loop", max_rounds_per_epoch=5
    ).sink_to(sinks.Noop(), uid="out")
    run = finish(job, tmp_path / "checkpoint", parallelism=2)
    first, second = (epoch.number for epoch in epochs(tmp_path / "checkpoint"))
    # 2 comes in, 1 and 0 come back; a 0 sends nothing back.
    assert [said for said, _ in spark_jobs(spark, run)] == [
        f"cairn: loop, epoch {first}",
        f"cairn: loop, epoch {first}, round 2",
        f"cairn: loop, epoch {first}, round 3",
        f"cairn: loop, epoch {second}",
    ]


def spark_jobs(spark, run):
    """What the Spark jobs of a run say they are, and how many stages of each ran."""
    store = spark.sparkContext._jsc.sc().statusStore()
    ids = spark.sparkContext.statusTracker().getJobIdsForGroup(str(run._engine.query.runId))
    jobs = [store.job(job_id) for job_id in sorted(ids)]
    return [(job.description().get(), job.numCompletedStages()) for job in jobs]


def test_key_groups_and_subtasks_of_an_epoch_are_those_python_computes(spark, make_input, tmp_path):
    class Where(KeyedProcess):
        def process(self, row, ctx):
            return (row.a, row.b, ctx.group, ctx.subtask)

    keys = [(i % 7, None if i % 5 == 0 else f"s{i}") for i in range(60)]
    rows = make_input("a int, b string").add(*keys)
    out = sinks.Collect()
    job = Job("where", max_parallelism=32)
    job.source("rows", rows.stream(spark)).key_by("b", "a").process(
        Where(), schema="a int, b string, g int, subtask int", uid="where"
    ).sink_to(out, uid="out")
    finish(job, tmp_path / "checkpoint", parallelism=3)
    types = [rows.schema.field("b").type, rows.schema.field("a").type]
    assert sorted(map(str, out.rows)) and len(out.rows) == len(keys)
    for row in out.rows:
        group = key_group([row.b, row.a], types, 32)
        assert (row.g, row.subtask) == (group, subtask_of(group, 3, 32))
