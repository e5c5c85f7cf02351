"""How much slower is a job when one key has half of all rows?

Count and sum per key, by `process` (row by row) and by `aggregate`, epochs of 1 M rows: keys
uniform over 1 M, and the same with every other row given to one key. The ratio of the two
throughputs is what skew leaves. Rows of one key are one subtask's, so `process` cannot
do better than the share of the busiest; `aggregate` lets Spark aggregate ahead, once an
epoch has shown that it pays. The first two epochs of every run are left out.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from harness import SEED, Feed, file_stream, note, report, work_dir
from keyed_count import counting_job

import cairn
from cairn import sinks

HOT_KEY = 0
PARALLELISM = 2
WARM_UP = 2
APIS = ("process", "aggregate")


def write_files(folder: Path, *, files: int, rows: int, keys: int, hot: float) -> None:
    """Files of (k long, v double); a part of the rows, `hot`, is of one key."""
    rng = np.random.default_rng(SEED)
    feed = Feed(folder)
    for _ in range(files):
        k = rng.integers(0, keys, rows)
        k[rng.random(rows) < hot] = HOT_KEY
        feed.put(k, rng.random(rows))


def run_cairn(spark: Any, source: Path, checkpoint: Path, rows: int, api: str) -> float:
    run = counting_job(file_stream(spark, source), sinks.Noop(), api).start(
        checkpoint=str(checkpoint), parallelism=PARALLELISM, trigger="available-now"
    )
    run.wait()
    ends = sorted(epoch.wall_ms / 1000 for epoch in run.epochs())
    return rows * (len(ends) - WARM_UP) / (ends[-1] - ends[WARM_UP - 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows per epoch")
    parser.add_argument("--epochs", type=int, default=8, help="measured epochs per run")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a trial; nothing is kept")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.epochs, options.keys, options.runs = 100_000, 3, 100_000, 1
    spark = cairn.session(
        "bench", master=f"local[{PARALLELISM}]", driver__memory="4g", ui__enabled=False
    )
    measured: dict[str, dict[str, list[float]]] = {
        api: {"uniform": [], "skewed": []} for api in APIS
    }
    with work_dir() as work:
        files = options.epochs + WARM_UP
        for kind, hot in (("uniform", 0.0), ("skewed", 0.5)):
            write_files(work / kind, files=files, rows=options.rows, keys=options.keys, hot=hot)
        for index in range(options.runs):
            for api, rates in measured.items():
                for kind, held in rates.items():
                    checkpoint = work / f"{index}-{api}-{kind}"
                    held.append(run_cairn(spark, work / kind, checkpoint, options.rows, api))
                    note(f"{api}, {kind}: {held[-1]:,.0f} rows/s")
    median = {
        api: {kind: statistics.median(held) for kind, held in rates.items()}
        for api, rates in measured.items()
    }
    report(
        "skew",
        {
            "rows_per_s": {
                api: {kind: round(rate) for kind, rate in rates.items()}
                for api, rates in median.items()
            },
            "runs": {
                api: {kind: [round(rate) for rate in held] for kind, held in rates.items()}
                for api, rates in measured.items()
            },
            "of_uniform": {
                api: round(rates["skewed"] / rates["uniform"], 3) for api, rates in median.items()
            },
            "rows_per_epoch": options.rows,
            "epochs": options.epochs,
            "keys": options.keys,
        },
        keep=not options.quick,
    )


if __name__ == "__main__":
    main()
