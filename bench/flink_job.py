"""The Flink half of flink.py: one run of the count and sum, in Flink's own environment.

It is given one JSON object and prints one: the seconds from submitting the job to its end. It
imports nothing of cairn's, and cairn nothing of it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from pyflink.table import EnvironmentSettings, TableEnvironment


def settings(task: dict[str, Any], checkpoints: Path) -> dict[str, str]:
    """Return the settings that Flink's tuning page recommends."""
    conf = {
        "parallelism.default": str(task["parallelism"]),
        "pipeline.object-reuse": "true",
        # An embedded cluster has 128 MB of managed memory by default: little for RocksDB.
        "taskmanager.memory.managed.size": "1g",
        "state.backend.type": {"heap": "hashmap", "rocksdb": "rocksdb"}[task["backend"]],
        "execution.checkpointing.interval": f"{task['checkpoint_interval_ms']} ms",
        "execution.checkpointing.mode": "EXACTLY_ONCE",
        "execution.checkpointing.incremental": "true",
        "execution.checkpointing.dir": checkpoints.as_uri(),
        # Otherwise the end of the input waits for the next checkpoint, up to an interval.
        "execution.checkpointing.checkpoints-after-tasks-finish": "false",
    }
    if task["mini_batch"]:
        conf |= {
            "table.exec.mini-batch.enabled": "true",
            "table.exec.mini-batch.allow-latency": "1 s",
            "table.exec.mini-batch.size": "50000",
        }
    return conf


def source_options(task: dict[str, Any], folder: str, rows: int) -> dict[str, str]:
    if task["input"] == "csv":
        return {"connector": "filesystem", "format": "csv", "path": Path(folder).as_uri()}
    return {
        "connector": "datagen",
        "rows-per-second": "1000000000",
        "number-of-rows": str(rows),
        "fields.k.min": "0",
        "fields.k.max": str(task["keys"] - 1),
        "fields.v.min": "0",
        "fields.v.max": "1",
    }


def run(task: dict[str, Any], folder: str, rows: int) -> tuple[float, int]:
    """Seconds from submitting the job to its end, and the checkpoints completed meanwhile."""
    checkpoints = Path(task["work"]) / f"flink-{time.time_ns()}"
    tables = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
    for key, value in settings(task, checkpoints).items():
        tables.get_config().set(key, value)
    options = source_options(task, folder, rows)
    with_options = ", ".join(f"'{key}' = '{value}'" for key, value in options.items())
    tables.execute_sql(f"CREATE TABLE events (k BIGINT, v DOUBLE) WITH ({with_options})")
    tables.execute_sql(
        "CREATE TABLE counts (k BIGINT, n BIGINT, s DOUBLE) WITH ('connector' = 'blackhole')"
    )
    started = time.perf_counter()
    result = tables.execute_sql(
        "INSERT INTO counts SELECT k, COUNT(*), SUM(v) FROM events GROUP BY k"
    )
    made = 0
    job = result.get_job_client()
    future = job.get_job_execution_result()
    while not future.done():
        time.sleep(0.02)
        # Only the newest is kept on disk, and its number says how many there were.
        made = max([made, *(int(p.name[4:]) for p in checkpoints.glob("*/chk-*"))])
    future.result()
    return time.perf_counter() - started, made


def main() -> None:
    task = json.loads(sys.argv[1])
    run(task, task["warm_up_folder"], task["warm_up_rows"])
    seconds, checkpoints = run(task, task["folder"], task["rows"])
    print(json.dumps({"seconds": seconds, "checkpoints": checkpoints}))


if __name__ == "__main__":
    main()
