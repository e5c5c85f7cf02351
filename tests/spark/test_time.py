"""Event time, watermarks and epochs without a batch, in real Spark."""

from __future__ import annotations

import threading

import pytest

from cairn import FunctionError, Job, KeyedProcess, PlanError, sinks, state
from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.ticker import Ticker
from cairn.functions import Hooks
from cairn.plan.graph import EventTime, port_time
from cairn.plan.sql import time_sql
from cairn.types import parse_schema
from tests.spark.programs.alarms import SCHEMA as ALARM_ROWS
from tests.spark.programs.alarms import at
from tests.spark.programs.alarms import build as build_alarms
from tests.spark.support import Program, epochs, eventually, finish, published

ROWS = "id bigint, k bigint, ts timestamp"


def ms(second: float) -> int:
    return round(at(second).timestamp() * 1000)


class Seen(KeyedProcess):
    """Rows as they come, with what was known of time then."""

    def process(self, row, ctx):
        yield row.id, ctx.event_time_ms, ctx.watermark_ms


SEEN = "id bigint, at bigint, watermark bigint"


class Alarms(KeyedProcess):
    """A timer after each row: by event time, or by the clock for negative ids."""

    def __init__(self, fail=False):
        self.fail = fail

    def process(self, row, ctx):
        if row.id < 0:
            ctx.timers.processing(after="1 second")
        else:
            ctx.timers.event(after="1 second")

    def on_timer(self, time_ms, ctx):
        if self.fail:
            raise ValueError("no alarm, please")
        yield ctx.key, time_ms, ctx.timer_kind


ALARMS = "k bigint, at bigint, kind string"


# What a time is


def test_event_time_follows_its_column_through_a_transform(spark):
    job = Job("renamed")
    rate = spark.readStream.format("rate").load()
    rows = job.source("rows", rate, event_time="timestamp", watermark="1 second")

    def time_after(function):
        return port_time(job._nodes, rows.transform(function)._ports[0])

    assert time_after(lambda df: df.withColumnRenamed("timestamp", "at")) == EventTime("at")
    assert time_after(lambda df: df.selectExpr("value", "TIMESTAMP")) == EventTime("TIMESTAMP")
    assert time_after(
        lambda df: df.selectExpr("timestamp AS a", "timestamp AS b").where("a > b").distinct()
    ) == EventTime("a")
    twice = rows.transform(lambda df: df.selectExpr("timestamp AS `a.b`")).transform(
        lambda df: df.selectExpr("`a.b` AS c")
    )
    assert port_time(job._nodes, twice._ports[0]) == EventTime("c")
    assert time_after(lambda df: df.selectExpr("date_trunc('hour', timestamp) AS at")) is None
    assert time_after(lambda df: df.select("value")) is None, "dropped on purpose"


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        ("timestamp", [("timestamp'2026-03-08 07:30:00.123456Z'", 1772955000123456)]),
        # Between two clocks of New York, where there is no such time.
        ("timestamp_ntz", [("timestamp_ntz'2026-03-08 02:30:00.123456'", 1772937000123456),
                           ("timestamp_ntz'1969-12-31 23:59:59.999999'", -1)]),
        ("date", [("date'2026-01-02'", 1767312000000000)]),
        ("string", [("'2026-01-02T00:00:00Z'", 1767312000000000), ("'soon'", None), ("''", None)]),
        ("bigint", [("1500L", 1500000), ("9223372036854775807L", None)]),
        ("int", [("-3", -3000)]),
    ],
)  # fmt: skip
def test_a_time_can_be_told_in_columns_of_several_types(spark, type_, values):
    column = parse_schema(f"c {type_}").field("c").type
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        for sql, expected in [*values, ("null", None)]:
            row = spark.range(1).selectExpr(f"cast({sql} AS {type_}) AS c")
            assert row.selectExpr(time_sql("c", column)).collect()[0][0] == expected, sql
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def test_rows_in_text_and_numbers_are_ordered_and_unreadable_ones_put_aside(
    spark, make_input, tmp_path
):
    texts = make_input("id bigint, k bigint, ts string").add(
        (1, 0, "2026-01-01T00:00:09Z"), (2, 0, "whenever"), (3, 0, "2026-01-01T00:00:01Z")
    )
    numbers = make_input("id bigint, k bigint, ts bigint").add(
        (4, 0, ms(9)), (5, 0, None), (6, 0, ms(1))
    )
    job = Job("types", max_parallelism=8)
    out = {"texts": sinks.Collect(), "numbers": sinks.Collect()}
    for name, rows in (("texts", texts), ("numbers", numbers)):
        source = job.source(name, rows.stream(spark), event_time="ts", watermark="1 second")
        seen = source.key_by("k").process(Seen(), schema=SEEN, uid=f"of-{name}")
        seen.sink_to(out[name], uid=f"{name}-out")
    finish(job, tmp_path / "c")
    assert [(row.id, row.at) for row in out["texts"].rows] == [(3, ms(1)), (1, ms(9))]
    assert [(row.id, row.at) for row in out["numbers"].rows] == [(6, ms(1)), (4, ms(9))]
    (epoch,) = epochs(tmp_path / "c")
    assert epoch.watermarks == {"texts": ms(8), "numbers": ms(8)}
    untimed = {uid: found.untimed_rows for uid, found in epoch.metrics.operators.items()}
    assert untimed == {"of-texts": 1, "of-numbers": 1}


# Watermarks


def test_late_and_untimed_rows_go_to_the_side_and_are_counted(spark, make_input, tmp_path):
    rows = make_input(ROWS)
    rows.add((1, 0, at(5)), (2, 0, at(20)), (3, 0, at(1)), (4, 0, None))
    rows.add((5, 0, at(9.999)), (6, 0, at(10)), (7, 0, at(30)))
    rows.add((8, 0, at(19)), (9, 0, None), (10, 0, at(25)))
    out, late = sinks.Collect(), sinks.Collect()

    def build():
        job = Job("late", max_parallelism=8)
        source = job.source("rows", rows.stream(spark), event_time="ts", watermark="10 seconds")
        seen = source.key_by("k").process(Seen(), schema=SEEN, uid="seen")
        seen.sink_to(out, uid="out")
        seen.side("late").sink_to(late, uid="late")
        return job

    run = finish(build(), tmp_path / "c")
    assert [(row.id, row.watermark) for row in out.rows] == [
        (3, None), (1, None), (2, None), (6, ms(10)), (7, ms(10)), (10, ms(20)),
    ]  # fmt: skip
    assert sorted(row.id for row in late.rows) == [4, 5, 8, 9]
    found = epochs(tmp_path / "c")
    assert [epoch.watermark_ms for epoch in found] == [ms(10), ms(20), ms(20)]
    assert [epoch.passed_ms for epoch in found] == [None, ms(10), ms(20)]
    counted = [epoch.metrics.operators["seen"] for epoch in found]
    assert [c.late_rows for c in counted] == [0, 1, 1]
    assert [c.untimed_rows for c in counted] == [1, 0, 1]
    metrics = run.metrics()
    assert (metrics.late_rows, metrics.untimed_rows) == (1, 1)
    assert metrics.watermark_ms == ms(20)
    # The next run goes on with it.
    rows.add((11, 0, at(19)), (12, 0, at(21)))
    finish(build(), tmp_path / "c")
    assert (out.rows[-1].id, out.rows[-1].watermark) == (12, ms(20))
    assert late.rows[-1].id == 11


def test_without_a_watermark_rows_are_ordered_and_nothing_is_late(spark, make_input, tmp_path):
    rows = make_input(ROWS)
    rows.add((1, 0, at(100)), (2, 0, at(50)), (3, 0, None)).add((4, 0, at(2)), (5, 0, at(1)))
    job = Job("ordered", max_parallelism=8)
    seen = job.source("rows", rows.stream(spark), event_time="ts").key_by("k")
    out, late = sinks.Collect(), sinks.Collect()
    stream = seen.process(Seen(), schema=SEEN, uid="seen")
    stream.sink_to(out, uid="out")
    stream.side("late").sink_to(late, uid="late")
    finish(job, tmp_path / "c")
    assert [row.id for row in out.rows] == [2, 1, 5, 4]
    assert [row.id for row in late.rows] == [3]
    assert [epoch.watermark_ms for epoch in epochs(tmp_path / "c")] == [None, None]


def test_the_watermark_is_the_earliest_of_all_sources_and_sees_what_is_filtered_out(
    spark, make_input, tmp_path
):
    a = make_input(ROWS).add((1, 0, at(100)), (2, 0, at(200)))
    b = make_input(ROWS).add((3, 0, at(50)), (4, 0, at(70)))
    c = make_input("id bigint, text string").add((5, "2026-01-01T00:01:20Z"), (6, "never"))
    job = Job("several", max_parallelism=8)
    first = job.source("a", a.stream(spark), event_time="ts", watermark="0 seconds")
    second = job.source("b", b.stream(spark), event_time="ts", watermark="5 seconds")
    third = job.source("c", c.stream(spark))
    # Half of a is filtered out after its time was taken, half of b before another one is.
    out = sinks.Collect()
    few = first.transform(lambda df: df.where("id < 2"))
    some = second.transform(lambda df: df.where("id < 4").withColumn("k", df.k + 1))
    some = some.event_time("ts", watermark="1 second")
    timed = third.transform(
        lambda df: df.selectExpr("id", "0L AS k", "try_cast(text AS timestamp) AS ts")
    ).event_time("ts", watermark="3 seconds")
    everything = few.union(some, timed).key_by("k").process(Seen(), schema=SEEN, uid="seen")
    everything.sink_to(out, uid="out")
    finish(job, tmp_path / "c")
    (epoch,) = epochs(tmp_path / "c")
    assert epoch.watermarks == {"a": ms(200), "b:ts": ms(49), "c:ts": ms(77)}
    assert epoch.watermark_ms == ms(49)
    assert sorted(row.id for row in out.rows) == [1, 3, 5]


def test_an_idle_source_does_not_hold_back_the_others(spark, make_input, tmp_path):
    a, b = make_input(ROWS), make_input(ROWS)
    b.add((0, 9, at(0)))
    a.add((1, 0, at(10)))
    job = Job("idle", max_parallelism=8)
    busy = job.source("a", a.stream(spark), event_time="ts", watermark="0 seconds")
    idle = job.source(
        "b", b.stream(spark), event_time="ts", watermark="0 seconds", idle_after="2 seconds"
    )
    out = sinks.Collect()
    alarms = busy.union(idle).key_by("k").process(Alarms(), schema=ALARMS, uid="alarms")
    alarms.sink_to(out, uid="out")
    with job.start(
        checkpoint=str(tmp_path / "c"), parallelism=2, trigger="200 milliseconds"
    ) as run:
        run.process_all_available()
        a.add((2, 0, at(20)))
        # Nobody adds a row any more: time passes, and that is enough.
        assert eventually(lambda: len(out.rows) == 2), run.error
    assert [(row.k, row.at) for row in out.rows] == [(9, ms(1)), (0, ms(11))]
    newest = epochs(tmp_path / "c")[-1]
    assert newest.watermark_ms == ms(20) and newest.watermarks == {"a": ms(20), "b": ms(0)}


# Epochs without a batch


@pytest.fixture
def alarms(spark, make_input, tmp_path):
    """A job with timers over one source: (input, build, what it emitted)."""
    rows, out = make_input(ROWS), sinks.Collect()

    def build(**how):
        job = Job("alarms", max_parallelism=8)
        source = job.source("rows", rows.stream(spark), event_time="ts", watermark="2 seconds")
        found = source.key_by("k").process(Alarms(**how), schema=ALARMS, uid="alarms")
        found.sink_to(out, uid="out")
        return job

    return rows, build, out


def test_a_bounded_run_fires_what_the_watermark_has_come_to_and_no_more(alarms, tmp_path):
    rows, build, out = alarms
    rows.add((1, 1, at(0)), (2, 2, at(9)), (3, 3, at(10)))
    finish(build(), tmp_path / "c")
    assert [(row.k, row.at, row.kind) for row in out.rows] == [(1, ms(1), "event")]
    batch, idle = epochs(tmp_path / "c")
    assert batch.spark == idle.spark, "to Spark it is a part of the same batch"
    assert batch.timers == {"alarms": (ms(1), None)}
    assert idle.timers == {"alarms": (ms(10), None)}
    # Nothing is due any more: a run without input leaves no epoch behind.
    finish(build(), tmp_path / "c")
    assert [epoch.number for epoch in epochs(tmp_path / "c")] == [batch.number, idle.number]


def test_a_drain_fires_everything_and_the_job_can_go_on(alarms, tmp_path):
    rows, build, out = alarms
    rows.add((1, 1, at(0)), (-1, 2, at(9)), (3, 3, at(10)))
    finish(build(), tmp_path / "c", drain=True)
    assert sorted((row.k, row.kind) for row in out.rows) == [
        (1, "event"), (2, "processing"), (3, "event"),
    ]  # fmt: skip
    newest = epochs(tmp_path / "c")[-1]
    assert newest.timers == {} and newest.watermark_ms == ms(8)
    rows.add((4, 4, at(12)))
    finish(build(), tmp_path / "c", drain=True)
    assert [row.k for row in out.rows[3:]] == [4]


def test_a_timer_that_sets_itself_anew_is_not_drained_for_ever(
    spark, make_input, tmp_path, monkeypatch, caplog
):
    class Forever(KeyedProcess):
        def process(self, row, ctx):
            ctx.timers.event(after="1 second")

        def on_timer(self, time_ms, ctx):
            ctx.timers.event(after="1 second")
            yield (time_ms,)

    monkeypatch.setattr("cairn.driver.idle.DRAIN_EPOCHS_MAX", 3)
    rows = make_input(ROWS).add((1, 1, at(0)))
    job = Job("forever", max_parallelism=8)
    out = sinks.Collect()
    source = job.source("rows", rows.stream(spark), event_time="ts", watermark="2 seconds")
    again = source.key_by("k").process(Forever(), schema="at bigint", uid="again")
    again.sink_to(out, uid="out")
    assert finish(job, tmp_path / "c", drain=True).status == "finished"
    assert [row.at for row in out.rows] == [ms(1), ms(2), ms(3)]
    assert "again still has timers" in caplog.text
    assert epochs(tmp_path / "c")[-1].timers == {"again": (ms(4), None)}


def test_a_drain_needs_an_input_that_ends(alarms, tmp_path):
    _, build, _ = alarms
    with pytest.raises(PlanError, match="needs an input that ends"):
        build().start(checkpoint=str(tmp_path / "c"), drain=True)
    assert not (tmp_path / "c").exists()


def test_all_that_is_available_includes_the_timers_that_are_due(alarms, tmp_path, monkeypatch):
    rows, build, out = alarms
    rows.add((1, 1, at(0)), (2, 2, at(9)))
    # Nobody else looks whether an epoch is due.
    monkeypatch.setattr(Ticker, "_run", lambda ticker: None)
    with build().start(
        checkpoint=str(tmp_path / "c"), parallelism=2, trigger="200 milliseconds"
    ) as run:
        run.process_all_available()
        assert [row.k for row in out.rows] == [1]


def test_a_silent_source_still_fires_timers_by_the_clock(spark, alarms, tmp_path):
    rows, build, out = alarms
    rows.add((-1, 1, at(0)))
    settings = dict(spark.sparkContext.getConf().getAll())
    with build().start(
        checkpoint=str(tmp_path / "c"), parallelism=2, trigger="500 milliseconds"
    ) as run:
        assert eventually(lambda: out.rows), run.error
        run.process_all_available()
    # Known to a driver that has not seen a batch of its own, too.
    rows.add((-2, 2, at(0)))
    finish(build(), tmp_path / "c")
    assert len(out.rows) == 1
    with build().start(
        checkpoint=str(tmp_path / "c"), parallelism=3, trigger="500 milliseconds"
    ) as run:
        assert eventually(lambda: len(out.rows) == 2), run.error
    assert {(row.k, row.kind) for row in out.rows} == {(1, "processing"), (2, "processing")}
    adaptive = "spark.sql.adaptive.enabled"
    assert spark.conf.get(adaptive) == settings.get(adaptive, "true"), "the user's own session"


def test_a_change_that_is_asked_for_does_not_wait_for_rows(alarms, tmp_path):
    rows, build, _ = alarms
    rows.add((1, 1, at(0)))
    with build().start(
        checkpoint=str(tmp_path / "c"), parallelism=2, trigger="200 milliseconds"
    ) as run:
        run.process_all_available()
        run.rescale(3)
        assert eventually(lambda: run.parallelism == 3), run.error
        assert eventually(lambda: run.metrics().parallelism == 3), run.error
        number = run.metrics().epoch
        rows.add((2, 2, at(1)))
        run.process_all_available()
        assert run.metrics().epoch == number + 1, "once is enough"


def test_what_fails_without_a_batch_ends_the_run(alarms, tmp_path, monkeypatch):
    defaults = {**Coordinator.__init__.__kwdefaults__, "attempts_max": 1}
    monkeypatch.setattr(Coordinator.__init__, "__kwdefaults__", defaults)
    rows, build, out = alarms
    rows.add((-1, 1, at(0)))
    with build(fail=True).start(
        checkpoint=str(tmp_path / "c"), parallelism=2, trigger="500 milliseconds"
    ) as run:
        with pytest.raises(FunctionError, match="no alarm, please"):
            run.wait(60)
        assert run.status == "failed"
    rows.add((1, 2, at(5)), (2, 3, at(10)))
    with pytest.raises(FunctionError, match="no alarm, please"):
        finish(build(fail=True), tmp_path / "c")
    finish(build(), tmp_path / "c")
    assert [row.k for row in out.rows] == [1, 2], "it goes on where it was"


def test_stop_waits_for_an_epoch_without_a_batch(alarms, tmp_path, monkeypatch):
    rows, build, out = alarms
    rows.add((-1, 1, at(0)))
    begun, go_on = threading.Event(), threading.Event()
    with build().start(
        checkpoint=str(tmp_path / "c"), parallelism=2, trigger="500 milliseconds"
    ) as run:
        execute = run._engine.driver.execute

        def slow(batch, begin):
            if batch is None:
                begun.set()
                assert go_on.wait(60)
            return execute(batch, begin)

        monkeypatch.setattr(run._engine.driver, "execute", slow)
        assert begun.wait(60)
        stopping = threading.Thread(target=run.stop)
        stopping.start()
        go_on.set()
        stopping.join(60)
        assert run.status == "stopped" and run.error is None
    assert [row.k for row in out.rows] == [1]


def test_an_upgrade_cannot_change_what_epochs_are_planned_for(alarms, tmp_path):
    rows, build, _ = alarms
    rows.add((1, 1, at(0)))

    class AnyOrder(Hooks, Alarms):
        wants_order = False

    with (
        build().start(checkpoint=str(tmp_path / "c"), parallelism=2) as run,
        pytest.raises(PlanError, match="wants_order = True, the new one False"),
    ):
        run.upgrade("alarms", AnyOrder())


def test_rows_that_need_no_order_are_not_sorted(spark, make_input, tmp_path):
    class Count(Hooks, KeyedProcess):
        n = state.Value("bigint", default=0)
        wants_order = False

        def process(self, row, ctx):
            self.n.set(self.n.get() + 1)
            yield row.k, self.n.get(), ctx.event_time_ms

    rows = make_input(ROWS).add((1, 0, at(1)), (2, 0, at(0)), (3, 0, None))
    job = Job("unsorted", max_parallelism=8)
    out = sinks.Collect()
    source = job.source("rows", rows.stream(spark), event_time="ts", watermark="1 second")
    counted = source.key_by("k").process(Count(), schema="k bigint, n bigint, at bigint", uid="n")
    counted.sink_to(out, uid="out")
    finish(job, tmp_path / "c")
    assert sorted((row.n, row.at) for row in out.rows) == [(1, ms(1)), (2, ms(0))]
    (epoch,) = epochs(tmp_path / "c")
    assert epoch.watermark_ms == ms(0)
    assert epoch.metrics.operators["n"].untimed_rows == 1


# Crashes


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_driver_killed_around_epochs_without_a_batch_loses_and_doubles_no_timer(
    spark, make_input, tmp_path
):
    """Batches, an epoch for what is due, one of draining: killed before, in and after these two.

    The simulation has every point of them.
    """
    rows = make_input(ALARM_ROWS)
    for file in range(3):
        rows.add(*((10 * file + n, n % 3, at(10 * file + n)) for n in range(10)))
    finish(build_alarms(spark, rows.folder, tmp_path / "calm"), tmp_path / "c", drain=True)
    work = tmp_path / "work"
    points = [
        "driver.epoch.ended:3",
        "driver.idle.due:1",
        "driver.manifest.written:1",
        "driver.idle.ended:1",
    ]
    for point in points:
        with Program("alarms", rows.folder, work, on=spark, CAIRN_CRASH_AT=point) as program:
            program.end()
        assert program.killed, f"not killed at {point}: {program.errors[-2000:]}"
    finish(build_alarms(spark, rows.folder, work), work / "checkpoint", drain=True)
    for sink in ("tens", "late"):
        found, expected = published(work / sink), published(tmp_path / "calm" / sink)
        assert sorted(found, key=str) == sorted(expected, key=str)
    assert sorted(row["id"] for row in published(work / "tens")) == list(range(30))
