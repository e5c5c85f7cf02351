"""State that expires in real slots: unseen at once, removed by itself, gone after a restart."""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path
from typing import Any

import pytest

from cairn import Job, KeyedProcess, sinks, state
from cairn.state import TTL
from tests.marks import for_soak

HOUR_MS = 3_600_000


class Last(KeyedProcess[Any]):
    """What was seen of the key before, by event time and by the clock."""

    hour = state.Value("long", ttl=TTL("1 hour", clock="event"))
    moment = state.Map("string", "long", ttl="1 second")

    def process(self, row: Any, ctx: Any) -> Any:
        seen = (row.k, row.v, self.hour.get(), len(self.moment))
        self.hour.set(row.v)
        self.moment["v"] = row.v
        return seen


def make_job(spark: Any, rows: Any, out: Path) -> Job:
    job = Job("ttl", max_parallelism=8)
    source = job.source("rows", rows.stream(spark), event_time="ts", watermark="1 minute")
    seen = source.key_by("k").process(
        Last(), schema="k long, v long, hour long, moments long", uid="last"
    )
    seen.sink_to(sinks.Files(str(out)), uid="out")
    return job


@pytest.mark.parametrize("backend", ["heap", for_soak("rocksdb")])
def test_state_expires_and_leaves_the_slots_by_itself(
    spark: Any, make_input: Any, tmp_path: Path, backend: str
) -> None:
    rows = make_input("k long, v long, ts timestamp")
    base = 1_700_000_000_000
    rows.add(*((k, 1, at(base)) for k in range(200)))
    checkpoint, out = str(tmp_path / "checkpoint"), tmp_path / "out"
    more: dict[str, Any] = {"checkpoint": checkpoint, "backend": backend}
    with make_job(spark, rows, out).start(parallelism=2, trigger="0 seconds", **more) as run:
        run.process_all_available()
        deadline = time.monotonic() + 60
        step = 0
        # A key that is not among them moves time on.
        while run.metrics().state_keys > 20:
            assert time.monotonic() < deadline, run.metrics()
            step += 1
            rows.add((1000, step, at(base + step * HOUR_MS)))
            run.process_all_available()
    rows.add(*((k, 2, at(base + step * HOUR_MS)) for k in range(3)))
    make_job(spark, rows, out).start(parallelism=3, trigger="available-now", **more).wait()
    found = spark.read.parquet(str(out)).where("v = 2 and k < 1000").collect()
    assert {tuple(row) for row in found} == {(k, 2, None, 0) for k in range(3)}


def at(ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)
