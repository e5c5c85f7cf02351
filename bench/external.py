"""State in PostgreSQL and Redis beside heap and RocksDB: starts by number of keys, and throughput.

`starts`: a job with 100 k and one with 5 M keys is started, rolled back by 10 epochs and started,
and rescaled from 2 to 4 subtasks while it runs; each until the first committed epoch. Of
PostgreSQL, the rows of state that the server reads from the start to the end of that epoch are
counted, by index and by scans. Those beyond the keys of the epoch were read beforehand.

`throughput`: count and sum per key with a Python function per row, over 1 M keys, all of them in
memory (`cached`), and with memory for a tenth of the decoded state and keys by Zipf's law (`zipf`),
against RocksDB with the same memory in the same run.

The Spark session is up already. The complete run takes about half an hour; `--add` keeps the cases
of earlier runs, so it can be done in parts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import real_servers
from harness import (
    RESULTS,
    SEED,
    Epochs,
    Feed,
    file_stream,
    files_of,
    note,
    report,
    work_dir,
    write_files,
)
from keyed_count import counting_job, rate

import cairn
from cairn import sinks
from cairn.snapshots.rollback import rollback
from cairn.storage.log import Log, read_job
from cairn.storage.store import open_store

BACKENDS = ("heap", "rocksdb", "postgres", "redis")
BEFORE, AFTER = 2, 4
SMALL_ROWS = 2_000
BACK_EPOCHS = 10
FACTS = ("start_s", "rollback_s", "rescale_s")
CACHED_MB, TENTH_MB = 1024, 22
"""A decoded value takes about 110 bytes, and decoded values get half of the memory: 22 MB in each
of two slots hold a tenth of two states of a million keys."""
ZIPF = 0.99


class Servers:
    """The addresses of backends; a server is started when it is needed."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}

    def url(self, backend: str) -> str:
        """Return what `job.start(backend=)` takes."""
        if backend not in self._urls:
            make = {"postgres": real_servers.postgres, "redis": real_servers.state_redis_url}
            self._urls[backend] = make[backend]() if backend in make else backend
        return self._urls[backend]


class Subject:
    """A job with its input and checkpoint, which can be started again and again."""

    def __init__(self, spark: Any, work: Path, keys: int, backend: str, url: str) -> None:
        self._spark = spark
        self._checkpoint = work / "checkpoint"
        self._keys = keys
        self._backend = backend
        self._url = url
        self._feed = Feed(work / "input")

    def _start(self, parallelism: int = BEFORE) -> Any:
        stream = file_stream(self._spark, self._feed.folder)
        job = counting_job(stream, sinks.Noop(), "process_batch")
        return job.start(
            checkpoint=str(self._checkpoint),
            parallelism=parallelism,
            backend=self._url,
            trigger="0 seconds",
            retained_epochs=5 * BACK_EPOCHS,
        )

    @property
    def _log(self) -> Log:
        return Log(open_store(str(self._checkpoint)))

    def load(self) -> None:
        """Bring all keys into the state, and the state into its database."""
        self._feed.put_all_keys(self._keys)
        files = self._feed.files
        with self._start() as run:
            epochs = Epochs(run, self._checkpoint)
            _, loaded = epochs.take(files)[-1]
            while not self._is_stored(loaded.number):
                # Not at once: a base is written the slower the more the slot is used.
                time.sleep(1)
                self._put_few()
                epochs.next()
            for _ in range(BACK_EPOCHS + 2):
                # A rollback ends behind the base, as in a job that has run for a while.
                self._put_few()
                epochs.next()
        note(f"  {self._keys:,} keys are loaded")

    def _put_few(self) -> None:
        self._feed.put_some_keys(self._keys, SMALL_ROWS)

    def _is_stored(self, number: int) -> bool:
        """True if the database has the changes of an epoch."""
        newest = self._log.newest_epoch()
        if self._backend == "postgres":
            files = files_of(newest).values()
            bases = [file for file in files if file.kind == "base"]
            unwritten = sum(file.rows for file in files if file.kind == "delta")
            is_behind = len(bases) < BEFORE or any(base.last_epoch < number for base in bases)
            return not is_behind and unwritten <= 2 * BACK_EPOCHS * SMALL_ROWS
        if self._backend == "redis":
            job = read_job(open_store(str(self._checkpoint)))
            return all(
                marker.partition(":")[0].isdigit() and int(marker.partition(":")[0]) >= number
                for marker in real_servers.redis_markers(self._url, job.job_id)
            )
        return True

    def measure(self) -> dict[str, float]:
        """Start, roll back, and rescale; return the seconds of each, and what was read."""
        self._put_few()
        with self._only_our_reads():
            before = self._rows_read()
            started = time.perf_counter()
            with self._start() as run:
                metrics, epoch = Epochs(run, self._checkpoint).next()
                start_s = time.perf_counter() - started
            assert epoch.parent is not None
            rows_read = self._rows_read() - before
        lineage = list(self._log.lineage())
        started = time.perf_counter()
        rollback(open_store(str(self._checkpoint)), lineage[BACK_EPOCHS].number)
        with self._start() as run:
            epochs = Epochs(run, self._checkpoint)
            epochs.next()
            rollback_s = time.perf_counter() - started
            epochs.take(BACK_EPOCHS - 1)
        with self._start() as run:
            epochs = Epochs(run, self._checkpoint)
            for _ in range(3):
                self._put_few()
                epochs.next()
            started = time.perf_counter()
            run.rescale(AFTER)
            self._put_few()
            while epochs.next()[0].parallelism != AFTER:
                self._put_few()
            rescale_s = time.perf_counter() - started
        self._put_few()
        with self._start() as run:
            # The next start is with as many subtasks as the epoch before.
            Epochs(run, self._checkpoint).next()
        found = {
            "start_s": round(start_s, 3),
            "rollback_s": round(rollback_s, 3),
            "rescale_s": round(rescale_s, 3),
            "begin_ms": metrics.timings.begin_ms,
        }
        if self._backend == "postgres":
            # A key has one row of state. It is not read if a delta since the last base has it.
            deltas = [
                f for f in files_of(self._log.epoch(epoch.parent)).values() if f.kind == "delta"
            ]
            found |= {
                "rows_read": rows_read,
                "rows_read_beforehand": max(0, rows_read - SMALL_ROWS),
                "rows_of_deltas": sum(file.rows for file in deltas),
            }
        return found

    def _only_our_reads(self) -> AbstractContextManager[None]:
        if self._backend == "postgres":
            return real_servers.no_autovacuum(self._url)
        return nullcontext()

    def _rows_read(self) -> int:
        """Return how many rows of state the database has read so far."""
        return real_servers.rows_read(self._url) if self._backend == "postgres" else 0


def measure_starts(spark: Any, options: argparse.Namespace, servers: Servers) -> list[Any]:
    found = []
    for backend in options.backends:
        for keys in options.keys:
            note(f"{backend}, {keys:,} keys")
            with work_dir() as work:
                subject = Subject(spark, work, keys, backend, servers.url(backend))
                subject.load()
                runs = []
                for _ in range(options.runs):
                    runs.append(subject.measure())
                    note(f"  {runs[-1]}")
            median = {fact: statistics.median(run[fact] for run in runs) for fact in runs[0]}
            found.append({"backend": backend, "keys": keys, **median})
    return found


# Throughput


def write_zipf_files(folder: Path, *, files: int, rows: int, keys: int) -> None:
    """Write files whose keys are drawn by Zipf's law, from all keys in no order."""
    rng = np.random.default_rng(SEED)
    weights = 1.0 / np.arange(1, keys + 1) ** ZIPF
    bounds = np.cumsum(weights) / weights.sum()
    names = rng.permutation(keys)
    feed = Feed(folder)
    for _ in range(files):
        feed.put(names[np.searchsorted(bounds, rng.random(rows))])


def run_once(
    spark: Any, source: Path, checkpoint: Path, backend: str, memory_mb: int, rows: int, skip: int
) -> float:
    """Return rows per second after the first epochs, which bring the keys."""
    run = counting_job(file_stream(spark, source), sinks.Noop()).start(
        checkpoint=str(checkpoint),
        parallelism=BEFORE,
        backend=backend,
        backend_memory_mb=memory_mb,
        trigger="available-now",
    )
    run.wait()
    return rate(sorted(epoch.wall_ms / 1000 for epoch in run.epochs())[skip - 1 :], rows)


def measure_throughput(spark: Any, options: argparse.Namespace, servers: Servers) -> list[Any]:
    found = []
    for case in options.cases:
        memory_mb = CACHED_MB if case == "cached" else TENTH_MB
        with work_dir() as work:
            source = work / "input"
            size = {"rows": options.rows, "keys": options.state_keys}
            Feed(source).put_all_keys(options.state_keys, options.rows)
            skip = len(list(source.iterdir())) + 1
            add_files(source, case, options.epochs + 1, **size)
            rates: dict[str, list[float]] = {}
            for index in range(options.runs):
                for backend in dict.fromkeys(("rocksdb", *options.backends)):
                    checkpoint = work / f"{backend}-{index}"
                    run = partial(run_once, spark, source, checkpoint, servers.url(backend))
                    rates.setdefault(backend, []).append(run(memory_mb, options.rows, skip))
                    note(f"{case} {backend}: {rates[backend][-1]:,.0f} rows/s")
        median = {backend: statistics.median(each) for backend, each in rates.items()}
        found += [
            {
                "case": case,
                "backend": backend,
                "memory_mb": memory_mb,
                "rows_per_s": round(median[backend]),
                "of_rocksdb": round(median[backend] / median["rocksdb"], 3),
                "runs": [round(each) for each in rates[backend]],
            }
            for backend in median
        ]
    return found


def add_files(folder: Path, case: str, files: int, *, rows: int, keys: int) -> None:
    """Add files after those that the folder has."""
    write: Callable[..., None] = write_files if case == "cached" else write_zipf_files
    later = folder.with_name("later")
    write(later, files=files, rows=rows, keys=keys)
    first = len(list(folder.iterdir()))
    for number, path in enumerate(sorted(later.iterdir())):
        path.rename(folder / f"{first + number:06d}.parquet")
    for number, path in enumerate(sorted(folder.iterdir())):
        # The file source takes files in order of their age.
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


# Results


def with_earlier(part: str, found: list[Any], names: tuple[str, ...]) -> list[Any]:
    """Return these cases and those of the last result that were not measured again."""
    file = RESULTS / "external.json"
    earlier = json.loads(file.read_text()).get(part, []) if file.exists() else []
    every = {tuple(case[name] for name in names): case for case in [*earlier, *found]}
    return [every[name] for name in sorted(every)]


def growth(cases: list[Any]) -> dict[str, Any]:
    """Return by how much each start takes longer with the most keys than with the fewest."""
    ratios = {}
    for backend in {case["backend"] for case in cases}:
        mine = sorted((c for c in cases if c["backend"] == backend), key=lambda c: c["keys"])
        if len(mine) > 1:
            ratios[backend] = {fact: round(mine[-1][fact] / mine[0][fact], 2) for fact in FACTS}
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", default=["starts", "throughput"])
    parser.add_argument("--backends", nargs="*", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--keys", type=int, nargs="*", default=[100_000, 5_000_000])
    parser.add_argument("--cases", nargs="*", default=["cached", "zipf"])
    parser.add_argument("--state-keys", type=int, default=1_000_000, help="of throughput")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows per epoch of throughput")
    parser.add_argument("--epochs", type=int, default=6, help="measured epochs of throughput")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--add", action="store_true", help="keep the cases of earlier runs")
    parser.add_argument("--quick", action="store_true", help="a trial; the result is not kept")
    options = parser.parse_args()
    if options.quick:
        options.keys, options.runs, options.epochs = [20_000, 100_000], 1, 3
        options.rows = options.state_keys = 100_000
    spark = cairn.session("bench", master="local[2]", driver__memory="4g", ui__enabled=False)
    servers = Servers()
    starts = measure_starts(spark, options, servers) if "starts" in options.parts else []
    rates = measure_throughput(spark, options, servers) if "throughput" in options.parts else []
    if options.add:
        starts = with_earlier("starts", starts, ("backend", "keys"))
        rates = with_earlier("throughput", rates, ("case", "backend"))
    report(
        "external",
        {
            "growth": growth(starts),
            "required": {"growth_of_postgres": 1.3, "of_rocksdb": {"cached": 0.5, "zipf": 0.25}},
            "starts": starts,
            "throughput": rates,
            "zipf": ZIPF,
            "changed_keys_per_epoch": SMALL_ROWS,
        },
        keep=not options.quick,
    )


if __name__ == "__main__":
    main()
