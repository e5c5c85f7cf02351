"""Keys, rows and state of every type; order and time within an epoch."""

from __future__ import annotations

import collections
import datetime as dt
import math
import random
from decimal import Decimal

import pytest

from cairn import Job, KeyedProcess, sinks, state
from cairn.key_groups import key_group
from tests.marks import for_soak
from tests.spark.support import T0, epochs, finish, stored_state

UTC = dt.UTC
NAN = math.nan

KEYS = {
    "boolean": [True, False, None],
    "tinyint": [1, -1, None],
    "smallint": [300, None],
    "int": [1, -1, 2**31 - 1, None],
    "bigint": [1, -(2**63), None],
    "float": [1.5, 0.0, -0.0, NAN, -NAN, None],
    "double": [1.5, 0.0, -0.0, NAN, -NAN, math.inf, None],
    "string": ["", "a", "grüße 😀", None],
    "binary": [b"", b"\0\xff", None],
    "date": [dt.date(1969, 12, 31), dt.date(2026, 2, 28), None],
    "timestamp": [T0, T0 + dt.timedelta(microseconds=1), None],
    "timestamp_ntz": [dt.datetime(2026, 1, 1), None],
    "decimal(10,2)": [Decimal("1.10"), Decimal("-1.10"), None],
    "decimal(38,5)": [Decimal("99999999999999999999.12345"), None],
    "interval day to second": [dt.timedelta(days=-1, microseconds=3), None],
    "struct<a:int,b:string>": [(1, "x"), (None, "x"), (1, None), None],
    "array<double>": [(0.0, NAN), (-0.0, NAN), (), (None,), None],
}


def rows_of_keys():
    """Every value of every type, once to three times, in one wide row each."""
    longest = max(map(len, KEYS.values()))
    return [tuple(values[i % len(values)] for values in KEYS.values()) for i in range(longest)]


class Count(KeyedProcess):
    n = state.Value("bigint", default=0)
    per = state.Map("bigint", "string")

    def process(self, row, ctx):
        self.n.set(self.n.get() + 1)
        self.per[self.n.get()] = repr(ctx.key)


@pytest.mark.slow
def test_keys_of_every_type_count_as_spark_groups_them(spark, make_input, tmp_path):
    """One source forked to an operator per key type, and one keyed by several columns."""
    names = [f"c{i}" for i in range(len(KEYS))]
    schema = ", ".join(f"{n} {t}" for n, t in zip(names, KEYS, strict=True))
    rows = make_input(schema).add(*rows_of_keys()).add(*rows_of_keys()[:4])
    several = ("c4", "c6", "c7")

    def build():
        job = Job("keys", max_parallelism=8)
        source = job.source("rows", rows.stream(spark))
        for name in names:
            source.key_by(name).process(Count(), schema="x int", uid=f"by-{name}")
        source.key_by(*several).process(Count(), schema="x int", uid="by-several")
        return job

    job = build()
    finish(job, tmp_path / "checkpoint")
    # A new run restores every key from storage and must find it again.
    rows.add(*rows_of_keys()[2:])
    finish(job, tmp_path / "checkpoint", parallelism=3)
    stored = stored_state(job, tmp_path / "checkpoint")
    by = [*((name,) for name in names), several]
    spark.read.parquet(str(rows.folder)).createOrReplaceTempView("keys")
    sets = ", ".join(f"({', '.join(columns)})" for columns in by)
    ids = {grouping_id(columns, names): columns for columns in by}
    expected = collections.defaultdict(list)
    for row in spark.sql(
        f"SELECT grouping_id() AS id, count(*) AS n FROM keys GROUP BY {', '.join(names)} "
        f"GROUPING SETS ({sets})"
    ).collect():
        expected[ids[row.id]].append(row.n)
    for columns in by:
        uid = "by-several" if columns == several else f"by-{columns[0]}"
        assert sorted(stored[uid]["n"].values()) == sorted(expected[columns]), uid
        for key, held in stored[uid]["per"].items():
            # Every row of a key saw the same key object, before and after the restart.
            assert set(held.values()) == {repr(key)}, uid
            assert len(held) == stored[uid]["n"][key], uid
    assert 0.0 in stored["by-c6"]["n"] and stored["by-c6"]["n"][0.0] > 1


def grouping_id(columns, names):
    """Spark's: a bit per column, set where it is not grouped by."""
    return sum(1 << at for at, name in enumerate(reversed(names)) if name not in columns)


VALUES = (
    "s struct<a:int,b:struct<c:string>>, l array<struct<x:double>>, m map<string,array<int>>, "
    "d decimal(20,4), day date, t timestamp, n timestamp_ntz, b binary, i interval day to second, "
    "`order id` string, `it's` int, `tick``ed` int, `x.y` int, ok boolean, f float, y tinyint"
)
WIDE = [
    (
        (1, ("x",)), ((0.5,), None), {"a": (1, None), "b": None}, Decimal("12.3456"),
        dt.date(2026, 2, 28), T0, dt.datetime(1969, 1, 1, 1, 1, 1, 5), b"\0\1", dt.timedelta(3),
        "o", 1, 2, 3, True, 0.5, -7,
    ),
    (
        (None, None), (), {}, Decimal("-0.0001"), dt.date(1582, 10, 15),
        T0 - dt.timedelta(days=30000, microseconds=1), dt.datetime(2999, 1, 1), b"",
        dt.timedelta(microseconds=-1), "", -1, -2, -3, False, -0.0, 127,
    ),
    (None,) * 16,
]  # fmt: skip


class Remember(KeyedProcess):
    """Emits the row it saw before, from state, and keeps this one."""

    kept = state.Value(f"struct<k:bigint, {VALUES}>")
    every = state.List(f"struct<k:bigint, {VALUES}>")
    by_row = state.Map("struct<a:int,b:struct<c:string>>", "map<string,array<int>>")

    def process(self, row, ctx):
        before = self.kept.get()
        self.kept.set(row)
        self.every.append(row)
        if row.s is not None:
            self.by_row[row.s] = row.m
            assert self.by_row[row.s] == row.m
        if before is not None:
            yield before


@pytest.mark.slow
@pytest.mark.parametrize("zone", [for_soak("UTC"), "America/New_York"])
def test_rows_and_state_of_every_type_come_back_as_they_went_in(spark, make_input, tmp_path, zone):
    """Through two levels, into state, over a restart, in any session time zone."""
    schema = f"k bigint, {VALUES}"
    wide = [(k, *row) for k, row in enumerate(WIDE)]
    rows = make_input(schema).add(*wide)
    out, raw, passed = sinks.Collect(), sinks.Collect(), sinks.Collect()
    job = Job("types", max_parallelism=8)
    source = job.source("rows", rows.stream(spark))
    source.sink_to(raw, uid="raw")
    once = source.key_by("k").process(Remember(), schema=schema, uid="once")
    # The source's rows pass by the first level on their way to the second.
    both = once.union(source)
    both.key_by("k").process(Remember(), schema=schema, uid="twice").transform(
        lambda df: df.where("k >= 0")
    ).sink_to(out, uid="out")
    both.sink_to(passed, uid="passed")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        finish(job, tmp_path / "checkpoint")
        rows.add(*wide)
        finish(job, tmp_path / "checkpoint", parallelism=1)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    plain = [tuple(row) for row in wide]

    def sorted_rows(found):
        return sorted((tuple(row) for row in found), key=lambda row: row[0])

    newest = max(raw.epochs)
    assert sorted_rows(raw.epochs[newest]) == plain
    # In the second epoch each key arrives twice at `twice`: the source's row and the remembered.
    assert sorted_rows(passed.epochs[newest]) == sorted_rows(plain + plain)
    assert sorted_rows(out.epochs[newest]) == sorted_rows(plain + plain)
    stored = stored_state(job, tmp_path / "checkpoint")
    assert [tuple(stored["once"]["kept"][k]) for k in range(3)] == plain
    assert [list(map(tuple, stored["once"]["every"][k])) for k in range(3)] == [
        [row, row] for row in plain
    ]
    assert all(row.t is None or row.t.tzinfo is UTC for row in raw.rows)


class InOrder(KeyedProcess):
    seen = state.List("struct<t:timestamp,id:bigint>")
    ids = state.List("bigint")

    def process(self, row, ctx):
        self.seen.append((row.t, row.id))
        self.ids.append(ctx.event_time_ms if ctx.event_time_ms is not None else -1)


def test_rows_of_a_key_come_in_event_time_order_with_ties_the_same_each_time(
    spark, make_input, tmp_path
):
    """The same rows, shuffled differently over files and tasks, twice."""
    chance = random.Random(7)
    rows = [
        (chance.randrange(3), T0 + dt.timedelta(milliseconds=chance.randrange(20)), i)
        for i in range(300)
    ]
    rows += [(0, None, 1000), (1, T0 - dt.timedelta(days=40000), 1001)]
    found = []
    for attempt in range(2):
        chance.shuffle(rows)
        shuffled = make_input("k int, t timestamp, id bigint")
        shuffled.add_all(rows[at::7] for at in range(7))
        job = Job("ordered", max_parallelism=4)
        source = job.source("rows", shuffled.stream(spark, files_per_epoch=7), event_time="t")
        # It follows the column through a transform.
        ordered = (
            source.transform(lambda df: df.where("id >= 0"))
            .key_by("k")
            .process(InOrder(), schema="x int", uid="order")
        )
        untimed = sinks.Collect()
        ordered.side("late").sink_to(untimed, uid="untimed")
        finish(job, tmp_path / f"checkpoint-{attempt}")
        found.append(stored_state(job, tmp_path / f"checkpoint-{attempt}")["order"])
        assert len(epochs(tmp_path / f"checkpoint-{attempt}")) == 1
        assert untimed.rows == [(0, None, 1000)]
    assert found[0] == found[1]
    for key, seen in found[0]["seen"].items():
        times = [row.t for row in seen]
        assert times == sorted(times)
        assert len(seen) == sum(row[0] == key and row[1] is not None for row in rows)
        # Not simply by id: ties go by a hash of the row.
    millis = [found[0]["ids"][1][0], (T0 - dt.timedelta(days=40000)).timestamp() * 1000]
    assert millis[0] == millis[1]


class Clock(KeyedProcess):
    def process(self, row, ctx):
        yield ctx.epoch, ctx.now_ms, ctx.subtask, ctx.parallelism, row.k, ctx.key


def test_clock_is_one_per_epoch_in_every_subtask_and_rows_are_where_their_key_belongs(
    spark, make_input, tmp_path
):
    rows = make_input("k bigint").add_all([[(k,) for k in range(40)]] * 3)
    out, again = sinks.Collect(), sinks.Collect()
    schema = "epoch bigint, now bigint, subtask int, parallelism int, k bigint, key bigint"
    job = Job("clock", max_parallelism=12)
    first = (
        job.source("rows", rows.stream(spark))
        .key_by("k")
        .process(Clock(), schema=schema, uid="first")
    )
    first.sink_to(out, uid="out")
    first.key_by("subtask", "k").process(
        type("Both", (Clock,), {"process": lambda self, row, ctx: (*row[:2], ctx.now_ms)})(),
        schema="epoch bigint, now bigint, again bigint",
        uid="second",
    ).sink_to(again, uid="again")
    finish(job, tmp_path / "checkpoint", parallelism=3)
    committed = {epoch.number: epoch.now_ms for epoch in epochs(tmp_path / "checkpoint")}
    assert len(committed) == 3
    assert {(row.epoch, row.now) for row in out.rows} == set(committed.items())
    assert all(row.now == row.again == committed[row.epoch] for row in again.rows)
    assert sorted(committed.values()) == list(committed.values())
    type_ = rows.schema.field("k").type
    for row in out.rows:
        assert row.subtask == key_group([row.k], [type_], 12) * 3 // 12
        assert (row.parallelism, row.key) == (3, row.k)
    assert len(collections.Counter(row.subtask for row in out.rows)) == 3
