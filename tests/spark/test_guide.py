"""The guide to time: its programs are put together as they stand, and the job they make runs."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from cairn import BatchProcess, Job, KeyedProcess, sinks, state

GUIDE = (Path(__file__).parents[2] / "docs" / "time.md").read_text()


class Fraud(KeyedProcess):
    def process(self, row: Any, ctx: Any) -> Any:
        return row.account, row.amount


def test_the_programs_of_the_guide_make_a_job_that_runs(
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
    for code in re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL):
        exec(code, names)
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


def test_the_guide_names_every_function_that_aggregates() -> None:
    from cairn.aggregates.parse import FUNCTIONS

    assert not [name for name in FUNCTIONS if f"`{name}`" not in GUIDE]
