"""The driver program of the Nexmark crash tests: all queries of examples/nexmark.py in one job.

    python -m tests.spark.programs.nexmark <events> <work> <backend>

Runs what is there, a file of each table to an epoch, and drains. Query q5 is written to
<work>/q5. Reports {"end": status, "error": …} on its output.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples import nexmark

import cairn
from cairn import Job, sinks
from cairn.sinks import Sink


def build(spark: Any, events: Path, taken: Mapping[str, Sink]) -> Job:
    """Return a job that asks queries of the events in Parquet files; each has a sink."""
    job = Job("nexmark", max_parallelism=16)
    tables = {name for query in taken for name in nexmark.tables_of(query)}
    streams = {
        name: job.source(
            name,
            spark.readStream.schema(nexmark.TABLES[name])
            .option("maxFilesPerTrigger", 1)
            .parquet(str(events / name)),
            event_time="date_time",
            watermark=nexmark.WATERMARK,
        )
        for name in sorted(tables)
    }
    for query, sink in taken.items():
        asked = {name: streams[name] for name in nexmark.tables_of(query)}
        nexmark.QUERIES[query](**asked).sink_to(sink, uid=f"out-{query}")
    return job


def file_sinks(work: Path) -> dict[str, Sink]:
    return {query: sinks.Files(str(work / query)) for query in nexmark.QUERIES}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("events", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("backend")
    given = parser.parse_args()
    spark = cairn.session("nexmark", master="local[2]", ui__enabled=False)
    run = build(spark, given.events, file_sinks(given.work)).start(
        checkpoint=str(given.work / "checkpoint"),
        parallelism=2,
        backend=given.backend,
        trigger="available-now",
        drain=True,
    )
    error = None
    try:
        run.wait(240)
    except Exception as failure:
        error = str(failure)
    print(json.dumps({"end": run.status, "error": error}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
