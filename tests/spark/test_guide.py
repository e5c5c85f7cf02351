"""The guides: their programs are put together as they stand, and the jobs they make run."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import Any

import deltalake
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from cairn import BatchProcess, Job, KeyedProcess, Process, sinks, state
from tests.servers import postgres
from tests.servers import redis as redis_server

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "time.md").read_text()
STREAMS = (DOCS / "streams.md").read_text()
SINKS = (DOCS / "sinks.md").read_text()


class Fraud(KeyedProcess):
    def process(self, row: Any, ctx: Any) -> Any:
        return row.account, row.amount


def run_programs(guide: str, names: dict[str, Any]) -> None:
    for code in re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL):
        exec(code, names)


def test_the_programs_of_the_guide_to_time_make_a_job_that_runs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    rows = [(1, 5.0, at), (1, 7.0, at + dt.timedelta(seconds=30)), (2, 1.0, None)]
    account, amount, ts = (list(column) for column in zip(*rows, strict=True))
    (tmp_path / "in").mkdir()
    table = pa.table({"account": account, "amount": amount, "ts": ts})
    pq.write_table(table.cast(table.schema.set(2, pa.field("ts", pa.timestamp("us", "UTC")))),
                   tmp_path / "in" / "1.parquet")  # fmt: skip
    stream = spark.readStream.schema("account long, amount double, ts timestamp").parquet(
        str(tmp_path / "in")
    )
    job = Job("guide")
    names: dict[str, Any] = {
        "job": job, "stream": stream, "Fraud": Fraud, "KeyedProcess": KeyedProcess,
        "BatchProcess": BatchProcess, "state": state, "sinks": sinks, "pa": pa, "pc": pc,
    }  # fmt: skip
    run_programs(GUIDE, names)
    per_minute, totals = sinks.Collect(), sinks.Collect()
    names["per_minute"].sink_to(per_minute, uid="out-per-minute")
    names["totals"].sink_to(totals, uid="out-totals")
    run = job.start(
        checkpoint=str(tmp_path / "checkpoint"), parallelism=2, trigger="available-now", drain=True
    )
    run.wait()
    assert [tuple(row) for row in per_minute.rows] == [
        (1, at, at + dt.timedelta(minutes=1), 12.0, 2, 7.0)
    ]
    assert sorted(tuple(row) for row in totals.rows) == [(1, 12.0, 2), (2, 1.0, 1)]
    late = pq.read_table(tmp_path / "late")
    assert late["account"].to_pylist() == [2], "it has no event time"


def test_the_programs_of_the_guide_to_streams_make_a_job_that_runs(
    spark: SparkSession, tmp_path: Path, make_input: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def at(minutes: int) -> dt.datetime:
        return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(minutes=minutes)

    orders = make_input("id int, ordered timestamp")
    orders.add((1, at(0)), (2, at(1)), (4, at(2)))
    payments = make_input("order_id bigint, amount double, paid timestamp")
    payments.add((1, 50.0, at(5)), (1, 50.0, at(6)), (3, -5.0, at(7)), (2, 2000.0, at(20)),
                 (5, None, at(8)))  # fmt: skip
    rules = make_input("kind string, value double").add(("amount", 100.0))
    edges = make_input("node bigint, other bigint, label bigint")
    edges.add(*[row for a, b in [(1, 2), (2, 3), (8, 7)] for row in [(a, b, None), (b, a, None)]])
    names: dict[str, Any] = {
        "job": Job("guide", max_parallelism=8), "KeyedProcess": KeyedProcess, "Process": Process,
        "state": state, "sinks": sinks, "order_rows": orders.stream(spark),
        "payment_rows": payments.stream(spark), "rule_rows": rules.stream(spark),
        "edge_rows": edges.stream(spark),
    }  # fmt: skip
    run_programs(STREAMS, names)
    taken = {}
    for name in ("overdue", "paid", "packs", "alerts", "booked", "refunds", "labels"):
        taken[name] = sinks.Collect()
        names[name].sink_to(taken[name], uid=f"out-{name}")
    run = names["job"].start(
        checkpoint=str(tmp_path / "checkpoint"), parallelism=2, trigger="available-now",
        drain=True, on_error="dead-letter",
    )  # fmt: skip
    assert run.wait(120)
    found = {name: sorted(map(tuple, sink.rows), key=repr) for name, sink in taken.items()}
    assert found["overdue"] == [(4, at(2))]
    assert found["paid"] == [
        (1, at(0), 50.0, at(5)),
        (1, at(0), 50.0, at(6)),
        (2, at(1), None, None),
        (4, at(2), None, None),
    ]
    packs = [tuple(orders) for (orders,) in found["packs"]]
    packed = [order for orders in packs for order in orders]
    # Of the four, what waits for a full pack is at most one in each subtask.
    assert packs and {len(orders) for orders in packs} == {2}
    assert len(set(packed)) == len(packed) and set(packed) <= {1, 2, 3, 5}
    assert found["alerts"] == [(2, 2000.0)]
    assert found["booked"] == [(1, 50.0), (1, 50.0), (2, 2000.0)]
    assert found["refunds"] == [(3, 5.0)]
    labels: dict[int, int] = {}
    for node, label in found["labels"]:
        labels[node] = min(label, labels.get(node, label))
    assert labels == {1: 1, 2: 1, 3: 1, 7: 7, 8: 7}
    assert pq.read_table(tmp_path / "duplicates")["order_id"].to_pylist() == [1]
    (letter,) = pq.read_table(tmp_path / "errors").to_pylist()
    assert letter["operator"] == "booked" and letter["error"].startswith("TypeError")


def test_the_guide_names_every_function_that_aggregates() -> None:
    from cairn.aggregates.parse import FUNCTIONS

    assert not [name for name in FUNCTIONS if f"`{name}`" not in GUIDE]


def test_the_programs_of_the_guide_to_sinks_make_a_job_that_runs(
    spark: SparkSession, tmp_path: Path, make_input: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, redis = postgres().new_database(), redis_server()
    monkeypatch.chdir(tmp_path)
    # The executors' environment is that of the session, which was there before.
    addresses = {"env:PGURL": database, "env:REDIS_URL": f"unix://{redis.socket_file}"}
    # And so is the folder that Spark takes paths to be in.
    addresses['"lake/'] = f'"{tmp_path}/lake/'
    guide = re.sub("|".join(addresses), lambda found: addresses[found[0]], SINKS)
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    payments = make_input("account bigint, country string, amount double, ts timestamp")
    payments.add((1, "de", 5.0, at), (2, "fr", 1.0, at), (1, "de", 7.0, at + dt.timedelta(hours=1)))
    job = Job("guide-sinks", max_parallelism=4)
    seen: list[int] = []
    names = {"job": job, "stream": payments.stream(spark), "sinks": sinks, "seen": seen}
    run_programs(guide, names)
    job.start(
        checkpoint=str(tmp_path / "checkpoint"), parallelism=2, trigger="available-now"
    ).wait()

    assert {path.parent.name for path in (tmp_path / "lake/payments").rglob("*.parquet")} == {
        "country=de", "country=fr",
    }  # fmt: skip
    small = sinks.published(str(tmp_path / "lake/small"))
    assert sum(pq.read_table(file).num_rows for file in small) == 3
    assert spark.read.parquet(str(tmp_path / "lake/small")).count() == 3
    assert spark.read.json(str(tmp_path / "lake/json")).count() == 3
    assert spark.read.json(str(tmp_path / "lake/spark")).count() == 3
    assert spark.read.parquet(str(tmp_path / "lake/by-epoch/2")).count() == 3
    with psycopg.connect(database) as connection:
        assert connection.execute("select count(*) from payments").fetchone() == (3,)
        latest = connection.execute("select account, amount from latest order by 1").fetchall()
        assert latest == [(1, 7.0), (2, 1.0)]
    assert deltalake.DeltaTable(str(tmp_path / "lake/delta")).to_pyarrow_table().num_rows == 3
    assert deltalake.DeltaTable(str(tmp_path / "lake/latest")).to_pyarrow_table().num_rows == 2
    assert redis.hget("account:1", "amount") == b"7"
    assert sorted(seen) == [1, 1, 2]
