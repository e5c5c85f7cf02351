"""A driver program whose function imports a module that only `--py-files` brings.

    PYSPARK_SUBMIT_ARGS="--py-files code.zip pyspark-shell" \
        python -m tests.spark.programs.shipped <input> <work> --checkpoint … --master …

Reports {"end": status, "error": …} in a line of JSON.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cairn import Job, KeyedProcess, sinks, state
from tests.spark.programs.ledger import report
from tests.spark.support import Input

SCHEMA = "k bigint"


class Score(KeyedProcess[Any]):
    """Add up what the shipped module returns; emit where it was loaded from."""

    total = state.Value("bigint", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        import shipped_rules

        self.total.set(self.total.get() + shipped_rules.score(row.k))
        yield row.k, self.total.get(), shipped_rules.__file__


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("input")
    parser.add_argument("work")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--conf", nargs="*", default=[])
    options = parser.parse_args()

    import cairn

    conf = dict(setting.partition("=")[::2] for setting in options.conf)
    spark = cairn.session("shipped", master=options.master, ui__enabled=False, **conf)
    job = Job("shipped", max_parallelism=8)
    rows = job.source("rows", Input(Path(options.input), SCHEMA).stream(spark)).key_by("k")
    scored = rows.process(Score(), schema="k bigint, total bigint, file string", uid="score")
    scored.sink_to(sinks.Files(f"{options.work}/out"), uid="out")
    with job.start(checkpoint=options.checkpoint, parallelism=2, trigger="available-now") as run:
        run.wait(150)
    report(end=run.status, error=None if run.error is None else str(run.error))
    spark.stop()


if __name__ == "__main__":
    main()
