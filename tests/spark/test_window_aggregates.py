"""Aggregates of windows: what Spark's batch SQL gives, and what its own streaming closes."""

from __future__ import annotations

import datetime as dt
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cairn import Job, PlanError, sinks, windows
from cairn.driver.coordinator.partials import PartialChoice
from tests.marks import for_soak
from tests.spark.support import T0, Input, eventually, finish, slot_pids

SCHEMA = "id bigint, k bigint, at timestamp, v double"
DELAY_S = 10
ASKED = {"n": "count(*)", "total": "sum(v)", "high": "max(v)", "mean": "avg(v)", "ids": "sum(id)"}
SPECS: dict[str, tuple[Any, str]] = {
    "tumbling": (windows.tumbling("10 seconds"), "window(at, '10 seconds')"),
    "moved": (
        windows.tumbling("10 seconds", offset="3 seconds"),
        "window(at, '10 seconds', '10 seconds', '3 seconds')",
    ),
    "sliding": (
        windows.sliding("10 seconds", "4 seconds"),
        "window(at, '10 seconds', '4 seconds')",
    ),
    "session": (windows.session("3 seconds"), "session_window(at, '3 seconds')"),
}
File = list[tuple[int, int, dt.datetime | None, float]]


def at(seconds: float) -> dt.datetime:
    return T0 + dt.timedelta(seconds=seconds)


def make_files(chance: random.Random, files: int = 4, rows: int = 25) -> list[File]:
    """Time goes on file by file; rows are out of order, and some of them far behind."""
    found: list[File] = []
    number = 0
    for file in range(files):
        held: File = []
        for _ in range(rows):
            behind = chance.choice([0, 1, 3, 8]) if chance.random() < 0.9 else 40
            second = max(0.0, file * 15 + chance.randrange(15_000_000) / 1e6 - behind)
            # Whole seconds meet the bounds of windows.
            second = float(int(second)) if chance.random() < 0.3 else second
            held.append((number, chance.randrange(4), at(second), float(chance.randrange(100))))
            number += 1
        found.append(held)
    return found


def watermarks(files: Sequence[File]) -> list[dt.datetime | None]:
    """The watermark that each file's epoch runs with."""
    found: list[dt.datetime | None] = []
    newest: dt.datetime | None = None
    for file in files:
        # In whole milliseconds.
        late = None if newest is None else newest - dt.timedelta(seconds=DELAY_S)
        found.append(late and late - dt.timedelta(microseconds=late.microsecond % 1000))
        newest = max([t for _, _, t, _ in file if t] + ([newest] if newest else []))
    return found


def late_ids(files: Sequence[File], ends: Any) -> set[int]:
    """Rows whose last window had ended by the watermark that their epoch ran with."""
    return {
        number
        for file, watermark in zip(files, watermarks(files), strict=True)
        for number, _, time, _ in file
        if watermark is not None and ends(time) <= watermark
    }


def last_end(name: str) -> Any:
    spec = SPECS[name][0]

    def end(time: dt.datetime) -> dt.datetime:
        us = (time - T0) // dt.timedelta(microseconds=1)
        base = int(T0.timestamp()) * 10**6
        return T0 + dt.timedelta(microseconds=spec.assign(base + us)[-1][1] - base)

    return end


def make_job(spark: Any, folder: Path, spec: Any, **more: Any) -> tuple[Job, Any]:
    job = Job("windows")
    source = Input(folder, SCHEMA).stream(spark)
    stream = job.source("rows", source, event_time="at", watermark=f"{DELAY_S} seconds")
    return job, stream.key_by("k").window(spec, **more).aggregate(uid="totals", **ASKED)


def by_window(rows: Any) -> dict[Any, tuple[Any, ...]]:
    """{(key, start, end): results}, each window once."""
    found: dict[Any, tuple[Any, ...]] = {}
    for row in rows:
        start, end = (row[n].replace(tzinfo=None) for n in ("window_start", "window_end"))
        key = (row["k"], start, end)
        assert key not in found, f"window {key} came twice"
        found[key] = tuple(row[name] for name in ASKED)
    return found


def batch_windows(
    spark: Any, folder: Path, sql: str, without: set[int], files: Sequence[File] = ()
) -> dict[Any, Any]:
    """By batch SQL; where `files` are given, rows count only in windows that were left to them."""
    rows = spark.read.parquet(str(folder)).where("at IS NOT NULL")
    if without:
        rows = rows.where(f"id NOT IN ({', '.join(map(str, without))})")
    aggregates = [spark_expr(f"{text} AS {name}") for name, text in ASKED.items()]
    if files:
        passed = [
            (number, watermark)
            for file, watermark in zip(files, watermarks(files), strict=True)
            for number, *_ in file
        ]
        rows = rows.join(spark.createDataFrame(passed, "id bigint, passed timestamp"), "id")
        rows = rows.select("*", spark_expr(f"{sql} AS w"))
        rows = rows.where("passed IS NULL OR w.end > passed")
        found = rows.groupBy("k", "w").agg(*aggregates)
    else:
        found = rows.groupBy("k", spark_expr(f"{sql} AS w")).agg(*aggregates)
    bounds = ["w.start AS window_start", "w.end AS window_end"]
    return by_window(found.selectExpr("k", *bounds, *ASKED).collect())


def choose(monkeypatch: Any, grouped: bool) -> None:
    chosen = frozenset({"totals"}) if grouped else frozenset()
    monkeypatch.setattr(PartialChoice, "choose", lambda self, epoch: chosen)


@pytest.mark.parametrize("name", [for_soak("tumbling"), for_soak("moved"), "sliding", "session"])
def test_windows_are_those_of_batch_sql_without_the_late_rows(
    spark: Any, tmp_path_factory: Any, name: str
) -> None:
    spec, sql = SPECS[name]

    @settings(
        max_examples=2,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False), st.sampled_from([1, 3]), st.booleans())
    def check(chance: random.Random, parallelism: int, keeps_late: bool) -> None:
        folder = tmp_path_factory.mktemp("windows")
        files = make_files(chance)
        Input(folder / "in", SCHEMA).add_all(files)
        late = late_ids(files, last_end(name)) if name != "session" else set()
        with pytest.MonkeyPatch.context() as monkeypatch:
            choose(monkeypatch, grouped=not keeps_late)
            job, result = make_job(spark, folder / "in", spec)
            out, aside = sinks.Collect(), sinks.Collect()
            result.sink_to(out, uid="out")
            if keeps_late or name == "session":
                result.side("late").sink_to(aside, uid="late")
            finish(job, folder / "checkpoint", parallelism, drain=True)
        put_aside = {row.id for row in aside.rows}
        if name == "session":
            # Which rows join a session that is still open is for the model of the unit tests.
            late = put_aside
        elif keeps_late:
            assert put_aside == late
        if name == "session":
            expected = batch_windows(spark, folder / "in", sql, late)
        else:
            expected = batch_windows(spark, folder / "in", sql, late, files)
        assert by_window(map(as_dict, out.rows)) == expected

    check()


def as_dict(row: Any) -> dict[str, Any]:
    return dict(row.asdict())


def test_days_of_a_place_are_as_long_as_its_clocks_say(
    spark: Any, make_input: Any, tmp_path: Any
) -> None:
    # In Berlin the clocks go forward on 2026-03-29.
    first = dt.datetime(2026, 3, 28, 22, 30, tzinfo=dt.UTC)
    rows = [(n, 1, first + dt.timedelta(hours=n), 1.0) for n in range(60)]
    source = make_input(SCHEMA).add_all([rows[:30], rows[30:]])
    spec = windows.tumbling("1 day", timezone="Europe/Berlin")
    job, result = make_job(spark, source.folder, spec)
    out = sinks.Collect()
    result.sink_to(out, uid="out")
    finish(job, tmp_path / "checkpoint", drain=True)
    assert sorted((str(row.window_start), row.n) for row in out.rows) == [
        ("2026-03-27 23:00:00+00:00", 1),
        ("2026-03-28 23:00:00+00:00", 23),
        ("2026-03-29 22:00:00+00:00", 24),
        ("2026-03-30 22:00:00+00:00", 12),
    ]


@pytest.mark.parametrize(
    ("name", "backend"), [for_soak("tumbling", "rocksdb"), ("session", "heap")]
)
def test_a_killed_slot_and_a_rescale_in_the_middle_change_nothing(
    spark: Any, make_input: Any, tmp_path: Any, name: str, backend: str
) -> None:
    spec, sql = SPECS[name]
    files = make_files(random.Random(7), files=6)
    source = make_input(SCHEMA).add(*files[0])
    job, result = make_job(spark, source.folder, spec)
    out, aside = sinks.Collect(), sinks.Collect()
    result.sink_to(out, uid="out")
    result.side("late").sink_to(aside, uid="late")
    checkpoint = str(tmp_path / "checkpoint")
    with job.start(
        checkpoint=checkpoint, parallelism=2, trigger="50 milliseconds", backend=backend
    ) as run:
        run.process_all_available()
        for number, file in enumerate(files[1:]):
            if number == 1:
                for pid in slot_pids(run._engine.coordinator.run_id).values():
                    os.kill(pid, signal.SIGKILL)
            if number == 3:
                run.rescale(3)
            source.add(*file)
            run.process_all_available()
    # The rest in a run of its own: the state has been through files.
    job, result = make_job(spark, source.folder, spec)
    rest = sinks.Collect()
    result.sink_to(rest, uid="out")
    result.side("late").sink_to(sinks.Collect(), uid="late")
    finish(job, checkpoint, 1, drain=True, backend=backend)
    epochs = out.epochs | rest.epochs
    rows = [as_dict(row) for epoch in sorted(epochs) for row in epochs[epoch]]
    late = {row.id for row in aside.rows}
    assert late, "some are late"
    assert by_window(rows) == batch_windows(spark, source.folder, sql, late)


def test_structured_streaming_closes_the_same_windows(
    spark: Any, make_input: Any, tmp_path: Any
) -> None:
    chance = random.Random(11)
    files = []
    for file in range(5):
        # Spark judges by the watermark of one batch before: late ones are late by either.
        seconds = [file * 20 + chance.randrange(20_000) / 1000 for _ in range(40)]
        seconds += [file * 20 - 60 - chance.randrange(5) for _ in range(4) if file > 3]
        files.append([(file * 100 + i, i % 5, at(s), float(i)) for i, s in enumerate(seconds)])
    source = make_input(SCHEMA).add_all(files)
    job, result = make_job(spark, source.folder, windows.tumbling("10 seconds"))
    out = sinks.Collect()
    result.sink_to(out, uid="out")
    run = finish(job, tmp_path / "checkpoint")
    theirs: list[Any] = []
    columns = ", ".join(ASKED)
    aggregates = [spark_expr(f"{text} AS {name}") for name, text in ASKED.items()]
    query = (
        source.stream(spark)
        .withWatermark("at", f"{DELAY_S} seconds")
        .groupBy("k", spark_expr("window(at, '10 seconds') AS w"))
        .agg(*aggregates)
        .selectExpr("k", "w.start AS window_start", "w.end AS window_end", *columns.split(", "))
        .writeStream.outputMode("append")
        .foreachBatch(lambda df, _: theirs.extend(df.collect()))
        .option("checkpointLocation", str(tmp_path / "spark"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    closed = by_window(map(as_dict, out.rows))
    assert closed == by_window(theirs)
    assert len(closed) > 30
    assert sum(e.operators["totals"].late_rows for e in run.epochs()) == 4


def spark_expr(text: str) -> Any:
    from pyspark.sql import functions as F

    return F.expr(text)


def test_windows_can_be_made_of_windows(spark: Any, make_input: Any, tmp_path: Any) -> None:
    files = make_files(random.Random(3), files=3)
    source = make_input(SCHEMA).add_all(files)
    job, minutes = make_job(spark, source.folder, windows.tumbling("10 seconds"))
    out = sinks.Collect()
    (
        minutes.key_by("k")
        .window(windows.tumbling("30 seconds"))
        .aggregate(uid="hours", n="sum(n)", windows="count(*)")
        .sink_to(out, uid="out")
    )
    finish(job, tmp_path / "checkpoint", 2, drain=True)
    late = late_ids(files, last_end("tumbling"))
    held = [row for file in files for row in file if row[0] not in late]
    expected: dict[Any, list[Any]] = {}
    for _, key, time, _ in held:
        second = int((time - T0).total_seconds())
        count = expected.setdefault((key, second // 30 * 30), [0, set()])
        count[0] += 1
        count[1].add(second // 10)
    found = {
        (row.k, int((row.window_start - T0).total_seconds())): (row.n, row.windows)
        for row in out.rows
    }
    assert found == {key: (n, len(tens)) for key, (n, tens) in expected.items()}


def test_rows_without_a_time_go_aside_and_are_counted_by_either_plan(
    spark: Any, make_input: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    source = make_input(SCHEMA).add((1, 1, None, 1.0), (2, 1, None, 1.0), (3, 1, at(1), 1.0))
    choose(monkeypatch, grouped=True)
    job, result = make_job(spark, source.folder, windows.tumbling("10 seconds"))
    result.sink_to(sinks.Collect(), uid="out")
    run = finish(job, tmp_path / "grouped")
    assert sum(e.operators["totals"].untimed_rows for e in run.epochs()) == 2
    choose(monkeypatch, grouped=False)
    job, result = make_job(spark, source.folder, windows.tumbling("10 seconds"))
    aside = sinks.Collect()
    result.side("late").sink_to(aside, uid="late")
    finish(job, tmp_path / "by row")
    assert sorted(row.id for row in aside.rows) == [1, 2]


def test_windows_by_the_clock_close_while_the_source_is_silent(
    spark: Any, make_input: Any, tmp_path: Any
) -> None:
    source = make_input(SCHEMA).add((1, 1, at(1), 1.0), (2, 2, None, 1.0))
    spec = windows.tumbling("1 second", time="processing")
    job, result = make_job(spark, source.folder, spec)
    out = sinks.Collect()
    result.sink_to(out, uid="out")
    options = {"checkpoint": str(tmp_path / "checkpoint"), "parallelism": 1}
    with job.start(trigger="100 milliseconds", **options):
        assert eventually(lambda: sorted(row.k for row in out.rows) == [1, 2])


def test_windows_by_event_time_need_one(spark: Any, make_input: Any) -> None:
    stream = Job("no").source("rows", make_input(SCHEMA).stream(spark)).key_by("k")
    with pytest.raises(PlanError, match="need one"):
        stream.window(windows.tumbling("10 seconds"))


def test_the_bounds_of_windows_are_names_that_are_taken(spark: Any, make_input: Any) -> None:
    source = make_input(SCHEMA).stream(spark)
    stream = Job("no").source("rows", source, event_time="at").key_by("k")
    with pytest.raises(PlanError, match="name of another column"):
        stream.window(windows.tumbling("10 seconds")).aggregate(uid="x", window_end="max(at)")
