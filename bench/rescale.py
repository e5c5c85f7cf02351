"""How long does it take to go from 2 to 4 subtasks with 5 M keys, live, compared with Spark's way?

Count and sum per key. cairn: a running job, fed steadily, from the call of `run.rescale(4)` to
the first epoch committed with 4 subtasks; and the bytes of state that epoch lists which were
neither in its parent nor changed by its own rows. Spark: the same keys in a streaming aggregation
on its RocksDB store, stopped, `StreamingCheckpointManager.repartition` from 2 to 4 partitions, and
the restarted query up to its first committed batch. Stopping Spark's query is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from harness import Epochs, Feed, file_stream, files_of, note, report, work_dir
from keyed_count import counting_job

import cairn
from cairn import sinks
from cairn.storage.manifest import Epoch

BEFORE, AFTER = 2, 4
ROCKSDB_STORE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def run_spark(spark: Any, work: Path, *, keys: int, changed: int) -> dict[str, float]:
    from pyspark.sql import functions as F

    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB_STORE)
    spark.conf.set("spark.sql.shuffle.partitions", BEFORE)
    feed = Feed(work / "input")
    feed.put_all_keys(keys)
    checkpoint = str(work / "spark")

    def run_to_end() -> Any:
        query = (
            file_stream(spark, feed.folder)
            .groupBy("k")
            .agg(F.count("*").alias("n"), F.sum("v").alias("s"))
            .writeStream.format("noop")
            .outputMode("update")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return query

    run_to_end()
    feed.put_some_keys(keys, changed)
    started = time.perf_counter()
    spark._streamingCheckpointManager.repartition(checkpoint, AFTER)
    repartitioned = time.perf_counter()
    query = run_to_end()
    committed = time.perf_counter()
    state = [p for p in query.recentProgress if p["numInputRows"]][-1]["stateOperators"][0]
    found = (state["numRowsTotal"], state["numShufflePartitions"])
    if found != (keys, AFTER):
        raise SystemExit(f"Spark has (keys, partitions) {found}, expected {(keys, AFTER)}")
    return {
        "repartition_s": round(repartitioned - started, 2),
        "to_first_batch_s": round(committed - started, 2),
    }


def run_cairn(spark: Any, work: Path, *, keys: int, changed: int, backend: str) -> dict[str, float]:
    feed = Feed(work / "input")
    feed.put_all_keys(keys)
    preload = feed.files
    done = threading.Event()

    def keep_feeding() -> None:
        while not done.is_set():
            feed.put_some_keys(keys, changed)
            done.wait(0.3)

    checkpoint = work / "cairn"
    job = counting_job(file_stream(spark, feed.folder), sinks.Noop())
    with job.start(
        checkpoint=str(checkpoint),
        parallelism=BEFORE,
        backend=backend,
        trigger="0 seconds",
        retained_epochs=100,
    ) as run:
        epochs = Epochs(run, checkpoint)
        epochs.take(preload)
        feeder = threading.Thread(target=keep_feeding, daemon=True)
        feeder.start()
        try:
            steady = epochs.take(12)[2:]
            started, called_ms = time.perf_counter(), time.time() * 1000
            run.rescale(AFTER)
            while (first := epochs.next()[0])["parallelism"] != AFTER:
                pass
            to_first_epoch_s = time.perf_counter() - started
            after = epochs.take(12)[2:]
        finally:
            done.set()
            feeder.join()
        held = [metrics.state_keys for metrics, _ in (steady[-1], after[-1])]
        if run.parallelism != AFTER or held[0] != held[1]:
            raise SystemExit(f"after the rescale: parallelism {run.parallelism}, keys {held}")
    return {
        "to_first_epoch_s": round(to_first_epoch_s, 3),
        "to_its_commit_s": round((first_epoch(epochs).wall_ms - called_ms) / 1000, 3),
        # The part until the slowest slot was up and had its state.
        "begin_ms": first.timings.begin_ms,
        "bytes_rewritten": bytes_rewritten(epochs),
        "state_bytes": steady[-1][0].state_bytes,
        "epoch_ms_before": statistics.median(metrics.epoch_ms for metrics, _ in steady),
        "epoch_ms_after": statistics.median(metrics.epoch_ms for metrics, _ in after),
    }


def first_epoch(epochs: Epochs) -> Epoch:
    """Return the first epoch committed at the new parallelism."""
    return next(
        epoch
        for _, epoch in epochs.seen
        if all(entry.parallelism == AFTER for entry in epoch.operators.values())
    )


def bytes_rewritten(epochs: Epochs) -> int:
    """Return the bytes of new files in the first epoch that its own rows do not explain."""
    after = first_epoch(epochs)
    assert after.parent is not None
    known = files_of(epochs.manifest(after.parent))
    return sum(
        ref.size
        for id, ref in files_of(after).items()
        if id not in known and not (ref.kind == "delta" and ref.first_epoch == after.number)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=5_000_000)
    parser.add_argument("--changed", type=int, default=10_000, help="keys per steady epoch")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--backend", default="heap")
    parser.add_argument("--only", choices=["cairn", "spark"])
    parser.add_argument("--quick", action="store_true", help="a trial; the result is not kept")
    options = parser.parse_args()
    if options.quick:
        options.keys, options.runs = min(options.keys, 200_000), 1
    spark = cairn.session("bench", master="local[2]", driver__memory="4g", ui__enabled=False)
    measured: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.runs):
        for name in [options.only] if options.only else ["spark", "cairn"]:
            with work_dir() as work:
                if name == "spark":
                    result = run_spark(spark, work, keys=options.keys, changed=options.changed)
                else:
                    result = run_cairn(
                        spark, work,
                        keys=options.keys, changed=options.changed, backend=options.backend,
                    )  # fmt: skip
            measured.setdefault(name, []).append(result)
            note(f"{name}: {result}")
    median = {
        name: {fact: statistics.median(result[fact] for result in results) for fact in results[0]}
        for name, results in measured.items()
    }
    ratios = {}
    if len(median) == 2:
        live_s = median["cairn"]["to_first_epoch_s"]
        ratios = {
            "times_faster": round(median["spark"]["to_first_batch_s"] / live_s, 1),
            "times_faster_than_repartition_alone": round(
                median["spark"]["repartition_s"] / live_s, 1
            ),
        }
    report(
        "rescale",
        {
            **ratios,
            "required": {"times_faster_than_repartition_alone": 10, "bytes_rewritten": 0},
            "median": median,
            "keys": options.keys,
            "subtasks": [BEFORE, AFTER],
            "backend": options.backend,
            "runs": measured,
        },
        keep=not options.quick and not options.only,
    )


if __name__ == "__main__":
    main()
