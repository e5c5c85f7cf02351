"""The queries of examples/nexmark.py give the answers of a batch query over the same events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.nexmark_answers import answers, settle
from bench.nexmark_events import write_events
from examples import nexmark

from cairn import Job, sinks
from tests.spark.programs.nexmark import build, file_sinks
from tests.spark.support import Program, published


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 events in 30 seconds, in three files of each table."""
    folder = tmp_path_factory.mktemp("nexmark")
    write_events(folder, 3000, rate=100, seed=7, slab_events=1000, forms=("parquet",))
    return folder / "parquet"


def check_answers(found: dict[str, list[Any]], events: Path) -> None:
    expected = answers(events, list(found))
    for query, rows in found.items():
        assert expected[query], f"{query} has an empty answer"
        assert settle(query, rows) == expected[query], query


def run_queries(spark: Any, queries: list[str], events: Path, work: Path, backend: str) -> None:
    taken = {query: sinks.Collect() for query in queries}
    run_to_end(build(spark, events, taken), work, backend)
    check_answers({query: sink.rows for query, sink in taken.items()}, events)


def run_to_end(job: Job, work: Path, backend: str) -> None:
    with job.start(
        checkpoint=str(work / "checkpoint"),
        parallelism=2,
        backend=backend,
        trigger="available-now",
        drain=True,
    ) as run:
        assert run.wait(280), "the run did not end"


def test_all_queries_in_one_job_agree_with_batch(spark: Any, events: Path, tmp_path: Path) -> None:
    run_queries(spark, list(nexmark.QUERIES), events, tmp_path, "heap")


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("query", nexmark.QUERIES)
def test_query_alone_agrees_with_batch(
    query: str, backend: str, spark: Any, events: Path, tmp_path: Path
) -> None:
    run_queries(spark, [query], events, tmp_path, backend)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_queries_agree_with_batch_although_driver_is_killed_in_every_epoch(
    backend: str, spark: Any, events: Path, tmp_path: Path
) -> None:
    for point in ("driver.epoch.ran:1", "driver.manifest.written:1", "driver.sink.committed:8"):
        with Program(
            "nexmark", events, tmp_path, backend, on=spark, CAIRN_CRASH_AT=point
        ) as program:
            program.end(300)
        assert program.killed, f"not killed at {point}: {program.errors[-2000:]}"
    run_to_end(build(spark, events, file_sinks(tmp_path)), tmp_path, backend)
    found = {
        query: [tuple(row.values()) for row in published(tmp_path / query)]
        for query in nexmark.QUERIES
    }
    check_answers(found, events)
