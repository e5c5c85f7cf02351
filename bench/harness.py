"""Shared code of the benchmarks: input files, epochs as they are committed, results."""

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
import pyarrow.csv
import pyarrow.parquet as pq

from cairn.report.epoch import EpochReport
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch, FileRef
from cairn.storage.store import open_store

RESULTS = Path(__file__).parent / "results"
SEED = 20170901


@contextmanager
def work_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="cairn-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def write_files(
    folder: Path, *, files: int, rows: int, keys: int, seed: int = SEED, form: str = "parquet"
) -> None:
    """Files of (k long, v double), k uniform over `keys`; a file is an epoch."""
    rng = np.random.default_rng(seed)
    feed = Feed(folder, form)
    for _ in range(files):
        feed.put(rng.integers(0, keys, rows), rng.random(rows))


class Feed:
    """A folder that a file stream reads, one file an epoch, in the order they are put."""

    def __init__(self, folder: Path, form: str = "parquet", seed: int = SEED) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.files = 0
        self._form = form
        self._rng = np.random.default_rng(seed)

    def put(self, k: Any, v: Any = None) -> None:
        """One more file. A stream that is reading the folder sees all of it or nothing."""
        v = self._rng.random(len(k)) if v is None else v
        path = self.folder / f"{self.files:06d}.{self._form}"
        hidden = path.with_name(f".{path.name}")
        if self._form == "csv":
            # Hundredths, like most amounts: seventeen digits would make it a contest of parsers.
            table = pa.table({"k": k, "v": np.round(v * 100) / 100})
            pa.csv.write_csv(table, hidden, pa.csv.WriteOptions(include_header=False))
        else:
            # Several row groups, so that all cores read.
            pq.write_table(
                pa.table({"k": k, "v": v}), hidden, row_group_size=max(1 << 14, len(k) // 8)
            )
        # The file source takes files in order of their age.
        os.utime(hidden, (1_700_000_000 + self.files, 1_700_000_000 + self.files))
        hidden.rename(path)
        self.files += 1

    def put_all_keys(self, keys: int, rows: int = 500_000) -> None:
        """Every key once, in files of `rows`."""
        for start in range(0, keys, rows):
            self.put(np.arange(start, min(start + rows, keys)))

    def put_some_keys(self, keys: int, rows: int) -> None:
        """`rows` distinct keys out of all of them."""
        self.put(self._rng.choice(keys, rows, replace=False))


def file_stream(spark: Any, folder: Path, form: str = "parquet") -> Any:
    stream = spark.readStream.schema("k long, v double").option("maxFilesPerTrigger", 1)
    return stream.format(form).load(str(folder))


class Epochs:
    """The committed epochs of a run as they come: what was measured, and the manifest."""

    def __init__(self, run: Any, checkpoint: Path) -> None:
        self._run = run
        self._log = Log(open_store(str(checkpoint)))
        self._newest = 0
        self._waiting: list[tuple[EpochReport, Epoch]] = []
        self.seen: list[tuple[EpochReport, Epoch]] = []

    def next(self, timeout_s: float = 300) -> tuple[EpochReport, Epoch]:
        """The next one that this run commits; raises what failed."""
        deadline = time.monotonic() + timeout_s
        while not self._waiting:
            self._look()
            if not self._waiting:
                if not self._run.is_active:
                    self._run.wait()
                    raise SystemExit(f"the run has {self._run.status} after epoch {self._newest}")
                if time.monotonic() > deadline:
                    raise SystemExit(f"no epoch after {self._newest} in {timeout_s} s")
                time.sleep(0.005)
        self.seen.append(self._waiting.pop(0))
        return self.seen[-1]

    def _look(self) -> None:
        found = self._run.history()
        for report in found if self._newest else found[-1:]:
            if report.epoch > self._newest:
                self._waiting.append((report, self._log.epoch(report.epoch)))
                self._newest = report.epoch

    def manifest(self, number: int) -> Epoch:
        return self._log.epoch(number)

    def take(self, count: int) -> list[tuple[EpochReport, Epoch]]:
        """Return the next `count` epochs."""
        return [self.next() for _ in range(count)]


def files_of(epoch: Epoch) -> dict[str, FileRef]:
    """The files an epoch lists, by id; a file that two ranges share counts once."""
    parts = [part for entry in epoch.operators.values() for part in entry.ranges]
    return {ref.id: ref for part in parts for ref in part.files}


def bases_of(epoch: Epoch) -> dict[str, FileRef]:
    return {id: ref for id, ref in files_of(epoch).items() if ref.kind == "base"}


def percentile(values: list[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 1)


def in_fresh_process(task: dict[str, Any], **environment: str) -> Any:
    """Run this script again with `--task`, a process of its own that reads its environment.

    Settings are read when cairn is imported and inherited by slots, so two runs that differ
    in them cannot share a process. The answer is the last line it prints, as JSON.
    """
    done = subprocess.run(
        [sys.executable, sys.argv[0], "--task", json.dumps(task)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{sys.argv[0]} --task failed: {task}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def note(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def report(name: str, result: dict[str, Any], *, keep: bool = True) -> None:
    """Print the result and, unless it is of a trial, keep it with what it depends on."""
    print(json.dumps(result, indent=2))
    if not keep:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent
    ).stdout.strip()
    full = {
        "benchmark": name,
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "seed": SEED,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {
            p: version(p) for p in ("pyspark", "pyarrow", "msgspec", "obstore", "rocksdict")
        },
        **result,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(full, indent=2) + "\n")
