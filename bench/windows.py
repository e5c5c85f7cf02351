"""How fast are tumbling windows compared with Spark's own streaming aggregation?

Count per key and window of 10 s, epochs of 1 M rows over 1 M keys. A file is an epoch and
covers 5 s of event time, out of order; the watermark is 5 s behind, so windows of two
or three epochs are open and one closes every other epoch. Compared, interleaved in the same
run and over the same files, with Structured Streaming on as many partitions, in append mode,
(a) with its RocksDB state store and (b) with the default one.
The first epochs of every run, before a window has closed, are left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import SEED, note, report, work_dir

import cairn
from cairn import Job, sinks, windows

PROVIDERS = "org.apache.spark.sql.execution.streaming.state"
STORES = {
    "rocksdb": f"{PROVIDERS}.RocksDBStateStoreProvider",
    "default": f"{PROVIDERS}.HDFSBackedStateStoreProvider",
}
FILE_S = 5
PARALLELISM = 2
WARM_UP = 4
"""Epochs that are not measured: the first window closes in the last of them."""


def write_files(folder: Path, *, files: int, rows: int, keys: int) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(SEED)
    for number in range(files):
        start = 1_700_000_000_000_000 + number * FILE_S * 1_000_000
        # A second around the file's own time: rows out of order, none of them late.
        at = start + rng.integers(-1_000_000, FILE_S * 1_000_000, rows)
        table = pa.table(
            {
                "k": rng.integers(0, keys, rows),
                "at": pa.array(at).cast(pa.timestamp("us", "UTC")),
            }
        )
        path = folder / f"{number:06d}.parquet"
        pq.write_table(table, path, row_group_size=max(1 << 14, rows // 8))
        # The file source takes files in order of their age.
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


def file_stream(spark: Any, folder: Path) -> Any:
    stream = spark.readStream.schema("k long, at timestamp").option("maxFilesPerTrigger", 1)
    return stream.parquet(str(folder))


def run_cairn(spark: Any, source: Path, work: Path, rows: int) -> float:
    job = Job("windows")
    (
        job.source("rows", file_stream(spark, source), event_time="at", watermark="5 seconds")
        .key_by("k")
        .window(windows.tumbling("10 seconds"))
        .aggregate(n="count(*)", uid="count")
        .sink_to(sinks.Noop(), uid="out")
    )
    run = job.start(
        checkpoint=str(work / "cairn"), parallelism=PARALLELISM, trigger="available-now"
    )
    run.wait()
    ends = sorted(epoch.wall_ms / 1000 for epoch in run.epochs() if epoch.rows_in)
    return rows * (len(ends) - WARM_UP) / (ends[-1] - ends[WARM_UP - 1])


def run_spark(spark: Any, source: Path, work: Path, rows: int, store: str) -> float:
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", STORES[store])
    query = (
        file_stream(spark, source)
        .withWatermark("at", "5 seconds")
        .groupBy(ten_seconds(), "k")
        .count()
        .writeStream.format("noop")
        .outputMode("append")
        .option("checkpointLocation", str(work / f"spark-{store}"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    progress = [p for p in query.recentProgress if p["numInputRows"]][WARM_UP:]
    return rows * len(progress) / (sum(p["batchDuration"] for p in progress) / 1000)


def ten_seconds() -> Any:
    from pyspark.sql import functions as F

    return F.window("at", "10 seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows per epoch")
    parser.add_argument("--epochs", type=int, default=10, help="measured epochs per run")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a trial; nothing is kept")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.epochs, options.keys, options.runs = 100_000, 4, 100_000, 1
    spark = cairn.session(
        "bench",
        master=f"local[{PARALLELISM}]",
        driver__memory="4g",
        ui__enabled=False,
        sql__shuffle__partitions=PARALLELISM,
    )
    measured: dict[str, list[float]] = {"cairn": [], **{f"spark_{s}": [] for s in STORES}}
    with work_dir() as work:
        source = work / "in"
        files = options.epochs + WARM_UP
        write_files(source, files=files, rows=options.rows, keys=options.keys)
        for index in range(options.runs):
            here = work / str(index)
            measured["cairn"].append(run_cairn(spark, source, here, options.rows))
            for store in STORES:
                rate = run_spark(spark, source, here, options.rows, store)
                measured[f"spark_{store}"].append(rate)
            note(", ".join(f"{name}: {rates[-1]:,.0f} rows/s" for name, rates in measured.items()))
    median = {name: statistics.median(rates) for name, rates in measured.items()}
    report(
        "windows",
        {
            "rows_per_s": {name: round(rate) for name, rate in median.items()},
            "runs": {name: [round(rate) for rate in rates] for name, rates in measured.items()},
            "times_spark": {
                store: round(median["cairn"] / median[f"spark_{store}"], 2) for store in STORES
            },
            "aimed_for": {"rocksdb": 3.0, "default": 1.5},
            "rows_per_epoch": options.rows,
            "epochs": options.epochs,
            "keys": options.keys,
        },
        keep=not options.quick,
    )


if __name__ == "__main__":
    main()
