"""Windows of real jobs come to what Spark's batch SQL makes of the same rows."""

from __future__ import annotations

import datetime as dt
import os
import random
import signal
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn import Job, KeyedProcess, WindowFunction, sinks, windows
from cairn.errors import PlanError
from tests.marks import for_soak
from tests.spark.support import T0, Input, epochs, eventually, finish, published, slot_pids

ROWS = "k string, ts timestamp, v bigint"
DELAY_S = 5
EARLIER = dt.timedelta(days=1)
"""Rows so old are late in every window."""


class Listed(WindowFunction):
    """The values of a window, in order."""

    def process(self, key, window, rows, ctx):
        rows = list(rows)
        assert [row.ts for row in rows] == sorted(row.ts for row in rows)
        yield {"vs": sorted(row.v for row in rows), "first": rows[0].ts}


def total(left, right):
    return left._replace(v=left.v + right.v, ts=min(left.ts, right.ts))


SPECS = {
    "tumbling": windows.tumbling("10 seconds", offset="3 seconds"),
    "sliding": windows.sliding("10 seconds", "4 seconds"),
    "session": windows.session("3 seconds"),
}


def build(spark, folder, source):
    """Every kind of window, by `process` and by `reduce`, over the same rows."""
    job = Job("windowed", max_parallelism=16)
    keyed = job.source(
        "rows", source.stream(spark), event_time="ts", watermark=f"{DELAY_S} seconds"
    ).key_by("k")
    for name, spec in SPECS.items():
        lists = keyed.window(spec).process(
            Listed(), schema="vs array<bigint>, first timestamp", uid=f"{name}-lists"
        )
        lists.sink_to(sinks.Files(str(folder / f"{name}-lists")), uid=f"{name}-lists-out")
        lists.side("late").sink_to(sinks.Files(str(folder / f"{name}-late")), uid=f"{name}-late")
        totals = keyed.window(spec).reduce(total, uid=f"{name}-totals")
        totals.sink_to(sinks.Files(str(folder / f"{name}-totals")), uid=f"{name}-totals-out")
    return job


def batch(spark, source, name, *, since=T0):
    """What Spark's batch SQL makes of all rows but those that are late for sure."""
    from pyspark.sql import functions as F

    grouping = {
        "tumbling": F.window("ts", "10 seconds", startTime="3 seconds"),
        "sliding": F.window("ts", "10 seconds", "4 seconds"),
        "session": F.session_window("ts", "3 seconds"),
    }[name]
    rows = spark.read.parquet(str(source.folder)).where(F.col("ts") >= F.lit(since))
    grouped = rows.groupBy("k", grouping.alias("w")).agg(
        F.sort_array(F.collect_list("v")).alias("vs"), F.min("ts").alias("first")
    )
    return Counter(
        (r.k, r.start_us, r.end_us, tuple(r.vs), r.first_us)
        for r in grouped.selectExpr(
            "k",
            "unix_micros(w.start) start_us",
            "unix_micros(w.end) end_us",
            "vs",
            "unix_micros(first) first_us",
        ).collect()
    )


def us(when):
    return (when - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


def check(spark, folder, source, late=()):
    """Every operator has emitted what the batch has, each window once."""
    for name in SPECS:
        expected = batch(spark, source, name)
        lists = Counter(
            (r["k"], us(r["window_start"]), us(r["window_end"]), tuple(r["vs"]), us(r["first"]))
            for r in published(folder / f"{name}-lists")
        )
        assert lists == expected, name
        totals = Counter(
            (r["k"], us(r["window_start"]), us(r["window_end"]), r["v"], us(r["ts"]))
            for r in published(folder / f"{name}-totals")
        )
        assert totals == Counter((*e[:3], sum(e[3]), e[4]) for e in expected.elements()), name
        aside = published(folder / f"{name}-late")
        assert sorted(r["v"] for r in aside) == sorted(row[2] for row in late), name


@st.composite
def streams(draw):
    """Files of rows that are out of order by less than the watermark allows, some far too old."""
    files, late = [], []
    newest = 0
    count = 0
    for n in range(draw(st.integers(2, 4))):
        rows = []
        reached = newest
        for _ in range(draw(st.integers(1, 8))):
            count += 1
            # On whole seconds often, where windows begin and end.
            lowest = max(0, newest - DELAY_S * 1_000_000)
            time = draw(
                st.one_of(
                    st.integers(lowest // 10**6, newest // 10**6 + 12).map(lambda s: s * 10**6),
                    st.integers(lowest, newest + 12 * 10**6),
                )
            )
            time = max(time, lowest)
            reached = max(reached, time)
            key = draw(st.sampled_from("abc"))
            rows.append((key, T0 + dt.timedelta(microseconds=time), count))
        if n and draw(st.booleans()):
            count += 1
            late.append(("a", T0 - EARLIER, count))
            rows.append(late[-1])
        newest = reached
        files.append(rows)
    return files, late


@pytest.mark.soak
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(streams(), st.sampled_from([1, 3]))
def test_windows_come_to_what_batch_sql_does(spark, stream, parallelism):
    files, late = stream
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = Input(folder / "in", ROWS).add_all(files)
        job = build(spark, folder, source)
        finish(job, folder / "checkpoint", parallelism, drain=True)
        check(spark, folder, source, late)


def shuffled(seed, files, size):
    """Rows of many keys, out of order, with late ones among them."""
    chance = random.Random(seed)
    made, late = [], []
    count = 0
    for n in range(files):
        rows = []
        for _ in range(size):
            count += 1
            # A file is 8 seconds, and what the watermark allows of the one before.
            seconds = chance.uniform(max(0, 8 * n - DELAY_S), 8 * n + 8)
            at = T0 + dt.timedelta(seconds=round(seconds, 3))
            rows.append((f"k{chance.randrange(20)}", at, count))
        count += 1
        rows.append(("mark", T0 + dt.timedelta(seconds=8 * n + 8), count))
        if n > 1:
            count += 1
            late.append((f"k{n}", T0 - EARLIER, count))
            rows.append(late[-1])
        made.append(rows)
    return made, late


def test_a_killed_slot_a_rescale_and_a_savepoint_change_no_window(spark, tmp_path):
    files, late = shuffled(7, files=8, size=40)
    source = Input(tmp_path / "in", ROWS)
    job = build(spark, tmp_path, source)
    with job.start(
        checkpoint=str(tmp_path / "before"),
        parallelism=2,
        backend="rocksdb",
        trigger="50 milliseconds",
    ) as run:
        for n, rows in enumerate(files[:6]):
            source.add(*rows)
            run.process_all_available()
            if n == 1:
                os.kill(slot_pids(run._engine.coordinator.run_id)[0], signal.SIGKILL)
            if n == 3:
                run.rescale(3)
        run.stop(savepoint=str(tmp_path / "savepoint"))
    assert published(tmp_path / "tumbling-lists"), "windows are complete before the end"
    source.add_all(files[6:])
    finish(job, tmp_path / "after", 1, savepoint=str(tmp_path / "savepoint"), drain=True)
    check(spark, tmp_path, source, late)


@pytest.mark.parametrize("drain", [for_soak(False), for_soak(True)])
def test_windows_of_windows_come_to_what_batch_sql_does(spark, tmp_path, make_input, drain):
    """Minutes of ten seconds each, and minutes of the sessions that ended in them."""
    from pyspark.sql import functions as F

    files, _ = shuffled(11, files=16, size=30)
    source = make_input(ROWS).add_all(files)
    job = Job("chained", max_parallelism=16)
    keyed = job.source(
        "rows", source.stream(spark), event_time="ts", watermark=f"{DELAY_S} seconds"
    ).key_by("k")
    inner = {"tens": windows.tumbling("10 seconds"), "sessions": windows.session("3 seconds")}
    for name, spec in inner.items():
        results = keyed.window(spec).reduce(total, uid=name)
        minutes = results.key_by("k").window(windows.tumbling("1 minute"))
        outer = minutes.reduce(total, uid=f"{name}-minutes")
        outer.sink_to(sinks.Files(str(tmp_path / name)), uid=f"{name}-out")
        outer.side("late").sink_to(sinks.Files(str(tmp_path / "late")), uid=f"{name}-late")
    finish(job, tmp_path / "checkpoint", 2, drain=drain)

    table = spark.read.parquet(str(source.folder)).where(F.col("ts") >= F.lit(T0))
    # To the end of a session itself: rows at its very end still go on with it.
    sessions = table.groupBy("k", F.session_window("ts", "3 seconds").alias("s")).agg(
        F.sum("v").alias("v")
    )
    rows = {"tens": table, "sessions": sessions.selectExpr("k", "v", "s.end ts")}
    for name in inner:
        grouped = rows[name].groupBy("k", F.window("ts", "1 minute").alias("w"))
        expected = {
            (r.k, r.start_us, r.v)
            for r in grouped.agg(F.sum("v").alias("v"))
            .selectExpr("k", "unix_micros(w.start) start_us", "v")
            .collect()
        }
        if not drain:
            end = T0 + dt.timedelta(minutes=2)
            watermark_ms = epochs(tmp_path / "checkpoint")[-1].watermark_ms
            assert end.timestamp() * 1000 <= watermark_ms, "two minutes are complete"
            expected = {each for each in expected if each[1] < us(end)}
        found = [(r["k"], us(r["window_start"]), r["v"]) for r in published(tmp_path / name)]
        assert set(found) == expected, name
        assert len(found) == len(expected), name
    assert published(tmp_path / "late") == []


def test_windows_by_the_clock_are_complete_without_input(spark, tmp_path, make_input):
    source = make_input(ROWS).add(("a", T0, 1), ("b", T0, 2), ("a", T0, 3))
    job = Job("clocked", max_parallelism=4)
    keyed = job.source("rows", source.stream(spark)).key_by("k")
    tumbling = keyed.window(windows.tumbling("1 second", time="processing"))
    tumbling.reduce(total, uid="totals").sink_to(sinks.Files(str(tmp_path / "out")), uid="out")
    with job.start(
        checkpoint=str(tmp_path / "checkpoint"), parallelism=2, trigger="100 milliseconds"
    ):
        assert eventually(lambda: len(published(tmp_path / "out")) == 2)
    assert {(r["k"], r["v"]) for r in published(tmp_path / "out")} == {("a", 4), ("b", 2)}


def test_windows_by_event_time_need_one(spark, make_input):
    source = make_input(ROWS)
    keyed = Job("untimed").source("rows", source.stream(spark)).key_by("k")
    with pytest.raises(PlanError, match="windows by event time need one"):
        keyed.window(windows.session("1 second"))
    assert keyed.window(windows.global_()).spec == windows.Global()


class Passing(KeyedProcess):
    def process(self, row, ctx):
        return row


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda keyed: keyed.window("1 hour"), "is not a description of windows"),
        (lambda keyed: keyed.window(windows.global_()).reduce("v", uid="w"), "needs a function"),
        (
            lambda keyed: keyed.window(windows.global_()).process(Passing(), schema=ROWS, uid="w"),
            "Passing is not a WindowFunction",
        ),
        (
            lambda keyed: keyed.window(windows.global_()).process(Listed(), schema=ROWS, uid="w"),
            "'k' would be there twice",
        ),
    ],
)
def test_what_cannot_be_windowed_is_refused(spark, make_input, wrong, message):
    keyed = Job("wrong").source("rows", make_input(ROWS).stream(spark)).key_by("k")
    with pytest.raises(PlanError, match=message):
        wrong(keyed)
