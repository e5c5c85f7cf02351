"""Rehearse a run: a streaming query over empty files, with the schemas of the job's sources.

Spark loads and compiles what the query of a run needs, while the run waits for the lead.

Always true here:
- no source of the job is read, and no row reaches its functions;
- no task of it runs after its end;
- executors need not see the files: Spark opens no file without content;
- the folder of the query is a temporary one, which is removed.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCHES: Final = 4
PATIENCE_S: Final = 10.0
_POLL_S: Final = 0.05


def rehearse(
    spark: SparkSession,
    name: str,
    schemas: list[DataFrame],
    make_input: Callable[[list[DataFrame]], DataFrame],
    run_batch: Callable[[DataFrame], None],
    stop: threading.Event,
) -> None:
    """Run a few batches of `make_input` of frames that are like `schemas`; `stop` ends it early."""
    done, running = threading.Event(), threading.Lock()

    def run(rows: DataFrame, batch_id: int) -> None:
        with running:
            if not stop.is_set() and not done.is_set():
                run_batch(rows)
        if batch_id + 1 >= BATCHES:
            done.set()

    with tempfile.TemporaryDirectory(prefix="cairn-rehearsal-") as folder:
        files = Path(folder) / "files"
        files.mkdir()
        for number in range(BATCHES):
            (files / f"{number}.parquet").touch()
        stream = spark.readStream.option("maxFilesPerTrigger", 1)
        frames = [stream.schema(each.schema).parquet(files.as_uri()) for each in schemas]
        query = (
            make_input(frames)
            .writeStream.foreachBatch(run)
            .option("checkpointLocation", (Path(folder) / "query").as_uri())
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
