"""Rehearse a run: two streaming queries of rows that nobody reads.

Spark loads and compiles what the query of a run needs, while the run waits for the lead. The first
query has made-up rows, from files in the format of the job's, and calls no function of the job. The
second one has the plan of the job and the schemas of its sources, over empty files. Each query is
stopped and started again, because a takeover continues a query too.

Always true here:
- no source of the job is read, and no row reaches its functions;
- no task of it runs after its end;
- executors of a cluster need not see the files: there all of them are empty, and Spark opens none;
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

RUNS: Final = 2
BATCHES: Final = 2
"""In each run of a query. The second run goes on where the first one has ended."""
ROWS: Final = 1000
PATIENCE_S: Final = 10.0
_TEXT: Final = "cast(id AS string) AS value"
_COLUMNS: Final = (_TEXT, "id", "id / 2 AS amount", "timestamp_millis(id) AS at")
_POLL_S: Final = 0.05


def rehearse_rows(
    spark: SparkSession,
    name: str,
    partitions: int,
    file_format: str | None,
    stop: threading.Event,
) -> None:
    """Run a few batches of made-up rows through a shuffle and Python; `stop` ends it early.

    They are read from files of this format; without one they come from no file.
    """

    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    def run_batch(rows: DataFrame) -> None:
        spread = rows.repartition(partitions, rows.columns[0])
        spread.mapInArrow(same, spread.schema).collect()

    with tempfile.TemporaryDirectory(prefix="cairn-rehearsal-") as folder:
        if file_format is None:
            rows = spark.readStream.format("rate").option("rowsPerSecond", ROWS).load()
        else:
            files = RUNS * BATCHES
            columns = [_TEXT] if file_format == "text" else _COLUMNS
            made = spark.range(0, files * ROWS, 1, files).selectExpr(*columns)
            path = (Path(folder) / "files").as_uri()
            spark.sparkContext.setJobDescription("cairn: files of a rehearsal")
            made.write.format(file_format).save(path)
            stream = spark.readStream.schema(made.schema).option("maxFilesPerTrigger", 1)
            rows = stream.format(file_format).load(path)
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
        for number in range(RUNS * BATCHES):
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
    deadline_s = time.monotonic() + PATIENCE_S
    for number in range(1, RUNS + 1):
        _run_until(number * BATCHES, deadline_s, rows, name, folder, run_batch, stop)


def _run_until(
    batches: int,
    deadline_s: float,
    rows: DataFrame,
    name: str,
    folder: Path,
    run_batch: Callable[[DataFrame], Any],
    stop: threading.Event,
) -> None:
    """Start the query, or start it again, and run it up to this number of batches."""
    done, running = threading.Event(), threading.Lock()

    def run(rows: DataFrame, batch_id: int) -> None:
        with running:
            if not stop.is_set() and not done.is_set():
                set_epoch_config(rows.sparkSession)
                run_batch(rows)
        if batch_id + 1 >= batches:
            done.set()

    if stop.is_set() or time.monotonic() > deadline_s:
        return
    query = (
        rows.writeStream.foreachBatch(run)
        .option("checkpointLocation", (folder / "query").as_uri())
        .queryName(name)
        .start()
    )
    try:
        while query.isActive and not done.wait(_POLL_S) and not stop.is_set():
            if time.monotonic() > deadline_s:
                break
        failure = query.exception()
    finally:
        done.set()
        with running:
            pass  # Spark would interrupt the batch, and its tasks could outlive it.
        query.stop()
    if failure is not None:
        raise failure
