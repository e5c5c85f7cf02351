"""The driver program of the crash tests about time: windows made of timers, and late rows.

    python -m tests.spark.programs.alarms <input> <work>

Runs what is there and drains. Reports {"end": status, "error": …} on its output.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
from pathlib import Path
from typing import Any

import cairn
from cairn import Job, KeyedProcess, sinks, state
from tests.spark.support import T0, Input

SCHEMA = "id bigint, k bigint, ts timestamp"


def at(second: float) -> dt.datetime:
    return T0 + dt.timedelta(seconds=second)


class Tens(KeyedProcess[Any]):
    """The ids of each ten seconds, once the watermark is past them."""

    ids = state.Map("bigint", "string")

    def process(self, row: Any, ctx: Any) -> None:
        end_ms = (ctx.event_time_ms // 10_000 + 1) * 10_000
        self.ids[end_ms] = f"{self.ids.get(end_ms, '')} {row.id}"
        ctx.timers.event(end_ms)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        for id in self.ids.pop(time_ms).split():
            yield int(id), ctx.key, dt.datetime.fromtimestamp(time_ms / 1000, dt.UTC)


def build(spark: Any, input_folder: Any, work: Any) -> Job:
    job = Job("alarms", max_parallelism=16)
    rows = job.source(
        "rows", Input(Path(input_folder), SCHEMA).stream(spark), event_time="ts", watermark="5 s"
    )
    tens = rows.key_by("k").process(Tens(), schema="id bigint, k bigint, ten timestamp", uid="tens")
    tens.sink_to(sinks.Files(str(Path(work) / "tens")), uid="tens-out")
    tens.side("late").sink_to(sinks.Files(str(Path(work) / "late")), uid="late")
    return job


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("input")
    parser.add_argument("work")
    given = parser.parse_args()
    spark = cairn.session("alarms", master="local[2]", ui__enabled=False)
    job = build(spark, given.input, given.work)
    run = job.start(
        checkpoint=str(Path(given.work) / "checkpoint"),
        parallelism=2,
        trigger="available-now",
        drain=True,
    )
    error = None
    try:
        run.wait(120)
    except Exception as failure:
        error = str(failure)
    print(json.dumps({"end": run.status, "error": error}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
