"""Savepoints made with DataFrames, and jobs that go on from them."""

from __future__ import annotations

import datetime as dt
from collections import Counter

import pyarrow as pa
import pytest

from cairn import (
    Job,
    KeyedProcess,
    PlanError,
    SavepointWriter,
    StateSchemaError,
    read_state,
    sinks,
    state,
)
from cairn.functions import EVENT_TIMERS
from cairn.key_groups import spark_key_group_sql
from cairn.snapshots import open_savepoint, write_savepoint
from cairn.snapshots.tables import open_state
from cairn.storage.store import open_store
from cairn.types import schema_ddl
from tests.spark.support import T0, Input, epochs, finish, published, stored_state

SCHEMA = "user string, amount double, at timestamp"
OUT = "user string, kind string, total double, payments long"
USERS = [f"user-{n}" for n in range(40)]


class Account(KeyedProcess):
    """Adds up, and closes a minute after T0."""

    total = state.Value("double", default=0.0)
    amounts = state.List("double")
    by_size = state.Map("string", "long")

    def process(self, row, ctx):
        self.total.set(self.total.get() + row.amount)
        self.amounts.append(row.amount)
        size = "large" if row.amount >= 50 else "small"
        self.by_size[size] = self.by_size.get(size, 0) + 1
        if len(self.amounts) == 1:
            ctx.timers.event(T0 + dt.timedelta(minutes=1))
        return ctx.key, "paid", self.total.get(), len(self.amounts)

    def on_timer(self, time_ms, ctx):
        return ctx.key, "closed", self.total.get(), len(self.amounts)


def build(spark, source, folder, max_parallelism=128):
    job = Job("accounts", max_parallelism=max_parallelism)
    rows = job.source("rows", source.stream(spark), event_time="at", watermark="0 seconds")
    out = rows.key_by("user").process(Account(), schema=OUT, uid="account")
    out.sink_to(sinks.Files(str(folder / "out")), uid="out")
    return job


def payments(second, amount):
    at = T0 + dt.timedelta(seconds=second)
    return [(user, amount + n, at) for n, user in enumerate(USERS)]


def out_of(folder):
    return Counter((r["user"], r["kind"], r["total"], r["payments"]) for r in published(folder))


def test_a_corrected_savepoint_with_other_key_groups_goes_on(spark, tmp_path):
    source = Input(tmp_path / "in", SCHEMA).add_all([payments(0, 10.0), payments(10, 20.0)])
    finish(build(spark, source, tmp_path / "a"), tmp_path / "a" / "checkpoint")
    write_savepoint(open_store(str(tmp_path / "a" / "checkpoint")), None, str(tmp_path / "old"))

    writer = SavepointWriter.of(spark, str(tmp_path / "old"))
    wrong = read_state(spark, str(tmp_path / "old"), "account", "total").where("user = 'user-7'")
    right = wrong.selectExpr("key_group", "user", "value + 956.0D as value")
    writer.patch("account", "total", right).max_parallelism(256)
    info = writer.write(str(tmp_path / "new"))
    assert info.max_parallelism == 256
    new = open_savepoint(str(tmp_path / "new"))
    assert new.verify() == []
    for name in ("total", "amounts", "by_size", EVENT_TIMERS):
        saved = spark.read.parquet(str(tmp_path / "new" / "state" / "account" / name))
        group = spark_key_group_sql([("key", pa.string())], 256)
        count, misplaced = saved.selectExpr("count(*)", f"count_if(key_group != {group})").first()
        assert (count, misplaced) == (info.operators["account"].states[name].rows, 0), name
        assert count >= len(USERS)

    source.add_all([payments(100, 5.0), payments(101, 1.0)])
    job = build(spark, source, tmp_path / "b", 256)
    checkpoint = tmp_path / "b" / "checkpoint"
    finish(job, checkpoint, 3, savepoint=str(tmp_path / "new"))
    expected = Counter()
    totals = {}
    for n, user in enumerate(USERS):
        before = 1000.0 if n == 7 else 30.0 + 2 * n
        expected[user, "paid", before + 5 + n, 3] += 1
        expected[user, "paid", before + 6 + 2 * n, 4] += 1
        totals[user] = before + 6 + 2 * n
    found = out_of(tmp_path / "b" / "out")
    closed = {row: count for row, count in found.items() if row[1] == "closed"}
    assert found == expected + Counter(closed)
    assert sorted(row[0] for row in closed) == sorted(USERS) and set(closed.values()) == {1}
    held = stored_state(job, checkpoint)["account"]
    assert held["total"] == totals
    assert held["amounts"]["user-3"] == [13.0, 23.0, 8.0, 4.0]
    loaded, *_ = epochs(checkpoint)
    assert [part.group_count for part in loaded.operators["account"].ranges] == [86, 85, 85]


def test_a_job_goes_on_from_state_made_of_history_and_reads_its_sources_from_the_beginning(
    spark, tmp_path
):
    history = spark.createDataFrame(
        [(user, float(n)) for n, user in enumerate(USERS) for _ in range(2)],
        "user string, amount double",
    )
    numbered = history.selectExpr(
        "user", "row_number() over (partition by user order by amount) - 1 as position",
        "amount as value",
    )  # fmt: skip
    due = T0 + dt.timedelta(minutes=1)
    writer = SavepointWriter.empty("accounts", max_parallelism=8)
    writer.declare("account", keys="user string", function=Account)
    writer.put("account", "total", history.groupBy("user").sum("amount").toDF("user", "value"))
    writer.put("account", "amounts", numbered)
    writer.put(
        "account",
        "by_size",
        history.selectExpr("user", "'small' entry").groupBy("user", "entry").count()
        .withColumnRenamed("count", "value"),
    )  # fmt: skip
    timers = spark.createDataFrame(
        [("user-1", due), ("nobody", due)], "user string, time timestamp"
    )
    writer.put("account", EVENT_TIMERS, timers)
    writer.write(str(tmp_path / "made"))

    source = Input(tmp_path / "in", SCHEMA).add_all([payments(0, 0.5), payments(100, 1.5)])
    job = build(spark, source, tmp_path, 8)
    finish(job, tmp_path / "checkpoint", savepoint=str(tmp_path / "made"))
    expected = {user: 2.0 * n + 0.5 + n + 1.5 + n for n, user in enumerate(USERS)}
    held = stored_state(job, tmp_path / "checkpoint")["account"]
    assert held["total"] == expected
    assert held["amounts"]["user-5"] == [5.0, 5.0, 5.5, 6.5]
    assert held["by_size"]["user-5"] == {"small": 4}
    paid = Counter(kind for _, kind, _, _ in out_of(tmp_path / "out").elements())
    assert paid["paid"] == 2 * len(USERS), "every file was read, once"

    # The same program again goes on where it is; a timer of a key without a row is called, too.
    source.add_all([payments(200, 0.0)])
    finish(job, tmp_path / "checkpoint", savepoint=str(tmp_path / "made"))
    found = out_of(tmp_path / "out")
    closed = Counter(user for user, kind, _, _ in found.elements() if kind == "closed")
    assert closed == Counter(["user-1", "nobody"])
    assert sum(found.values()) == 3 * len(USERS) + len(closed)


TYPES = (
    "v struct<a:int NOT NULL,b:array<string>,c:map<string,decimal(9,2)>,d:struct<e:date NOT NULL>>"
)


def test_executors_write_what_is_written_without_them(spark, tmp_path):
    """Kept rows, lists, maps, times of expiry, odd keys and values: by Spark as by Arrow."""
    value = TYPES[2:]
    writer = SavepointWriter.empty("types", max_parallelism=5)
    writer.declare(
        "op",
        keys="d double, s struct<n:decimal(20,3),t:timestamp_ntz>, value binary",
        states={
            "v": state.Value(value, ttl="1 day"),
            "l": state.List("interval day to second", ttl="1 day"),
            "m": state.Map("float", "object"),
        },
    )
    keys = [
        {"d": d, "s": s, "key_value": b}
        for d in (None, -0.0, float("nan"), 1.5)
        for s in (None, {"n": None, "t": dt.datetime(2026, 1, 2)}, {"n": 7, "t": None})
        for b in (None, b"", b"\x00\xff" * 20)
    ]
    rich = {"a": 1, "b": ["x", None], "c": [("k", 12)], "d": None}
    poor = {"a": 2, "b": None, "c": None, "d": {"e": dt.date(2026, 1, 1)}}
    at = T0.replace(tzinfo=dt.UTC)
    stage = writer._draft
    for name, rows in {
        "v": [
            {**k, "value": v, "written_at": at}
            for k, v in zip(keys, [rich, poor] * 18, strict=True)
        ],
        "l": [
            {**k, "position": n, "value": dt.timedelta(n), "written_at": at}
            for k in keys
            for n in range(3)
        ],
        "m": [{**k, "entry": e, "value": b"p"} for k in keys for e in (float("nan"), -0.0, 2.0)],
    }.items():
        entry = stage.find("op", name)
        schema = stage.rows_of(entry, name).schema
        writer.put("op", name, pa.Table.from_pylist(rows, schema=schema))
    writer.write(str(tmp_path / "arrow"))
    arrow = SavepointWriter.of(None, str(tmp_path / "arrow")).max_parallelism(7)
    arrow.write(str(tmp_path / "here"))

    by_spark = SavepointWriter.of(spark, str(tmp_path / "arrow")).max_parallelism(7)
    by_spark.write(str(tmp_path / "kept"))
    again = SavepointWriter.of(spark, str(tmp_path / "kept")).max_parallelism(7)
    for name in ("v", "l", "m"):
        rows = tables(tmp_path / "kept")[name]
        # With the types said: Spark would take a time without a zone for one with.
        again.put("op", name, spark.createDataFrame(rows, schema_ddl(rows.schema)))
    again.write(str(tmp_path / "given"))
    for folder in ("kept", "given"):
        assert open_savepoint(str(tmp_path / folder)).verify() == []
        for name, expected in tables(tmp_path / "here").items():
            found = tables(tmp_path / folder)[name]
            assert lines(found) == lines(expected), (folder, name)


def tables(folder):
    with open_state(str(folder)) as source:
        return {
            t.state: pa.Table.from_batches(t.batches(), schema=t.schema) for t in source.tables()
        }


def lines(table):
    return sorted(map(repr, table.to_pylist()))


def counts():
    writer = SavepointWriter.empty("job", max_parallelism=4)
    return writer.declare("op", keys="k long", states={"n": state.Value("long")})


def test_dataframes_of_another_shape_are_refused_at_once(spark):
    with pytest.raises(PlanError, match="streaming"):
        counts().put("op", "n", spark.readStream.format("rate").load())
    with pytest.raises(StateSchemaError, match="k string, declared as bigint"):
        counts().put("op", "n", spark.createDataFrame([("a", 1)], "k string, value long"))


@pytest.mark.parametrize(
    ("rows", "found"),
    [([(1, 1), (2, 2), (1, 3)], "several times"), ([(1, None)], "no value")],
    ids=["twice", "null"],
)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_left(spark, tmp_path, rows, found):
    writer = counts().put("op", "n", spark.createDataFrame(rows, "k int, value int"))
    target = str(tmp_path / "savepoint")
    with pytest.raises(StateSchemaError, match=found):
        writer.write(target)
    assert open_store(target).list() == []
