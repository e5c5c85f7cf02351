"""How fast is a Python function with keyed state and a snapshot every epoch?

Running count and sum per key, epochs of 1 M rows over 1 M keys, each epoch committed.
`--api process` is called row by row and emits a row for each; `--api process_batch` is called with
Arrow batches and emits a row per key and batch; `--api aggregate` has no function at all, and
emits a row per changed key. Compared, interleaved in the same run, with
(a) the plain pipe: the same source and settings, `repartition` by key into as many partitions, an
identity mapInArrow and Spark's noop sink, and
(b) PySpark's transformWithState on a slice small enough to finish.
With `--backend rocksdb` also (c) cairn with that backend, and its part of the heap's figure.
The first epoch of every run is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from harness import file_stream, note, report, work_dir, write_files

import cairn
from cairn import BatchProcess, Job, KeyedProcess, sinks, state
from cairn.driver.spark_config import set_epoch_config


class Count(KeyedProcess):
    count = state.Value("long", default=0)
    total = state.Value("double", default=0.0)

    def process(self, row: Any, ctx: Any) -> Any:
        n = self.count.get() + 1
        s = self.total.get() + row.v
        self.count.set(n)
        self.total.set(s)
        return row.k, n, s


class BatchCount(BatchProcess):
    held = state.Value("struct<n: bigint, s: double>", default={"n": 0, "s": 0.0})

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        rows = pa.table({"k": ctx.keys, "v": batch["v"]})
        found = rows.group_by("k", use_threads=False).aggregate([([], "count_all"), ("v", "sum")])
        k, n, s = (found[name].combine_chunks() for name in ("k", "count_all", "v_sum"))
        held = self.held.get_many(k)
        n, s = pc.add(n, held.field("n")), pc.add(s, held.field("s"))
        self.held.put_many(k, pa.StructArray.from_arrays([n, s], ["n", "s"]))
        return pa.record_batch([k, n, s], ["k", "n", "s"])


OF_PIPE = {"process": 0.40, "process_batch": 0.75, "aggregate": 0.75}
"""The part of the plain pipe's rate that is required, by `--api`."""
PARALLELISM = 2
SCHEMA = "k long, n long, s double"


def counting_job(source: Any, sink: sinks.Sink, api: str = "process") -> Job:
    job = Job("keyed-count")
    keyed: Any = job.source("rows", source).key_by("k")
    if api == "process":
        counts = keyed.process(Count(), schema=SCHEMA, uid="count")
    elif api == "process_batch":
        counts = keyed.process_batch(BatchCount(), schema=SCHEMA, uid="count")
    else:
        counts = keyed.aggregate(n="count(*)", s="sum(v)", uid="count")
    counts.sink_to(sink, uid="out")
    return job


def rate(ends: list[float], rows_per_epoch: int) -> float:
    """Rows per second after the first epoch."""
    return rows_per_epoch * (len(ends) - 1) / (ends[-1] - ends[0])


def run_cairn(
    spark: Any, source: Path, work: Path, sink: sinks.Sink, rows: int, api: str, backend: str
) -> float:
    run = counting_job(file_stream(spark, source), sink, api).start(
        checkpoint=str(work / f"checkpoint-{backend}"),
        parallelism=PARALLELISM,
        backend=backend,
        trigger="available-now",
    )
    run.wait()
    ends = sorted(e.wall_ms / 1000 for e in run.epochs())
    return rate(ends, rows)


def run_pipe(spark: Any, source: Path, work: Path, rows: int) -> float:
    """The plain pipe: a shuffle by key, Python and back, and the rows are dropped."""

    def identity(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    ends: list[float] = []

    def epoch(df: Any, batch_id: int) -> None:
        set_epoch_config(df.sparkSession)
        shuffled = df.repartition(PARALLELISM, "k")
        piped = shuffled.mapInArrow(identity, "k long, v double")
        piped.write.format("noop").mode("overwrite").save()
        ends.append(time.time())

    query = (
        file_stream(spark, source)
        .writeStream.foreachBatch(epoch)
        .option("checkpointLocation", str(work / "pipe"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return rate(ends, rows)


def run_transform_with_state(spark: Any, source: Path, work: Path, rows: int) -> float:
    from pyspark.sql.streaming import StatefulProcessor

    class Processor(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.acc = handle.getValueState("acc", "n long, s double")

        def handleInputRows(self, key: Any, rows: Any, timers: Any) -> Iterator[Any]:
            from pyspark.sql import Row

            n, s = self.acc.get() if self.acc.exists() else (0, 0.0)
            for row in rows:
                n, s = n + 1, s + row.v
                yield Row(k=key[0], n=n, s=s)
            self.acc.update((n, s))

        def close(self) -> None:
            pass

    spark.conf.set(
        "spark.sql.streaming.stateStore.providerClass",
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    )
    query = (
        file_stream(spark, source)
        .groupBy("k")
        .transformWithState(Processor(), "k long, n long, s double", "Update", "None")
        .writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", str(work / "tws"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    progress = [p for p in query.recentProgress if p["numInputRows"]][1:]
    return rows * len(progress) / (sum(p["batchDuration"] for p in progress) / 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows per epoch")
    parser.add_argument("--epochs", type=int, default=10, help="measured epochs per run")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--slice-rows", type=int, default=20_000, help="per epoch of (b)")
    parser.add_argument("--sink", choices=["noop", "files"], default="noop")
    parser.add_argument("--backend", default="heap", help="measured beside the heap")
    parser.add_argument("--api", choices=list(OF_PIPE), default="process")
    options = parser.parse_args()
    spark = cairn.session("bench", master="local[2]", driver__memory="4g", ui__enabled=False)
    measured: dict[str, list[float]] = {"cairn": [], "pipe": [], "transform_with_state": []}
    beside = None if options.backend == "heap" else f"cairn_{options.backend}"
    if beside:
        measured[beside] = []
    with work_dir() as work:
        big, small = work / "big", work / "small"
        write_files(big, files=options.epochs + 1, rows=options.rows, keys=options.keys)
        write_files(small, files=4, rows=options.slice_rows, keys=options.keys)

        def measure(name: str, run: Callable[[], float]) -> None:
            measured[name].append(run())
            note(f"{name}: {measured[name][-1]:,.0f} rows/s")

        for index in range(options.runs):
            here = work / str(index)
            sink = sinks.Noop() if options.sink == "noop" else sinks.Files(str(here / "out"))
            measure("pipe", partial(run_pipe, spark, big, here, options.rows))
            cairn_on = partial(run_cairn, spark, big, here, sink, options.rows, options.api)
            measure("cairn", partial(cairn_on, "heap"))
            if beside:
                measure(beside, partial(cairn_on, options.backend))
            measure(
                "transform_with_state",
                lambda: run_transform_with_state(spark, small, here, options.slice_rows),  # noqa: B023
            )
    median = {name: statistics.median(rates) for name, rates in measured.items()}
    of_heap = {}
    if beside:
        of_heap = {
            "of_heap": round(median[beside] / median["cairn"], 4),
            "required_of_heap": 0.40,
        }
    kinds = [
        kind
        for kind in (options.api, options.sink, options.backend)
        if kind not in ("process", "noop", "heap")
    ]
    report(
        "_".join(["keyed_count", *kinds]),
        {
            **of_heap,
            "rows_per_s": {name: round(rate) for name, rate in median.items()},
            "runs": {name: [round(r) for r in rates] for name, rates in measured.items()},
            "of_pipe": round(median["cairn"] / median["pipe"], 4),
            "times_transform_with_state": round(
                median["cairn"] / median["transform_with_state"], 1
            ),
            "required": {"of_pipe": OF_PIPE[options.api], "times_transform_with_state": 50},
            "rows_per_epoch": options.rows,
            "epochs": options.epochs,
            "keys": options.keys,
        },
    )


if __name__ == "__main__":
    main()
