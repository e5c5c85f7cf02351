"""What the benchmarks share: input files, sessions, and results with their circumstances."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

RESULTS = Path(__file__).parent / "results"
SEED = 20170901


@contextmanager
def work_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="cairn-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def write_files(folder: Path, *, files: int, rows: int, keys: int, seed: int = SEED) -> None:
    """Parquet files of (k long, v double), k uniform over `keys`; a file is an epoch."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for index in range(files):
        table = pa.table({"k": rng.integers(0, keys, rows), "v": rng.random(rows)})
        path = folder / f"{index:05d}.parquet"
        # Several row groups, so that all cores read.
        pq.write_table(table, path, row_group_size=max(1, rows // 8))
        # The file source takes files in order of their age.
        os.utime(path, (1_700_000_000 + index, 1_700_000_000 + index))


def file_stream(spark: Any, folder: Path) -> Any:
    return (
        spark.readStream.schema("k long, v double")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(folder))
    )


def note(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def report(name: str, result: dict[str, Any]) -> None:
    """Print the result and keep it, with what it depends on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent
    ).stdout.strip()
    full = {
        "benchmark": name,
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "seed": SEED,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {p: version(p) for p in ("pyspark", "pyarrow", "msgspec", "obstore")},
        **result,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(full, indent=2) + "\n")
    print(json.dumps(result, indent=2))
