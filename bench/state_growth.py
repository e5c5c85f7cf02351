"""Does the cost of an epoch depend on its changes, or on the size of the state?

The same 50 k changed keys per epoch upon 100 k and upon 5 M keys of state: the ratio of
median epoch times, the maximum (a base is written in the foreground for now), and the
memory a key takes in the slots.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import psutil
from harness import Feed, file_stream, note, report, work_dir
from keyed_count import counting_job

import cairn
from cairn import sinks
from cairn.slot.folders import living_slots, run_folder


def write_input(folder: Path, *, keys: int, changed: int, epochs: int) -> int:
    """First every key once, then epochs that change `changed` distinct keys. Preload epochs."""
    feed = Feed(folder)
    feed.put_all_keys(keys)
    preload = feed.files
    for _ in range(epochs):
        feed.put_some_keys(keys, changed)
    return preload


def slots_rss_bytes(run_id: str) -> int:
    slots = living_slots(run_folder(run_id))
    return sum(psutil.Process(slot.process.pid).memory_info().rss for slot in slots)


def measure(spark: Any, work: Path, *, keys: int, changed: int, epochs: int) -> dict[str, float]:
    preload = write_input(work / "input", keys=keys, changed=changed, epochs=epochs)
    job = counting_job(file_stream(spark, work / "input"), sinks.Noop())
    with job.start(checkpoint=str(work / "ckpt"), parallelism=2, trigger="0 seconds") as run:
        while run.metrics() is None:
            run.wait(0.1)
        run.process_all_available()
        rss = slots_rss_bytes(run._engine.coordinator.run_id)
        progress = [p for p in run._engine.query.recentProgress if p["numInputRows"]]
        times = [p["durationMs"]["triggerExecution"] for p in progress[preload:]]
    return {
        "median_ms": statistics.median(times),
        "max_ms": max(times),
        "epochs": len(times),
        "slots_rss_bytes": rss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", type=int, default=100_000)
    parser.add_argument("--large", type=int, default=5_000_000)
    parser.add_argument("--changed", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    spark = cairn.session(
        "bench",
        master="local[2]",
        ui__enabled=False,
        driver__memory="4g",
        sql__streaming__numRecentProgressUpdates=500,
    )
    sizes = {"small": options.small, "large": options.large}
    measured: dict[str, list[dict[str, float]]] = {"small": [], "large": []}
    for _ in range(options.runs):
        for name, keys in sizes.items():
            with work_dir() as work:
                result = measure(
                    spark, work, keys=keys, changed=options.changed, epochs=options.epochs
                )
            measured[name].append(result)
            note(f"{name}: {result}")
    medians = {n: statistics.median(r["median_ms"] for r in rs) for n, rs in measured.items()}
    rss = {n: statistics.median(r["slots_rss_bytes"] for r in rs) for n, rs in measured.items()}
    per_key = (rss["large"] - rss["small"]) / (options.large - options.small)
    report(
        "state_growth",
        {
            "median_ratio": round(medians["large"] / medians["small"], 3),
            "required": {"median_ratio": 1.3},
            "median_ms": medians,
            "max_ms": {n: max(r["max_ms"] for r in rs) for n, rs in measured.items()},
            "slot_bytes_per_key": round(per_key),
            "keys": sizes,
            "changed_keys_per_epoch": options.changed,
            "runs": measured,
        },
    )


if __name__ == "__main__":
    main()
