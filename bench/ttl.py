"""When 90 % of 5 M keys have expired, is their space freed, and do epochs get slower?

Every key is loaded, then small epochs touch one key in ten, over and over, so that these live
on. The others expire a ttl after their load. Compared: the memory of the slots (with RocksDB also
their disk) before and after, and the p95 of epochs while keys are being removed against the median
of those before. The keys that stay are spread over all of them, the worst case for memory.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Epochs, Feed, file_stream, in_fresh_process, note, percentile, report, work_dir
from state_growth import slots_rss_bytes

import cairn
from cairn import Job, KeyedProcess, sinks, state
from cairn.report.epoch import EpochReport
from cairn.slot.folders import run_folder

AHEAD = 2
AFTER = 40
SETTLE = 5
"""Epochs after the load that are not counted: bases are written then."""
IDLE_S = 3.0


def expiring_job(source: Any, ttl: str) -> Job:
    class Count(KeyedProcess):
        count = state.Value("long", default=0, ttl=ttl)

        def process(self, row: Any, ctx: Any) -> Any:
            n = self.count.get() + 1
            self.count.set(n)
            return row.k, n

    job = Job("ttl")
    counts = (
        job.source("rows", source).key_by("k").process(Count(), schema="k long, n long", uid="c")
    )
    counts.sink_to(sinks.Noop(), uid="out")
    return job


def slots_disk_bytes(run_id: str) -> int:
    total = 0
    for file in run_folder(run_id).glob("*/p-*/scratch/**/*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total


class Measured:
    """A run that is fed as fast as it takes rows, and what its slots take."""

    def __init__(self, run: Any, feed: Feed, checkpoint: Path, kept: Any, changed: int) -> None:
        self._run = run
        self._feed = feed
        self._epochs = Epochs(run, checkpoint)
        self._kept = kept
        self._changed = changed
        self._at = 0
        self._seen = 0

    def load(self, files: int) -> None:
        self._epochs.take(files)
        self._seen += files

    def epoch(self) -> EpochReport:
        """One that touches the next keys which are to stay."""
        while self._feed.files < self._seen + 1 + AHEAD:
            part = np.take(self._kept, np.arange(self._at, self._at + self._changed), mode="wrap")
            self._at += self._changed
            self._feed.put(part)
        self._seen += 1
        metrics, _ = self._epochs.next()
        return metrics

    def space(self) -> dict[str, int]:
        run_id = self._run._engine.coordinator.run_id
        return {"rss_bytes": slots_rss_bytes(run_id), "disk_bytes": slots_disk_bytes(run_id)}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    spark = cairn.session("bench", master="local[2]", driver__memory="4g", ui__enabled=False)
    keys, ttl_s = task["keys"], task["ttl_s"]
    kept = np.random.default_rng(1).permutation(np.arange(0, keys, 10))
    with work_dir() as work:
        feed = Feed(work / "input")
        feed.put(np.arange(0, 1))
        feed.put_all_keys(keys)
        job = expiring_job(file_stream(spark, feed.folder), f"{ttl_s} seconds")
        with job.start(
            checkpoint=str(work / "checkpoint"),
            parallelism=2,
            backend=task["backend"],
            backend_memory_mb=task["memory_mb"],
            trigger="0 seconds",
        ) as run:
            measured = Measured(run, feed, work / "checkpoint", kept, task["changed"])
            started = time.monotonic()
            measured.load(1)
            empty = measured.space()
            measured.load(feed.files - 1)
            load_s = time.monotonic() - started
            for _ in range(SETTLE):
                measured.epoch()
            phases: dict[str, list[float]] = {"before": [], "removing": []}
            full = measured.space()
            while True:
                metrics = measured.epoch()
                held = metrics.state_keys
                if held <= 1.05 * len(kept):
                    break
                name = "before" if held > 0.99 * keys else "removing"
                phases[name].append(metrics.epoch_ms)
                if name == "before":
                    full = measured.space()
                if time.monotonic() - started > 6 * ttl_s + 600:
                    raise SystemExit(f"still {held} keys after {len(phases['removing'])} epochs")
            phases["after"] = [measured.epoch().epoch_ms for _ in range(AFTER)]
            busy = measured.space()
            # Idle slots free more space after a while.
            time.sleep(IDLE_S)
            measured.epoch()
            time.sleep(IDLE_S)
            after = measured.space()
    if len(phases["before"]) < 10:
        raise SystemExit(f"loaded in {load_s:.0f} s: a ttl of {ttl_s} s is too short")
    return {
        "load_s": round(load_s, 1),
        "epochs": {name: len(times) for name, times in phases.items()},
        "p50_ms": {name: percentile(times, 50) for name, times in phases.items() if times},
        "p95_ms": {name: percentile(times, 95) for name, times in phases.items() if times},
        "max_ms": {name: max(times) for name, times in phases.items() if times},
        "space": {"empty": empty, "full": full, "after": busy, "after_idle": after},
    }


def share_returned(space: dict[str, dict[str, int]], name: str) -> float:
    taken = space["full"][name] - space["empty"][name]
    return round((space["full"][name] - space["after_idle"][name]) / max(1, taken), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=5_000_000)
    parser.add_argument("--changed", type=int, default=20_000, help="keys per measured epoch")
    parser.add_argument("--ttl-s", type=int, default=90, help="longer than the load takes")
    parser.add_argument("--backend", default="heap")
    parser.add_argument(
        "--memory-mb", type=int, default=128, help="of RocksDB: so little that state is on disk"
    )
    parser.add_argument("--quick", action="store_true", help="a trial; the result is not kept")
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        print(json.dumps(measure(options.task)))
        return
    if options.quick:
        options.keys, options.ttl_s, options.memory_mb = 400_000, 20, 16
    names = ("keys", "changed", "ttl_s", "backend", "memory_mb")
    task = {name: getattr(options, name) for name in names}
    result = in_fresh_process(task)
    note(str(result))
    name = "disk_bytes" if options.backend == "rocksdb" else "rss_bytes"
    report(
        f"ttl_{options.backend}",
        {
            "returned": share_returned(result["space"], name),
            "p95_of_median_before": round(
                result["p95_ms"]["removing"] / result["p50_ms"]["before"], 3
            ),
            "required": {"returned": 0.6, "p95_of_median_before": 1.5},
            "returned_of": name,
            "expired": 0.9,
            **task,
            **result,
        },
        keep=not options.quick,
    )


if __name__ == "__main__":
    main()
