"""The plan Spark gets for an epoch, and what it makes of it: a chain of levels, one job."""

from __future__ import annotations

import functools
import re

import pytest

from cairn import Job, KeyedProcess, sinks
from cairn.driver.spark_config import set_epoch_config
from cairn.driver.spark_driver import SparkDriver, _Reports
from cairn.key_groups import key_group, subtask_of
from cairn.plan.dataframe import Planner
from cairn.plan.deploy import job_spec
from cairn.plan.frames import lay_pin
from cairn.plan.in_stream import find_in_stream
from cairn.plan.pruning import fill_unread
from cairn.worker.forward import Forward
from tests.marks import for_soak
from tests.spark.support import epochs, finish, stored_state


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
        first = first.transform(lambda df: df.where("abs(k) > 0"))
    second = first.key_by("s").process(Echo(), schema=ROWS, uid="second")
    second.union(source).key_by("k").process(Echo(), schema=ROWS, uid="third")
    return job


def plan_of(spark, job, rows, parallelism=4, batch=None, *, is_pinned=True):
    """The executed plan of an epoch, as text; after it the plans of what its branches share."""
    graph = job.graph()
    spec = job_spec(graph, job_id="plan", checkpoint="memory:", backend="heap")
    reports = spark.sparkContext.accumulator([], _Reports())
    forwards = [
        Forward("run", level.index, (), level.incoming, level.outgoing, None, "", b"", reports)
        for level in spec.levels
    ]
    session = spark.newSession()
    set_epoch_config(session)
    pin = lay_pin(spark, parallelism) if is_pinned else None
    planner = Planner(graph, parallelism, forwards, pin)
    try:
        schema = rows.stream(spark).schema
        if batch is None:
            batch = session.read.schema(schema).parquet(str(rows.folder))
        else:
            batch = session.createDataFrame(batch, schema)
        frames = [planner.epoch(batch), *planner._cuts.frames]
        return "\n".join(f._jdf.queryExecution().executedPlan().toString() for f in frames)
    finally:
        if pin is not None:
            pin.unpersist()


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


def test_epoch_on_one_executor_joins_nothing_and_sends_rows_as_they_are(spark, rows):
    plan = plan_of(spark, chain(spark, rows, event_time="t"), rows, is_pinned=False)
    assert "Join" not in plan and "InMemoryTableScan" not in plan, plan
    assert len(exchanges(plan)) == 3 and plan.count("Sort [time") == 3, plan


@pytest.mark.parametrize("parallelism", [1, 3])
def test_job_without_state_reaches_its_sinks_without_a_shuffle(
    spark, make_input, tmp_path, parallelism
):
    """In fewer partitions than there are subtasks, and in more."""
    rows = make_input(ROWS).add((1, None, "a"), (2, None, "b")).add((3, None, "c"))
    kept, job = sinks.Collect(), Job("plain", max_parallelism=16)
    source = job.source("rows", rows.stream(spark))
    odd = source.transform(lambda df: df.where("k % 2 = 1"))
    odd.sink_to(sinks.Noop(), uid="dropped")
    odd.sink_to(kept, uid="kept")
    run = finish(job, tmp_path / "checkpoint", parallelism=parallelism)
    assert sorted(row.k for row in kept.rows) == [1, 3]
    assert [(epoch.rows_in, epoch.rows_out) for epoch in run.epochs()] == [(2, 2), (2, 2)]
    assert [stages for _, stages in spark_jobs(spark, run)] == [1, 1]


def test_shuffles_within_one_process_are_not_compressed(spark):
    assert spark.sparkContext.getConf().get("spark.shuffle.compress") == "false"


def test_rows_of_one_sink_that_drops_them_are_counted_by_the_action(spark, make_input, tmp_path):
    rows = make_input(ROWS).add((1, None, "a"), (2, None, "b")).add((3, None, "c"), (5, None, "c"))
    job = Job("dropped", max_parallelism=16)
    source = job.source("rows", rows.stream(spark), event_time="t")
    source.transform(lambda df: df.where("k % 2 = 1")).sink_to(sinks.Noop(), uid="odd")
    run = finish(job, tmp_path / "checkpoint", parallelism=2)
    assert [epoch.rows_out for epoch in run.epochs()][::-1] == [1, 2]
    assert run.slots() == []


def test_query_runs_the_transforms_of_rows_that_are_only_counted(
    spark, make_input, tmp_path, monkeypatch
):
    """A transform that plans something else later is planned with its batch."""
    rows = make_input(ROWS)
    for value in range(3):
        rows.add((1, None, "a"), (1, None, "a"), (2, None, "b"), (value, None, "c"))
    letters, planned = ["c"], []
    count = Planner.count
    monkeypatch.setattr(Planner, "count", lambda *given: planned.append(1) or count(*given))

    def some(df):
        return df.where(f"s = '{letters[0]}'").withColumn("k", df.k + 1)

    job = Job("counted", max_parallelism=16)
    source = job.source("rows", rows.stream(spark))
    source.transform(some).transform(lambda df: df.where("k > 1")).sink_to(sinks.Noop(), uid="out")
    before = SparkDriver.execute

    def execute(driver, batch, begin):
        letters[0] = "c" if begin.epoch < 4 else "a"
        return before(driver, batch, begin)

    monkeypatch.setattr(SparkDriver, "execute", execute)
    run = finish(job, tmp_path / "checkpoint", parallelism=2)
    assert [epoch.rows_out for epoch in run.epochs()][::-1] == [0, 1, 2]
    assert len(planned) == 1, "only the batch of the epoch with another plan"
    assert [p["numInputRows"] for p in run._engine.query.recentProgress] == [4, 4, 4]


@pytest.mark.parametrize(
    ("where", "is_in_stream"),
    [("k > 1", True), ("rand() < 2", False), ("t < now()", False), ("k < (select 3)", False)],
)
def test_only_transforms_that_are_the_same_in_a_stream_move_into_the_query(
    spark, make_input, where, is_in_stream
):
    job = Job("moved", max_parallelism=16)
    source = job.source("rows", make_input(ROWS).stream(spark))
    source.transform(lambda df: df.where(where)).sink_to(sinks.Noop(), uid="out")
    assert (find_in_stream(job.graph()) is not None) == is_in_stream


def test_job_whose_sinks_drop_all_rows_counts_them_once_and_starts_no_slots(
    spark, make_input, tmp_path
):
    rows = make_input(ROWS).add((1, None, "a"), (2, None, "b")).add((3, None, "c"))
    others = make_input(ROWS).add((4, None, "d"))
    job = Job("dropped", max_parallelism=16)
    job.source("others", others.stream(spark)).sink_to(sinks.Noop(), uid="bare")
    source = job.source("rows", rows.stream(spark))
    source.transform(lambda df: df.where("k % 2 = 1")).sink_to(sinks.Noop(), uid="odd")
    source.transform(lambda df: df.where("k % 2 = 0")).sink_to(sinks.Noop(), uid="even")
    source.sink_to(sinks.Noop(), uid="all")
    run = finish(job, tmp_path / "checkpoint", parallelism=3, drain=True)
    log = run._engine.coordinator.log
    counted = [log.epoch(epoch.epoch).metrics.sink_rows for epoch in run.epochs()]
    # The last one has drained the job, without a batch.
    assert counted[::-1] == [
        {"bare": 1, "all": 2, "odd": 1, "even": 1},
        {"bare": 0, "all": 1, "odd": 1, "even": 0},
        {},
    ]
    assert run.slots() == []


def test_rows_of_several_sources_go_to_their_transforms_without_a_shuffle_of_all(
    spark, make_input, tmp_path
):
    """One source is a union, one has no rows in the second batch, and one never has any."""
    first, second, short, never = (make_input(ROWS) for _ in range(4))
    first.add((1, None, "a")).add((2, None, "a"))
    second.add((10, None, "b")).add((20, None, "b"))
    short.add((100, None, "c"))
    kept, job = sinks.Collect(), Job("apart", max_parallelism=16)
    united = job.source("united", first.stream(spark).union(second.stream(spark)))
    brief = job.source("brief", short.stream(spark))
    empty = job.source("empty", never.stream(spark))
    doubled = united.transform(lambda df: df.withColumn("k", df.k * 2))
    named = brief.transform(lambda df: df.where("s = 'c'"))
    everything = doubled.union(named, empty).key_by("s")
    everything.process(Echo(), schema=ROWS, uid="echo").sink_to(kept, uid="kept")
    run = finish(job, tmp_path / "checkpoint", parallelism=2)
    found = [sorted(row.k for row in kept.rows if row.s == name) for name in "abc"]
    assert found == [[2, 4], [20, 40], [100]]
    assert [stages for _, stages in spark_jobs(spark, run)] == [2, 2], "the sources, the level"
    read = [progress["numInputRows"] for progress in run._engine.query.recentProgress]
    assert read == [3, 2], "Spark counts each row once"


def test_columns_that_no_transform_reads_are_not_taken_from_the_source(spark, make_input, tmp_path):
    columns = "k bigint, v bigint, s string, never string not null, whole string"
    rows = make_input(columns).add((1, 5, "a", "n", "w"), (2, 6, "b", "n", "w"))
    kept, job = sinks.Collect(), Job("read", max_parallelism=16)
    one, other = job.source("one", rows.stream(spark)), job.source("other", rows.stream(spark))
    # What follows from a column's never being null must not be taken for not reading it.
    some = one.transform(lambda df: df.where("v = 5 and never is not null").select("k"))
    some.sink_to(kept, uid="some")
    other.key_by("s").aggregate(n="sum(k)", uid="sums").sink_to(sinks.Noop(), uid="out")
    run = finish(job, tmp_path / "checkpoint", parallelism=2)
    read = run._engine.driver.planner.transforms.read
    assert read == {"one": {"k", "v", "never"}, "other": {"k", "s"}}
    assert [row.k for row in kept.rows] == [1]
    assert stored_state(job, tmp_path / "checkpoint")["sums"]
    source = job.graph().nodes["one"]
    some = spark.createDataFrame([(1, 2, "n")], "k bigint, v bigint, never string")
    filled = fill_unread(some, source, read)
    assert filled.columns == rows.schema.names and filled.select("k").first().k == 1
    with pytest.raises(Exception, match="column 's' of source 'one' was not read"):
        filled.select("s").collect()


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
