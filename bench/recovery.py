"""How long from start to the first committed epoch, and does it grow with the job's age?

A job with 1 M and with 5 M keys is stopped and started again, next to a start of the same job
without state. Then a job with 1 M keys runs 1,000 small epochs and is started again, next to the
job that has the same keys and no such history: files listed, bytes to read, time. The Spark
session is up already; everything else of a start is counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from harness import Epochs, Feed, file_stream, files_of, note, report, work_dir
from keyed_count import counting_job

import cairn
from cairn import sinks

SMALL_ROWS = 2_000


class Subject:
    """A job with its input and checkpoint, which can be started again and again."""

    def __init__(self, spark: Any, work: Path, keys: int, backend: str) -> None:
        self._spark = spark
        self._checkpoint = work / "checkpoint"
        self._keys = keys
        self._backend = backend
        self.feed = Feed(work / "input")

    def _start(self) -> Any:
        job = counting_job(file_stream(self._spark, self.feed.folder), sinks.Noop())
        return job.start(
            checkpoint=str(self._checkpoint),
            parallelism=2,
            backend=self._backend,
            trigger="0 seconds",
        )

    def load(self) -> None:
        self.feed.put_all_keys(self._keys)
        with self._start() as run:
            Epochs(run, self._checkpoint).take(self.feed.files)

    def age(self, epochs: int) -> None:
        for _ in range(epochs):
            self.feed.put_some_keys(self._keys, SMALL_ROWS)
        with self._start() as run:
            seen = Epochs(run, self._checkpoint)
            for done in range(epochs):
                seen.next()
                if done % 100 == 99:
                    note(f"  {done + 1} epochs")

    def recover(self) -> dict[str, float]:
        """Start with one small file to read: seconds to its epoch, and what there was to read."""
        self.feed.put_some_keys(max(self._keys, SMALL_ROWS), SMALL_ROWS)
        started = time.perf_counter()
        with self._start() as run:
            epochs = Epochs(run, self._checkpoint)
            metrics, epoch = epochs.next()
            seconds = time.perf_counter() - started
        files = {} if epoch.parent is None else files_of(epochs.manifest(epoch.parent))
        return {
            "seconds": round(seconds, 3),
            "files": len(files),
            "bytes_read": sum(ref.size for ref in files.values()),
            "begin_ms": metrics.timings.begin_ms,
            "state_keys": metrics.state_keys,
        }


def summary(results: list[dict[str, float]]) -> dict[str, float]:
    return {fact: statistics.median(r[fact] for r in results) for fact in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[1_000_000, 5_000_000])
    parser.add_argument("--epochs", type=int, default=1000, help="of the aged job")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--backend", nargs="+", default=["heap", "rocksdb"])
    parser.add_argument("--quick", action="store_true", help="a trial; the result is not kept")
    options = parser.parse_args()
    if options.quick:
        options.keys, options.epochs, options.runs = [50_000, 200_000], 20, 2
    spark = cairn.session("bench", master="local[2]", driver__memory="4g", ui__enabled=False)
    found: dict[str, dict[str, dict[str, float]]] = {}
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for backend in options.backend:
        with work_dir() as work:
            subjects: dict[str, Subject] = {}
            for keys in options.keys:
                subjects[str(keys)] = Subject(spark, work / str(keys), keys, backend)
                subjects[str(keys)].load()
            aged = Subject(spark, work / "aged", options.keys[0], backend)
            aged.load()
            aged.age(options.epochs)
            subjects["aged"] = aged
            measured: dict[str, list[dict[str, float]]] = {}
            for index in range(options.runs):
                # A job without state is one that starts for the first time.
                subjects["empty"] = Subject(spark, work / f"empty-{index}", 0, backend)
                for name, subject in subjects.items():
                    measured.setdefault(name, []).append(subject.recover())
                    note(f"{backend} {name}: {measured[name][-1]}")
        runs[backend] = measured
        found[backend] = {name: summary(results) for name, results in measured.items()}
    fresh = str(options.keys[0])
    report(
        "recovery",
        {
            "aged_of_fresh": {
                backend: {
                    fact: round(result["aged"][fact] / max(result[fresh][fact], 1e-3), 2)
                    for fact in ("seconds", "bytes_read", "files")
                }
                for backend, result in found.items()
            },
            "of_empty": {
                backend: {
                    name: round(facts["seconds"] / result["empty"]["seconds"], 2)
                    for name, facts in result.items()
                    if name != "empty"
                }
                for backend, result in found.items()
            },
            "median": found,
            "aged_epochs": options.epochs,
            "rows_per_small_epoch": SMALL_ROWS,
            "runs": runs,
        },
        keep=not options.quick,
    )


if __name__ == "__main__":
    main()
