"""What does an epoch of 100 rows cost, compared with a bare foreachBatch that does no work?

The bare one has the same source, settings and shuffles, and behind each shuffle an identity
mapInArrow whose Python function is built once, like cairn's. `--levels` is the number of shuffles.
Runs alternate; the first epochs of each are left out; times are Spark's own for the whole trigger.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from harness import note, report, work_dir
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.util import PythonEvalType

import cairn
from cairn import Job, KeyedProcess, sinks, state
from cairn.driver.spark_config import set_epoch_config

WARM_UP = 10
OF_BARE = {1: 1.15, 2: 1.25, 3: 1.25}
"""The ratio that is required, by `--levels`."""


class Total(KeyedProcess):
    total = state.Value("double", default=0.0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.total.set(self.total.get() + row.v)
        return row.k, self.total.get()


def totals_job(rows: Any, levels: int) -> Job:
    job = Job("epoch-overhead")
    stream: Any = job.source("rows", rows)
    for level in range(levels):
        stream = stream.key_by("k").process(
            Total(), schema="k long, v double", uid=f"total-{level}"
        )
    stream.sink_to(sinks.Noop(), uid="out")
    return job


def source(spark: Any, rows: int) -> Any:
    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows)
    return stream.load().selectExpr("value % 1000 AS k", "cast(value AS double) AS v")


def trigger_times(query: Any, epochs: int) -> list[float]:
    while len(query.recentProgress) < epochs + WARM_UP and query.isActive:
        time.sleep(0.2)
    if query.exception() is not None:
        raise query.exception()
    return [p["durationMs"]["triggerExecution"] for p in query.recentProgress[WARM_UP:]]


def run_bare(spark: Any, work: Path, rows: int, epochs: int, levels: int) -> list[float]:
    def identity(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    udf = pandas_udf(
        identity,
        returnType="k long, v double, subtask int",
        functionType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF,
    )
    function = udf(F.col("k"), F.col("v"), F.col("subtask"))
    is_set = False

    def epoch(df: Any, batch_id: int) -> None:
        nonlocal is_set
        if not is_set:
            set_epoch_config(df.sparkSession)
            is_set = True
        for _ in range(levels):
            rows = df.selectExpr("k", "v", "cast(pmod(xxhash64(k), 2) AS int) AS subtask")
            shuffled = rows.repartitionById(2, F.col("subtask"))
            jdf = shuffled._jdf.mapInArrow(function._jc, False, None)
            df = DataFrame(jdf, df.sparkSession)
        df.collect()

    query = (
        source(spark, rows)
        .writeStream.foreachBatch(epoch)
        .option("checkpointLocation", str(work / "bare"))
        .start()
    )
    times = trigger_times(query, epochs)
    query.stop()
    return times


def run_cairn(spark: Any, work: Path, rows: int, epochs: int, levels: int) -> list[float]:
    job = totals_job(source(spark, rows), levels)
    with job.start(checkpoint=str(work / "ckpt"), parallelism=2, trigger="0 seconds") as run:
        return trigger_times(run._engine.query, epochs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=60, help="measured epochs per run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--levels", type=int, choices=list(OF_BARE), default=1)
    options = parser.parse_args()
    spark = cairn.session("bench", master="local[2]", ui__enabled=False)
    medians: dict[str, list[float]] = {"bare": [], "cairn": []}
    with work_dir() as work:
        for index in range(options.runs):
            for name, run in (("bare", run_bare), ("cairn", run_cairn)):
                times = run(spark, work / str(index), options.rows, options.epochs, options.levels)
                medians[name].append(statistics.median(times))
                note(f"{name}: {medians[name][-1]:.0f} ms")
    ratio = statistics.median(medians["cairn"]) / statistics.median(medians["bare"])
    report(
        "epoch_overhead" if options.levels == 1 else f"epoch_overhead_{options.levels}_levels",
        {
            "of_bare": round(ratio, 3),
            "required": {"of_bare": OF_BARE[options.levels]},
            "median_ms": {name: statistics.median(values) for name, values in medians.items()},
            "runs_ms": medians,
            "rows_per_epoch": options.rows,
        },
    )


if __name__ == "__main__":
    main()
