"""How fast is state read as a DataFrame, against Spark's own `statestore` reader?

A count and a sum per key over 5 M keys, kept by cairn and by Spark's streaming aggregation, with
its default state store and with its RocksDB one, all from the same files. Each state is then read
in full, in turns, with every column looked at (a count of rows, a sum over the key and over both
values): rows per second of each, and their ratios.

A result is kept of 5 M keys only.

    python bench/read_state.py [--keys 5000000] [--runs 5] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from harness import Feed, file_stream, note, report, work_dir
from keyed_count import counting_job

import cairn
from cairn import sinks

KEYS = 5_000_000
WARM_UP = 3
"""At first Python's workers are started, and for some time Java compiles both."""
PROVIDER = "spark.sql.streaming.stateStore.providerClass"
PROVIDERS = {
    name: f"org.apache.spark.sql.execution.streaming.state.{kind}StateStoreProvider"
    for name, kind in {"default": "HDFSBacked", "rocksdb": "RocksDB"}.items()
}


def fill_cairn(spark: Any, source: Path, checkpoint: Path, backend: str) -> None:
    run = counting_job(file_stream(spark, source), sinks.Noop(), "process_batch").start(
        checkpoint=str(checkpoint), parallelism=2, backend=backend, trigger="available-now"
    )
    run.wait()


def fill_spark(spark: Any, source: Path, checkpoint: Path, provider: str) -> None:
    spark.conf.set(PROVIDER, PROVIDERS[provider])
    aggregated = file_stream(spark, source).groupBy("k").agg({"*": "count", "v": "sum"})
    query = (
        aggregated.writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def read_cairn(spark: Any, checkpoint: Path) -> Any:
    frame = cairn.read_state(spark, str(checkpoint), "count", "held")
    return frame.selectExpr("k", "value.n n", "value.s s")


def read_spark(spark: Any, checkpoint: Path, provider: str) -> Any:
    spark.conf.set(PROVIDER, PROVIDERS[provider])
    frame = spark.read.format("statestore").load(str(checkpoint))
    return frame.selectExpr("key.k k", "value.count n", "value.sum s")


def measure(frame: Any) -> tuple[float, tuple[Any, ...]]:
    started = time.perf_counter()
    (row,) = frame.selectExpr("count(*)", "sum(k)", "sum(n)", "round(sum(s), 3)").collect()
    return time.perf_counter() - started, tuple(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--backend", default="heap")
    parser.add_argument("--quick", action="store_true", help="fewer keys, one run")
    options = parser.parse_args()
    keys = 200_000 if options.quick else options.keys
    runs = 1 if options.quick else options.runs
    spark = cairn.session(
        "bench",
        master="local[2]",
        ui__enabled=False,
        driver__memory="4g",
        sql__shuffle__partitions=2,
    )
    seconds: dict[str, list[float]] = {name: [] for name in ("cairn", *PROVIDERS)}
    with work_dir() as work:
        Feed(work / "input").put_all_keys(keys)
        fill_cairn(spark, work / "input", work / "cairn", options.backend)
        note("cairn's state is there")
        for name in PROVIDERS:
            fill_spark(spark, work / "input", work / name, name)
            note(f"Spark's state is there ({name})")
        for run in range(WARM_UP + runs):
            took, found = {}, {}
            took["cairn"], found["cairn"] = measure(read_cairn(spark, work / "cairn"))
            for name in PROVIDERS:
                took[name], found[name] = measure(read_spark(spark, work / name, name))
            if len(set(found.values())) > 1 or found["cairn"][0] != keys:
                raise SystemExit(f"the states differ: {found}")
            note(", ".join(f"{name} {each:.2f} s" for name, each in took.items()))
            if run >= WARM_UP:
                for name, each in took.items():
                    seconds[name].append(round(each, 3))
    spark.stop()
    rates = {name: round(keys / statistics.median(each)) for name, each in seconds.items()}
    result = {
        "ratio": {name: round(rates["cairn"] / rates[name], 2) for name in PROVIDERS},
        "required": {"ratio": 3},
        "rows_per_s": rates,
        "keys": keys,
        "backend": options.backend,
        "seconds": seconds,
    }
    report("read_state", result, keep=keys == KEYS)


if __name__ == "__main__":
    main()
