"""A driver program whose operator gives another result each time it runs, before a transform.

    python -m tests.spark.programs.lots <input> <work> --master local-cluster[2,1,1024]

Reports {"end": status, "error": …} in a line of JSON.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path
from typing import Any

from cairn import Job, KeyedProcess, sinks, state
from tests.spark.programs.ledger import report
from tests.spark.support import Input

SCHEMA = "k bigint"
DRAWN = "k bigint, lot bigint"


class Draw(KeyedProcess[Any]):
    """Draw a lot for each key: kept as state, and emitted."""

    lot = state.Value("bigint")

    def process(self, row: Any, ctx: Any) -> Any:
        lot = secrets.randbits(62)
        self.lot.set(lot)
        yield row.k, lot


class Keep(KeyedProcess[Any]):
    """Keep the lot of each key as it arrives."""

    lot = state.Value("bigint")

    def process(self, row: Any, ctx: Any) -> Any:
        self.lot.set(row.lot)


def build(spark: Any, input_folder: Any, keep: KeyedProcess[Any] | None = None) -> Job:
    """Each lot goes three ways: directly, and through two transforms with stages of their own."""
    job = Job("lots", max_parallelism=16)
    rows = job.source("rows", Input(Path(input_folder), SCHEMA).stream(spark))
    drawn = rows.key_by("k").process(Draw(), schema=DRAWN, uid="draw")
    drawn.sink_to(sinks.Noop(), uid="out")
    drawn.key_by("k").process(keep or Keep(), schema=DRAWN, uid="direct")
    for count in (2, 3):
        spread = drawn.transform(lambda df, count=count: df.repartition(count))  # type: ignore[misc]
        spread.key_by("k").process(Keep(), schema=DRAWN, uid=f"over-{count}")
    return job


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("input")
    parser.add_argument("work")
    parser.add_argument("--master", default="local[2]")
    options = parser.parse_args()

    import cairn

    # Tasks run on any executor, wherever their input and their slots are.
    spark = cairn.session("lots", master=options.master, ui__enabled=False, locality__wait="0s")
    job = build(spark, options.input)
    with job.start(
        checkpoint=f"{options.work}/checkpoint", parallelism=1, trigger="available-now"
    ) as run:
        run.wait(120)
    report(end=run.status, error=None if run.error is None else str(run.error))
    spark.stop()


if __name__ == "__main__":
    main()
