"""Rehearse a run: two streaming queries of rows that nobody reads.

Spark loads and compiles what the query of a run needs, while the run waits for the lead. The first
query has rows, and calls no function of the job. The second one has the plan of the job and the
schemas of its sources, over empty files.

Always true here:
- no source of the job is read, and no row reaches its functions;
- no task of it runs after its end;
- executors need not see the files: Spark opens no file without content;
- the folder of a query is a temporary one, which is removed.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from cairn.driver.spark_config import set_epoch_config

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCHES: Final = 4
PATIENCE_S: Final = 10.0
_POLL_S: Final = 0.05


def rehearse_rows(spark: SparkSession, name: str, partitions: int, stop: threading.Event) -> None:
    """Run a few batches of generated rows through a shuffle and Python; `stop` ends it early."""

    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    def run_batch(rows: DataFrame) -> None:
        spread = rows.repartition(partitions, "value")
        spread.mapInArrow(same, "timestamp timestamp, value long").collect()

    rows = spark.readStream.format("rate").option("rowsPerSecond", 1000).load()
    with tempfile.TemporaryDirectory(prefix="cairn-rehearsal-") as folder:
        _run(rows, name, Path(folder), run_batch, stop)


def rehearse_plan(
    spark: SparkSession,
    name: str,
    sources: list[DataFrame],
    make_input: Callable[[list[DataFrame]], DataFrame],
    run_batch: Callable[[DataFrame], None],
    stop: threading.Event,
) -> None:
    """Run a few batches of `make_input` of empty frames like `sources`; `stop` ends it early."""
    with tempfile.TemporaryDirectory(prefix="cairn-rehearsal-") as folder:
        files = Path(folder) / "files"
        files.mkdir()
        for number in range(BATCHES):
            (files / f"{number}.parquet").touch()
        stream = spark.readStream.option("maxFilesPerTrigger", 1)
        frames = [stream.schema(each.schema).parquet(files.as_uri()) for each in sources]
        _run(make_input(frames), name, Path(folder), run_batch, stop)


def _run(
    rows: DataFrame,
    name: str,
    folder: Path,
    run_batch: Callable[[DataFrame], Any],
    stop: threading.Event,
) -> None:
    done, running = threading.Event(), threading.Lock()

    def run(rows: DataFrame, batch_id: int) -> None:
        with running:
            if not stop.is_set() and not done.is_set():
                set_epoch_config(rows.sparkSession)
                run_batch(rows)
        if batch_id + 1 >= BATCHES:
            done.set()

    query = (
        rows.writeStream.foreachBatch(run)
        .option("checkpointLocation", (folder / "query").as_uri())
        .queryName(name)
        .start()
    )
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while query.isActive and not done.wait(_POLL_S) and not stop.is_set():
            if time.monotonic() > deadline_s:
                break
    finally:
        done.set()
        with running:
            pass  # Spark would interrupt the batch, and its tasks could outlive it.
        query.stop()
