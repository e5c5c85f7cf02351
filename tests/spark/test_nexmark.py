"""The queries of examples/nexmark.py give the answers of a batch query over the same events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.nexmark_events import write_events
from cairn import Job, sinks
from examples import nexmark
from tests.spark.nexmark_answers import answers
from tests.spark.support import finish

CHANGING = {"q17": 2, "q18": 2}
"""Queries whose answers change, and the number of key columns: the newest row of a key counts."""


def latest(rows: list[Any], keys: int) -> list[tuple[Any, ...]]:
    return list({tuple(row[:keys]): tuple(row) for row in rows}.values())


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nexmark")
    write_events(folder, 3000, rate=100, seed=7, slab_events=1000, forms=("parquet",))
    return folder / "parquet"


def run_queries(spark: Any, events: Path, checkpoint: Path, backend: str = "heap") -> Any:
    """Run all queries as one job over all files; return the rows of each."""
    job = Job("nexmark")
    streams = {
        name: job.source(
            name,
            spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(
                str(events / name)
            ),
            event_time="date_time",
            watermark=nexmark.WATERMARK,
        )
        for name, schema in nexmark.TABLES.items()
    }
    taken = {}
    for name, query in nexmark.QUERIES.items():
        taken[name] = sinks.Collect()
        tables = {table: streams[table] for table in nexmark.tables_of(name)}
        query(**tables).sink_to(taken[name], uid=f"out-{name}")
    finish(job, checkpoint, backend=backend, drain=True)
    return {name: sink.rows for name, sink in taken.items()}


def test_queries_agree_with_batch(spark: Any, events: Path, tmp_path: Path) -> None:
    found = run_queries(spark, events, tmp_path / "checkpoint")
    expected = answers(events, list(nexmark.QUERIES))
    for name, rows in found.items():
        keys = CHANGING.get(name)
        mine = [tuple(row) for row in rows] if keys is None else latest(rows, keys)
        assert expected[name], f"{name} asks for nothing"
        assert sorted(mine, key=repr) == expected[name], name
