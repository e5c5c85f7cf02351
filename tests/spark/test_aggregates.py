"""Running aggregates: what Spark's own groupBy gives, whichever plan makes the partials."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import random
from typing import Any

import pytest

from cairn import Job, PlanError, sinks
from cairn.driver.coordinator import partials
from cairn.driver.coordinator.partials import PartialChoice
from tests.marks import for_soak
from tests.spark.support import T0, finish

SCHEMA = (
    "k bigint, g string, at timestamp, i int, l bigint, d double, f float, c decimal(10,2), "
    "s string, b boolean, day date, a array<int>"
)
ASKED = {
    "n": "count(*)",
    "n_i": "count(i)",
    "total_i": "sum(i)",
    "total_d": "sum(d)",
    "total_f": "sum(f)",
    "total_c": "sum(c)",
    "product": "sum(l * 2 + coalesce(i, 1))",
    "mean_i": "avg(i)",
    "mean_c": "mean(c)",
    "mean_d": "avg(d)",
    "low_i": "min(i)",
    "high_d": "max(d)",
    "low_s": "min(s)",
    "high_s": "max(upper(s))",
    "low_c": "min(c)",
    "high_b": "max(b)",
    "low_day": "min(day)",
    "high_at": "max(at)",
    "sd": "stddev(d)",
    "sd_pop": "stddev_pop(i)",
    "var": "variance(d)",
    "var_pop": "var_pop(l)",
    "kinds_s": "count(DISTINCT s)",
    "kinds_d": "count(DISTINCT d)",
    "kinds_of_some": "count(DISTINCT i, s) FILTER (WHERE i > 0 OR s = ')')",
    "n_of_some": "count(*) FILTER (WHERE i > 0)",
    "total_of_some": "sum(c) FILTER (WHERE b)",
    "newest": "max_by(s, at)",
    "oldest_of_some": "min_by(struct(i, s), at) FILTER (WHERE b)",
}
DISTINCT = {"kinds": "approx_count_distinct(s)", "days": "approx_count_distinct(day)"}
"""Never grouped ahead, and nothing is that is asked for beside them."""


def make_rows(count: int, seed: int) -> list[tuple[Any, ...]]:
    chance = random.Random(seed)

    def some(value: Any) -> Any:
        return None if chance.random() < 0.2 else value

    return [
        (
            some(chance.randrange(6)),
            chance.choice("xyz"),
            T0 + dt.timedelta(microseconds=chance.randrange(10**9)),
            some(chance.randrange(-50, 50)),
            some(chance.randrange(-(10**12), 10**12)),
            some(chance.choice([chance.gauss(1e6, 3.0), -0.0, float("nan"), float("inf")][:2])),
            some(chance.random()),
            some(decimal.Decimal(chance.randrange(-(10**6), 10**6)) / 100),
            some(chance.choice(["", "a", "ä", "b" * 40, "𐍈"])),
            some(chance.random() < 0.5),
            some(dt.date(2026, 1, 1) + dt.timedelta(days=chance.randrange(400))),
            some([chance.randrange(3)]),
        )
        for _ in range(count)
    ]


@pytest.fixture(params=["row by row", "grouped"])
def plan(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which Spark can make partials."""
    chosen = frozenset({"totals"}) if request.param == "grouped" else frozenset()
    monkeypatch.setattr(PartialChoice, "choose", lambda self, epoch: chosen)
    return str(request.param)


# Unit and property tests have both without Spark.
GROUPED = pytest.mark.parametrize("plan", ["grouped", for_soak("row by row")], indirect=True)


def last_of(rows: Any, keys: tuple[str, ...]) -> dict[Any, dict[str, Any]]:
    """The last word on each key."""
    return {tuple(row[key] for key in keys): _as_dict(row) for row in rows}


def _as_dict(row: Any) -> dict[str, Any]:
    return dict(row.asDict() if hasattr(row, "asDict") else row.asdict())


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, dt.datetime) and isinstance(expected, dt.datetime):
        return found.replace(tzinfo=None) == expected  # The session's zone is UTC.
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9) or (
            math.isnan(found) and math.isnan(expected)
        )
    return bool(found == expected)


def assert_same(found: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        wrong = {n: (found[key][n], v) for n, v in row.items() if not same(found[key][n], v)}
        assert not wrong, f"key {key}: (found, expected) {wrong}"


@pytest.mark.parametrize(("parallelism", "keys"), [for_soak(1, ("k",)), (3, ("g", "k"))])
def test_running_aggregates_are_those_of_a_group_by(
    spark: Any, make_input: Any, tmp_path: Any, plan: str, keys: Any, parallelism: int
) -> None:
    files = [make_rows(60, seed) for seed in range(3)]
    source = make_input(SCHEMA).add_all(files)
    asked = ASKED if plan == "grouped" else ASKED | DISTINCT
    job = Job("totals")
    result = job.source("rows", source.stream(spark)).key_by(*keys).aggregate(uid="totals", **asked)
    out = sinks.Collect()
    result.sink_to(out, uid="out")
    finish(job, tmp_path / "checkpoint", parallelism)
    rows = out.rows
    batch = spark.read.parquet(str(source.folder))
    # Few values: ours are exact then.
    sql = [
        f"{text.replace('approx_count_distinct(', 'count(DISTINCT ')} AS {name}"
        for name, text in asked.items()
    ]
    expected = batch.groupBy(*keys).agg(*map(spark_expr, sql)).collect()
    assert_same(last_of(rows, keys), last_of(expected, keys))
    types = dict(batch.groupBy(*keys).agg(*map(spark_expr, sql)).dtypes)
    from cairn.types import type_ddl

    assert {field.name: type_ddl(field.type) for field in result.schema} == types
    # One row per changed key and epoch.
    at = {name: i for i, name in enumerate(source.schema.names)}
    changed = sum(len({tuple(r[at[k]] for k in keys) for r in file}) for file in files)
    assert len(rows) == changed


def spark_expr(text: str) -> Any:
    from pyspark.sql import functions as F

    return F.expr(text)


def running(job: Job, stream: Any, **asked: str) -> sinks.Collect:
    out = sinks.Collect()
    stream.key_by("k").aggregate(uid="totals", **asked).sink_to(out, uid="out")
    return out


@GROUPED
def test_first_and_last_go_by_event_time(
    spark: Any, make_input: Any, tmp_path: Any, plan: str
) -> None:
    def at(second: int) -> dt.datetime:
        return T0 + dt.timedelta(seconds=second)

    source = make_input("k bigint, at timestamp, s string").add_all(
        [
            [(1, at(5), "b"), (1, at(9), "y"), (1, None, "never"), (2, at(1), None)],
            [(1, at(5), "a"), (1, at(9), "z"), (2, at(0), "early"), (2, at(2), None)],
            [(1, at(7), "middle"), (2, at(1), "late")],
        ]
    )
    job = Job("edges")
    stream = job.source("rows", source.stream(spark), event_time="at")
    out = running(
        job, stream, first="first(s)", last="last(s)", some="first(s, true)", end="last(s, true)"
    )
    finish(job, tmp_path / "checkpoint")
    found = {key: tuple(row.values())[1:] for (key,), row in last_of(out.rows, ("k",)).items()}
    assert found == {1: ("a", "z", "a", "z"), 2: ("early", None, "early", "late")}


@GROUPED
def test_nan_infinity_and_sums_of_nothing_are_as_in_spark(
    spark: Any, make_input: Any, tmp_path: Any, plan: str
) -> None:
    nan, inf = float("nan"), float("inf")
    values = {1: [nan, 1.0], 2: [inf, 1.0], 3: [inf, -inf], 4: [None, None], 5: [-0.0, 0.0]}
    rows = [(key, value) for key, held in values.items() for value in held]
    source = make_input("k bigint, d double").add_all([rows[::2], rows[1::2]])
    asked = {f"{f}_d": f"{f}(d)" for f in ("sum", "min", "max", "avg", "stddev_pop", "var_samp")}
    job = Job("nan")
    out = running(job, job.source("rows", source.stream(spark)), **asked)
    finish(job, tmp_path / "checkpoint")
    sql = [spark_expr(f"{text} AS {name}") for name, text in asked.items()]
    expected = spark.read.parquet(str(source.folder)).groupBy("k").agg(*sql).collect()
    assert_same(last_of(out.rows, ("k",)), last_of(expected, ("k",)))


@GROUPED
def test_many_distinct_values_are_counted_about_right(
    spark: Any, make_input: Any, tmp_path: Any, plan: str
) -> None:
    source = make_input("k bigint, v bigint").add_all(
        [[(v % 2, v) for v in range(start, start + 3000)] for start in (0, 1500)]
    )
    job = Job("distinct")
    out = running(job, job.source("rows", source.stream(spark)), n="approx_count_distinct(v)")
    finish(job, tmp_path / "checkpoint")
    for row in last_of(out.rows, ("k",)).values():
        assert abs(row["n"] - 2250) < 4 * 0.023 * 2250


@GROUPED
def test_state_goes_on_after_a_restart_in_another_parallelism_on_rocksdb(
    spark: Any, make_input: Any, tmp_path: Any, plan: str
) -> None:
    source = make_input("k bigint, v bigint").add(*[(v % 7, v) for v in range(50)])

    def run(parallelism: int) -> dict[Any, Any]:
        job = Job("again")
        stream = job.source("rows", source.stream(spark))
        out = running(job, stream, n="count(*)", total="sum(v)", sd="stddev(v)")
        finish(job, tmp_path / "checkpoint", parallelism, backend="rocksdb")
        return last_of(out.rows, ("k",))

    run(1)
    source.add(*[(v % 7, v) for v in range(50, 90)])
    found = run(3)
    batch = spark.read.parquet(str(source.folder)).groupBy("k")
    sql = ["count(*) AS n", "sum(v) AS total", "stddev(v) AS sd"]
    assert_same(found, last_of(batch.agg(*map(spark_expr, sql)).collect(), ("k",)))


def test_an_aggregate_of_changes_is_what_sql_gives_of_the_results(
    spark: Any, make_input: Any, tmp_path: Any, plan: str
) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [(v % 11, v, [1.5, None, 2.0, -1.0][v % 4]) for v in range(60)]
    special = [(100, 0, inf), (101, 0, nan), (102, 0, inf)]
    files = [[*rows[:20], *special], [*rows[20:40], (102, 0, -inf)], [*rows[40:], (100, 1, 2.0)]]
    source = make_input("k bigint, v bigint, d double").add_all(files)
    job = Job("twice")
    inner = {"n": "count(*)", "total": "sum(v)", "d": "sum(d)", "c": "sum(cast(v AS decimal(9,2)))"}
    outer = {
        "keys": "count(*)",
        "keys_some": "count(d) FILTER (WHERE total > 10)",
        "total": "sum(total)",
        "mean": "avg(d)",
        "sum_d": "sum(d)",
        "mean_c": "avg(c)",
        "kinds": "count(DISTINCT total, d)",
        "low": "min(c)",
        "high": "max(d)",
    }
    first = job.source("rows", source.stream(spark)).key_by("k")
    changes = first.aggregate(uid="inner", changes=True, **inner)
    assert changes.schema.names[-1] == "_change"
    few = changes.transform(lambda df: df.withColumn("m", df.n % 3))
    out = sinks.Collect()
    few.key_by("m").aggregate(uid="totals", **outer).sink_to(out, uid="out")
    finish(job, tmp_path / "checkpoint", 2)
    found = {key: row for key, row in last_of(out.rows, ("m",)).items() if row["keys"]}
    batch = spark.read.parquet(str(source.folder)).groupBy("k")
    sql = [spark_expr(f"{text} AS {name}") for name, text in inner.items()]
    again = batch.agg(*sql).withColumn("m", spark_expr("n % 3")).groupBy("m")
    expected = again.agg(*(spark_expr(f"{text} AS {name}") for name, text in outer.items()))
    assert_same(found, last_of(expected.collect(), ("m",)))


def test_a_sum_that_overflows_fails_the_run_and_says_so(
    spark: Any, make_input: Any, tmp_path: Any
) -> None:
    source = make_input("k bigint, v bigint").add((1, (1 << 63) - 1)).add((1, 1))
    job = Job("much")
    running(job, job.source("rows", source.stream(spark)), total="sum(v)")
    with pytest.raises(Exception, match="out of the range of bigint"):
        finish(job, tmp_path / "checkpoint")


def test_spark_aggregates_ahead_while_that_leaves_few_rows(
    spark: Any, make_input: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[bool] = []
    choose = PartialChoice.choose

    def watched(self: PartialChoice, epoch: int) -> frozenset[str]:
        found = choose(self, epoch)
        chosen.append("totals" in found)
        return found

    monkeypatch.setattr(PartialChoice, "choose", watched)
    monkeypatch.setattr(partials, "ROWS_MIN", 10)
    few = [(v % 3, v) for v in range(100)]
    many = [(v, v) for v in range(100)]
    source = make_input("k bigint, v bigint").add_all([few, few, many, few, few])
    job = Job("choice")
    out = running(job, job.source("rows", source.stream(spark)), n="count(*)", total="sum(v)")
    run = finish(job, tmp_path / "checkpoint")
    assert chosen == [False, True, True, False, True]
    assert run.metrics().rows_in == 100, "rows are counted, not partials"
    batch = spark.read.parquet(str(source.folder)).groupBy("k")
    expected = batch.agg(spark_expr("count(*) AS n"), spark_expr("sum(v) AS total")).collect()
    assert_same(last_of(out.rows, ("k",)), last_of(expected, ("k",)))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, "has no aggregates"),
        ({"k": "sum(v)"}, "name of another column"),
        ({"x": "median(v)"}, "'median' is not an aggregate"),
        ({"x": "sum(nothing)"}, "nothing"),
        ({"x": "sum(s)"}, ""),
        ({"x": "sum(v)", "emit": "final"}, "has no end"),
        ({"_change": "sum(v)", "changes": True}, "name of another column"),
        ({"changes": "sum(v)"}, "another name"),
    ],
)
def test_what_cannot_be_aggregated_is_refused_at_once(
    spark: Any, make_input: Any, asked: dict[str, str], why: str
) -> None:
    stream = Job("no").source("rows", make_input("k bigint, v bigint, s date").stream(spark))
    with pytest.raises(PlanError, match=why):
        stream.key_by("k").aggregate(uid="totals", **asked)


def test_a_running_aggregate_has_no_late_rows(spark: Any, make_input: Any) -> None:
    source = make_input("k bigint, at timestamp")
    stream = Job("no").source("rows", source.stream(spark), event_time="at")
    result = stream.key_by("k").aggregate(uid="totals", n="count(*)")
    with pytest.raises(PlanError, match="no late rows"):
        result.side("late")
