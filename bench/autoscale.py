"""How fast does a job follow a load of 1x, 4x and 1x by itself, compared with fixed subtasks?

Load: each row waits a millisecond in its function, as a call to another system would, so subtasks
help on few cores too. A file per second comes; the rows per file step from 1x to 4x and back. The
same load runs with `autoscale="on"` in a range of 1 to 8, with 2 subtasks (enough for 1x) and with
8 (enough for 4x). From the step to 4x on: the time until no row waits longer than two seconds, the
rows that wait on average while 4x lasts, and those that still wait at its end, per second of it.
Over the whole load: rescales, and subtasks on average. The last 1x is long for autoscaling, which
takes three minutes to give subtasks back, and short for fixed ones, which nothing happens to.
Zipf: keys by Zipf's law over four subtasks, rows of the busiest subtask over those of the median
one, with equal ranges and by load.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import SEED, Epochs, Feed, file_stream, note, report, work_dir
from keyed_count import counting_job

import cairn
from cairn import Job, KeyedProcess, sinks, state

SMALLEST, LARGEST, ENOUGH = 1, 8, 2
ROW_S = 0.001
ROWS_PER_S = 600
STEP = 4
KEYS = 10_000
ZIPF_SUBTASKS = 4


class Waiting(KeyedProcess):
    """Counts rows of a key; each row waits as for an answer from elsewhere."""

    seen = state.Value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        time.sleep(ROW_S)
        self.seen.set(self.seen.get() + 1)
        return None


class Followed(NamedTuple):
    """The course of one run: times in seconds, rows put and rows committed."""

    times: list[float]
    waiting: list[int]
    subtasks: list[int]
    rescales: int


def run_load(spark: Any, work: Path, phases: list[tuple[int, int]], **options: Any) -> Followed:
    """Run the load: (multiple, seconds) of each phase, then until nothing waits."""
    feed = Feed(work / "input")
    rng = np.random.default_rng(SEED)
    put = [0]

    def keep_feeding() -> None:
        for multiple, seconds in phases:
            for _ in range(seconds):
                began = time.monotonic()
                feed.put(rng.integers(0, KEYS, multiple * ROWS_PER_S))
                put[0] += multiple * ROWS_PER_S
                time.sleep(max(0.0, 1 - (time.monotonic() - began)))

    stream = spark.readStream.schema("k long, v double").parquet(str(feed.folder))
    job = Job("load")
    counted = job.source("rows", stream).key_by("k").process(Waiting(), schema="k long", uid="wait")
    counted.sink_to(sinks.Noop(), uid="out")
    found = Followed([], [], [], 0)
    with job.start(checkpoint=str(work / "ckpt"), trigger="1 second", **options) as run:
        feed.put(rng.integers(0, KEYS, ROWS_PER_S))
        run.process_all_available()  # Slots are up, and state is there.
        done = ROWS_PER_S
        put[0] = done
        feeder = threading.Thread(target=keep_feeding, daemon=True)
        started = time.monotonic()
        feeder.start()
        known: set[int] = {each.epoch for each in run.history()}
        while feeder.is_alive() or done < put[0]:
            for each in run.history():
                if each.epoch not in known:
                    known.add(each.epoch)
                    done += each.rows_in
            found.times.append(time.monotonic() - started)
            found.waiting.append(put[0] - done)
            found.subtasks.append(run.parallelism)
            time.sleep(0.25)
        rescales = sum(each.is_applied for each in run.scaling.changes)
    return found._replace(rescales=rescales)


def facts(found: Followed, phases: list[tuple[int, int]]) -> dict[str, Any]:
    """Return what the step from 1x to 4x cost, and the subtasks that were used."""
    step_at_s, high_s = phases[0][1], phases[1][1]
    allowed = 2 * STEP * ROWS_PER_S
    after = [i for i, at in enumerate(found.times) if at >= step_at_s]
    high = [i for i in after if found.times[i] < step_at_s + high_s]
    late = [i for i in after if found.waiting[i] > allowed]
    caught_up_s = found.times[late[-1]] - step_at_s if late else 0.0
    return {
        "caught_up_s": round(caught_up_s, 1),
        "rows_waiting_mean": round(statistics.mean(found.waiting[i] for i in high)),
        "rows_waiting_max": max(found.waiting[i] for i in after),
        "rows_per_s_short": round(found.waiting[high[-1]] / high_s),
        "rescales": found.rescales,
        "subtasks_mean": round(statistics.mean(found.subtasks), 2),
        "subtasks_max": max(found.subtasks),
        "subtasks_at_end": found.subtasks[-1],
        "phases": phases,
        "seconds": round(found.times[-1], 1),
    }


def run_zipf(spark: Any, work: Path, *, rows: int, epochs: int) -> dict[str, Any]:
    """Return rows of the busiest subtask over those of the median one, before and after."""
    feed = Feed(work / "input")
    weights = 1 / np.arange(1, 100_001)
    weights /= weights.sum()
    rng = np.random.default_rng(SEED)
    checkpoint = work / "ckpt"

    def ratio(found: Epochs) -> float:
        ratios = []
        for _ in range(epochs):
            feed.put(rng.choice(len(weights), rows, p=weights))
            found.next()
            counted = run.metrics().operators["count"].subtask_rows
            ratios.append(max(counted) / statistics.median(counted))
        return round(statistics.median(ratios), 3)

    job = counting_job(file_stream(spark, feed.folder), sinks.Noop())
    with job.start(
        checkpoint=str(checkpoint), parallelism=ZIPF_SUBTASKS, trigger="0 seconds"
    ) as run:
        found = Epochs(run, checkpoint)
        equal = ratio(found)
        balance = run.rebalance()
        feed.put(rng.choice(len(weights), rows, p=weights))
        found.next()
        by_load = ratio(found)
    return {
        "busiest_over_median_equal": equal,
        "busiest_over_median_by_load": by_load,
        "groups_moved": balance.groups_moved,
        "limit": balance.limit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a trial; nothing is kept")
    options = parser.parse_args()
    # As long as it takes to see what is asked: the whole is measured in eight minutes.
    step = [(1, 10), (STEP, 45)]
    followed, fixed = [*step, (1, 215)], [*step, (1, 10)]
    zipf = {"rows": 500_000, "epochs": 8}
    if options.quick:
        followed, zipf = fixed, {"rows": 20_000, "epochs": 2}
    spark = cairn.session("bench", master=f"local[{LARGEST}]", ui__enabled=False)
    spread = f"{SMALLEST}..{LARGEST}"
    runs: dict[str, dict[str, Any]] = {
        "autoscale": {"parallelism": spread, "autoscale": "on"},
        f"fixed_{ENOUGH}": {"parallelism": ENOUGH},
        f"fixed_{LARGEST}": {"parallelism": LARGEST},
    }
    measured = {}
    with work_dir() as work:
        skew = run_zipf(spark, work / "zipf", **zipf)
        note(f"zipf: {skew}")
        for name, given in runs.items():
            phases = followed if "autoscale" in given else fixed
            found = run_load(spark, work / name, phases, **given)
            measured[name] = facts(found, phases)
            note(f"{name}: {measured[name]}")
    auto, few = measured["autoscale"], measured[f"fixed_{ENOUGH}"]
    report(
        "autoscale",
        {
            "load": measured,
            "rows_waiting_of_fixed_2": round(
                auto["rows_waiting_mean"] / max(1, few["rows_waiting_mean"]), 3
            ),
            "subtasks_of_fixed_8": round(auto["subtasks_mean"] / LARGEST, 3),
            "zipf": skew,
            "rows_per_s": ROWS_PER_S,
        },
        keep=not options.quick,
    )


if __name__ == "__main__":
    main()
