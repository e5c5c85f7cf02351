"""Transforms that pick, rename and compare columns run in the slots of the operator before them."""

from __future__ import annotations

import datetime as dt
import itertools

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from cairn import Job, KeyedProcess, PlanError, sinks
from cairn.plan.frames import plan_schema, unreadable_rows
from cairn.plan.select_plan import plan_select
from cairn.types import parse_schema
from tests.spark.support import finish, published

ROWS = (
    "b boolean, i int, n bigint NOT NULL, s string, d date, t timestamp, f double, "
    "o struct<n: bigint, of: struct<s: string>>"
)
SCHEMA = parse_schema(ROWS)
SOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)

TRANSLATED = [
    lambda rows: rows,
    lambda rows: rows.select("s", "i"),
    lambda rows: rows.selectExpr(
        "n AS `a.b`", "o.n AS inner", "o.of.s", "'left' AS side", "5 AS x"
    ),
    lambda rows: rows.select("o.*", "f").withColumnRenamed("n", "number"),
    lambda rows: rows.drop("o").withColumn("again", F.col("t")),
    lambda rows: rows.where("i = 1 and s <> 'a'"),
    lambda rows: rows.where("not (i = 1 or b)"),
    lambda rows: rows.where("n >= i").where("s in ('a', 'ä', '')"),
    lambda rows: rows.where("s not in ('a', 'b')"),
    lambda rows: rows.where("i <=> n or s <=> 'b'").select(F.col("i").cast("bigint").alias("n")),
    lambda rows: rows.where("o.n is null or o.of.s is not null").selectExpr("o.of AS of"),
    lambda rows: rows.where("b"),
    lambda rows: rows.where("b = false").alias("r").select("r.n"),
    lambda rows: rows.where("s > 'Z' and s <= 'ä'"),
    lambda rows: rows.where("d < date'2026-01-02' or t >= timestamp'2026-01-01 12:00:00Z'"),
    lambda rows: rows.where((F.col("t") > F.lit(SOON)) | (F.col("n") < 2**40)),
    lambda rows: rows.where("i = '1'"),
    lambda rows: rows.where("true").selectExpr("i > 1 AS bigger", "isnull(s) AS no_s"),
]
NOT_TRANSLATED = [
    lambda rows: rows.where("f > 1"),
    lambda rows: rows.where("f = f"),
    lambda rows: rows.where("b < true"),
    lambda rows: rows.where("i = 'one'"),
    lambda rows: rows.where("s = null"),
    lambda rows: rows.where(F.col("s").isin()),
    lambda rows: rows.where("t < current_timestamp()"),
    lambda rows: rows.where("rand() > 0.5"),
    lambda rows: rows.where("s collate UTF8_LCASE = 'a'"),
    lambda rows: rows.selectExpr("n + 1 AS n"),
    lambda rows: rows.selectExpr("cast(n AS int) AS n"),
    lambda rows: rows.selectExpr("o.n AS n", "explode(array(1, 2)) AS e"),
    lambda rows: rows.distinct(),
    lambda rows: rows.orderBy("n"),
    lambda rows: rows.groupBy("s").count(),
    lambda rows: rows.limit(1),
    lambda rows: rows.union(rows),
    lambda rows: rows.crossJoin(rows.sparkSession.range(1)),
    # These look at the rows, and plan by what they find.
    lambda rows: rows.where("n > 1") if rows.count() else rows,
    lambda rows: rows if rows.isEmpty() else rows.where("n > 1"),
]


@pytest.fixture(scope="module")
def table():
    """Rows with each value of a column, and null, beside each of some other columns."""
    texts, numbers = ["a", "b", "ä", "", "Zz", None], [0, 1, 2**40]
    days = [dt.date(2026, 1, 1), dt.date(2026, 1, 2), None]
    times = [SOON, SOON + dt.timedelta(microseconds=1), None]
    inner = [None, {"n": None, "of": None}, {"n": 3, "of": {"s": None}}, {"n": 4, "of": {"s": "x"}}]
    rows = [
        (b, i, n, s, days[at % 3], times[at % 3], [1.5, float("nan"), None][at % 3], inner[at % 4])
        for at, (b, i, n, s) in enumerate(
            itertools.product([True, False, None], [1, 0, None], numbers, texts)
        )
    ]
    columns = zip(*rows, strict=True)
    return pa.record_batch(
        [pa.array(c, field.type) for c, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


@pytest.fixture(scope="module")
def in_spark(spark, table):
    return spark.createDataFrame(pa.Table.from_batches([table]))


def plan(spark, function):
    result = plan_schema(spark, SCHEMA, function)
    return plan_select(unreadable_rows(spark, SCHEMA), function, SCHEMA, result), result


@pytest.mark.parametrize("function", TRANSLATED, ids=range(len(TRANSLATED)))
def test_a_slot_selects_the_rows_that_spark_does(spark, table, in_spark, function):
    found, result = plan(spark, function)
    assert found is not None
    mine = found.selection.of(table, result)
    assert mine.schema == result
    expected = function(in_spark).toArrow().to_pylist()
    assert repr([list(row.values()) for row in mine.to_pylist()]) == repr(
        [list(row.values()) for row in expected]
    )


@pytest.mark.parametrize("function", NOT_TRANSLATED, ids=range(len(NOT_TRANSLATED)))
def test_spark_runs_what_is_not_understood(spark, function):
    assert plan(spark, function)[0] is None


class Echo(KeyedProcess):
    def process(self, row, ctx):
        return row


def build(spark, rows, function, out):
    job = Job("selects", max_parallelism=8)
    echo = (
        job.source("rows", rows.stream(spark))
        .key_by("k")
        .process(Echo(), schema="k bigint, v bigint", uid="echo")
    )
    chosen = echo.transform(function)
    chosen.sink_to(sinks.Files(str(out)), uid="out")
    chosen.key_by("v").aggregate(count="count(*)", uid="count").sink_to(sinks.Noop(), uid="noop")
    return job


def test_constants_may_be_others_in_later_epochs(spark, make_input, tmp_path):
    rows = make_input("k bigint, v bigint")
    rows.add_all([[(k, epoch) for k in range(6)] for epoch in range(4)])
    planned = itertools.count()
    job = build(
        spark,
        rows,
        lambda df: df.where(F.col("k") >= next(planned) // 3).select("v"),
        tmp_path / "o",
    )
    assert "chained: operator transform:" in job.explain()
    assert len(job.graph().levels) == 2, "the second is of the aggregation"
    finish(job, tmp_path / "c")
    by_epoch = [row["v"] for row in published(tmp_path / "o")]
    # Planned when the job was made and started, and once by each epoch that followed.
    counts = [by_epoch.count(epoch) for epoch in range(4)]
    assert counts[0] <= 6 and counts == sorted(counts, reverse=True) and counts[-1] < counts[0]


def test_a_transform_that_becomes_another_fails_the_epoch(spark, make_input, tmp_path):
    rows = make_input("k bigint, v bigint").add((1, 1)).add((2, 2))
    planned = itertools.count()

    def fickle(df):
        return df.where("v > 0") if next(planned) < 2 else df.where("v % 2 = 1")

    job = build(spark, rows, fickle, tmp_path / "o")
    with pytest.raises(PlanError, match=r"plans something else now\n  at: .*test_selects.py"):
        finish(job, tmp_path / "c")
