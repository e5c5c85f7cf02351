"""Is cairn's count and sum per key faster than Flink SQL's, heap and RocksDB?

The running COUNT(*) and SUM(v) per key of the same CSV files, every row giving an updated row
to a sink that drops it: cairn's per-record Python function, and Flink SQL in an embedded
cluster, both with parallelism 2 and snapshots on local disk. Runs alternate, each engine warmed
up in the same JVM by a smaller run; times are from submitting the job to its end.

What Flink is given: object reuse, 1 GB of managed memory, exactly-once checkpoints every 2 s,
incremental with RocksDB, a JVM with its default heap (a quarter of the machine), and no wait
for a last checkpoint at the end of the input. cairn commits every file (1 M rows) as an epoch.
CSV is what both Spark and Flink's package from PyPI can read. With `--input datagen` Flink makes
its rows itself and reads no files, which favours Flink; cairn then reads Parquet. With
mini-batch on, Flink gives a row per key and batch instead of one per input row: less work than
cairn's function does, and so a figure of its own. Beside it stands cairn's `.aggregate`, which says
the same as the SQL does and gives a row per key and epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness import file_stream, note, report, work_dir, write_files
from keyed_count import counting_job

import cairn
from cairn import sinks

FLINK_VERSION = "2.3.0"
PARALLELISM = 2
CHECKPOINT_INTERVAL_MS = 2000


def flink_python() -> Path:
    """The interpreter of an environment that has Flink; made when there is none yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    home = cache / "cairn" / f"flink-{FLINK_VERSION}-py{sys.version_info[0]}{sys.version_info[1]}"
    python = home / "bin" / "python"
    ready = home / ".ready"
    if not ready.exists():
        note(f"installing apache-flink {FLINK_VERSION} into {home} (330 MB) ...")
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)], check=True
        )
        # Flink pins versions that do not go with cairn's, hence an environment of its own.
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        install = ["install", "--quiet", f"apache-flink=={FLINK_VERSION}"]
        subprocess.run([*pip, *install], check=True)
        ready.touch()
    return python


def run_flink(task: dict[str, Any]) -> float:
    script = Path(__file__).with_name("flink_job.py")
    done = subprocess.run(
        [str(flink_python()), str(script), json.dumps(task)], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"Flink failed: {task}\n{done.stderr[-4000:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    note(f"  {result['checkpoints']} checkpoints")
    return float(result["seconds"])


def run_cairn(
    spark: Any, folder: Path, form: str, checkpoint: Path, backend: str, api: str = "process"
) -> float:
    job = counting_job(file_stream(spark, folder, form), sinks.Noop(), api)
    started = time.perf_counter()
    run = job.start(
        checkpoint=str(checkpoint),
        parallelism=PARALLELISM,
        backend=backend,
        trigger="available-now",
    )
    run.wait()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=10, help="one is an epoch of cairn's")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--backend", nargs="+", default=["heap", "rocksdb"], help="of cairn")
    parser.add_argument("--input", choices=["csv", "datagen"], default="csv", help="of Flink")
    parser.add_argument("--no-mini-batch", action="store_true", help="leave that figure out")
    parser.add_argument("--quick", action="store_true", help="a trial; the result is not kept")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.keys, options.files, options.runs = 1_000_000, 100_000, 4, 1
    flink_python()
    spark = cairn.session("bench", master="local[2]", driver__memory="4g", ui__enabled=False)
    form = "csv" if options.input == "csv" else "parquet"
    rows_per_file = options.rows // options.files
    rows = rows_per_file * options.files
    measured: dict[str, list[float]] = {}

    with work_dir() as work:
        big, small = work / "big", work / "small"
        write_files(big, files=options.files, rows=rows_per_file, keys=options.keys, form=form)
        # One file for each of Flink's readers.
        write_files(small, files=2, rows=rows_per_file // 2, keys=options.keys, form=form)

        def measure(name: str, run: Callable[[], float]) -> None:
            measured.setdefault(name, []).append(rows / run())
            note(f"{name}: {measured[name][-1]:,.0f} rows/s")

        flink_task = {
            "parallelism": PARALLELISM,
            "checkpoint_interval_ms": CHECKPOINT_INTERVAL_MS,
            "input": options.input,
            "keys": options.keys,
            "work": str(work),
            "folder": str(big),
            "rows": rows,
            "warm_up_folder": str(small),
            "warm_up_rows": rows_per_file,
        }
        for backend in options.backend:
            run_cairn(spark, small, form, work / f"warm-{backend}", backend)
        run_cairn(spark, small, form, work / "warm-aggregate", "heap", "aggregate")
        for index in range(options.runs):
            for backend in options.backend:
                checkpoint = work / f"{backend}-{index}"
                measure(
                    f"cairn_{backend}", partial(run_cairn, spark, big, form, checkpoint, backend)
                )
            checkpoint = work / f"aggregate-{index}"
            measure(
                "cairn_aggregate",
                partial(run_cairn, spark, big, form, checkpoint, "heap", "aggregate"),
            )
            for backend in ("heap", "rocksdb"):
                task = {**flink_task, "backend": backend, "mini_batch": False}
                measure(f"flink_{backend}", partial(run_flink, task))
                if not options.no_mini_batch:
                    task["mini_batch"] = True
                    measure(f"flink_{backend}_mini_batch", partial(run_flink, task))

    median = {name: statistics.median(rates) for name, rates in measured.items()}
    ours = [name for name in median if name.startswith("cairn_")]
    theirs = [name for name in median if name.startswith("flink_")]
    report(
        "flink",
        {
            "ratios": {f"{a} / {b}": round(median[a] / median[b], 2) for a in ours for b in theirs},
            "required": {"cairn_heap / flink_heap": 1.0, "cairn_rocksdb / flink_rocksdb": 1.0},
            "rows_per_s": {name: round(rate) for name, rate in median.items()},
            "runs": {name: [round(rate) for rate in rates] for name, rates in measured.items()},
            "rows": rows,
            "keys": options.keys,
            "rows_per_epoch": rows_per_file,
            "parallelism": PARALLELISM,
            "flink": {
                "version": FLINK_VERSION,
                "input": options.input,
                "reads_files": options.input == "csv",
                "checkpoint_interval_ms": CHECKPOINT_INTERVAL_MS,
                "object_reuse": True,
                "managed_memory": "1g",
                "mini_batch": "allow-latency 1 s, size 50000, where named so",
                "waits_for_last_checkpoint": False,
            },
        },
        keep=not options.quick,
    )


if __name__ == "__main__":
    main()
