"""How does alignment grow with parallelism, with the number of shuffles, and with state?

Alignment is what an operator waits from the first to the last of the subtasks that feed it.
Count per key, in epochs of 10 k rows, on two executors that can run all subtasks of a level
at once. Against parallelism and state size: two keyed operators in a row, and what the
second one waits for the first. Against shuffles: that many keyed operators in a row, and
what all of them wait for in an epoch, the first one for the tasks that read the source.

Subtasks of one machine share its cores: with more of them than cores, the spread of their
finish times is also the time it takes to give each of them its turn. The shape is what to read.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from harness import RESULTS, Feed, file_stream, note, percentile, report, work_dir
from plot import Panel, write_chart

import cairn
from cairn import Job, KeyedProcess, sinks, state

WARM_UP = 3
PARALLELISM = 4
MASTER = "local-cluster[2,8,2048]"
SHARED = "subtasks share 2 cores: beyond that, scheduling is measured too"


class Count(KeyedProcess):
    n = state.Value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.n.set(self.n.get() + 1)
        return row.k, row.v


def job_of(stream: Any, operators: int) -> Job:
    job = Job("alignment")
    rows: Any = job.source("rows", stream)
    for index in range(operators):
        rows = rows.key_by("k").process(Count(), schema="k long, v double", uid=f"count-{index}")
    rows.sink_to(sinks.Noop(), uid="out")
    return job


def measure(
    spark: Any,
    work: Path,
    *,
    parallelism: int,
    operators: int,
    keys: int,
    held_keys: int,
    rows: int,
    epochs: int,
) -> dict[str, Any]:
    """Milliseconds of alignment per epoch and operator, once every key is held."""
    feed = Feed(work / "input")
    feed.put_all_keys(held_keys)
    preload = feed.files
    rng = np.random.default_rng(7)
    for _ in range(WARM_UP + epochs):
        feed.put(rng.integers(0, keys, rows))
    run = job_of(file_stream(spark, feed.folder), operators).start(
        checkpoint=str(work / "ckpt"),
        parallelism=parallelism,
        trigger="available-now",
        retained_epochs=preload + WARM_UP + epochs,
    )
    run.wait()
    measured = sorted(run.epochs(), key=lambda epoch: epoch.epoch)[preload + WARM_UP :]
    if len(measured) != epochs:
        raise SystemExit(f"found {len(measured)} epochs to measure, expected {epochs}")
    waited = [
        [epoch.operators[f"count-{index}"].alignment_ms for index in range(operators)]
        for epoch in measured
    ]
    if any(ms is None for epoch in waited for ms in epoch):
        raise SystemExit("an epoch does not tell its alignment")
    return {
        "waited_ms": waited,
        "epoch_ms": statistics.median(epoch.epoch_ms for epoch in measured),
        "state_keys": measured[-1].state_keys,
    }


def figures(name: Any, totals: list[float], measured: dict[str, Any]) -> dict[str, Any]:
    return {
        "of": name,
        "alignment_ms": percentile(totals, 50),
        "low_ms": percentile(totals, 25),
        "high_ms": percentile(totals, 75),
        "epoch_ms": round(measured["epoch_ms"], 1),
        "part_of_epoch": round(percentile(totals, 50) / measured["epoch_ms"], 3),
    }


def with_ratios(series: list[dict[str, Any]], base: Any) -> list[dict[str, Any]]:
    """Each beside the one called `base`."""
    at = next((s["alignment_ms"] for s in series if s["of"] == base), 0)
    return [{**s, "ratio": round(s["alignment_ms"] / at, 2) if at else None} for s in series]


def print_table(title: str, series: list[dict[str, Any]], base: Any) -> None:
    print(f"\n{title:<22}{'alignment':>12}{'middle half':>18}{'epoch':>10}{'of epoch':>10}", end="")
    print(f"{f'to {base}':>14}")
    for s in series:
        ratio = "" if s["ratio"] is None else f"{s['ratio']:.2f} ×"
        half = f"{s['low_ms']:.0f}–{s['high_ms']:.0f} ms"
        print(
            f"{s['of']!s:<22}{s['alignment_ms']:>9.1f} ms{half:>18}{s['epoch_ms']:>7.0f} ms"
            f"{s['part_of_epoch']:>10.0%}{ratio:>14}"
        )


def panel(title: str, x_title: str, series: list[dict[str, Any]]) -> Panel:
    return Panel(
        title,
        x_title,
        [f"{s['of']:,}" for s in series],
        [s["alignment_ms"] for s in series],
        [s["low_ms"] for s in series],
        [s["high_ms"] for s in series],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000, help="rows per epoch")
    parser.add_argument("--epochs", type=int, default=10, help="measured epochs per run")
    parser.add_argument("--master", default=MASTER)
    parser.add_argument("--quick", action="store_true", help="a trial; nothing is kept")
    options = parser.parse_args()
    subtasks, shuffles, sizes = [1, 2, 4, 8, 16], [1, 2, 3, 4, 5], [10_000, 100_000, 1_000_000]
    if options.quick:
        options.epochs, subtasks, shuffles, sizes = 4, [1, 4], [1, 3], [10_000, 100_000]
    spark = cairn.session(
        "bench",
        master=options.master,
        driver__memory="2g",
        ui__enabled=False,
        # As many tasks read a file as there are subtasks, small as it is.
        sql__files__minPartitionNum=PARALLELISM,
        sql__files__openCostInBytes=1,
    )
    keys = 10_000
    sized = {"rows": options.rows, "epochs": options.epochs}
    series: dict[str, list[dict[str, Any]]] = {"parallelism": [], "shuffles": [], "keys": []}

    def run(kind: str, name: int, **how: int) -> None:
        how = {"parallelism": PARALLELISM, "operators": 2, "keys": keys, "held_keys": keys, **how}
        with work_dir() as work:
            measured = measure(spark, work, **how, **sized)
        waited = measured["waited_ms"]
        totals = [sum(epoch) if kind == "shuffles" else epoch[-1] for epoch in waited]
        series[kind].append(figures(name, totals, measured))
        if kind == "shuffles":
            series[kind][-1]["per_shuffle_ms"] = round(series[kind][-1]["alignment_ms"] / name, 1)
            series[kind][-1]["by_operator_ms"] = [
                percentile(list(each), 50) for each in zip(*waited, strict=True)
            ]
        note(f"{kind} {name}: {series[kind][-1]}")

    for count in subtasks:
        run("parallelism", count, parallelism=count)
    for count in shuffles:
        run("shuffles", count, operators=count)
    for size in sizes:
        run("keys", size, held_keys=size, keys=size)
    # Executors that end after the driver complain.
    spark.stop()
    bases = {"parallelism": subtasks[1], "shuffles": 1, "keys": sizes[0]}
    series = {kind: with_ratios(found, bases[kind]) for kind, found in series.items()}
    titles = {
        "parallelism": "subtasks",
        "shuffles": "shuffles, all together",
        "keys": "keys of state",
    }
    for kind, found in series.items():
        print_table(titles[kind], found, bases[kind])
    print(f"\n{SHARED}")
    report(
        "alignment",
        {
            "ratio": {kind: {str(s["of"]): s["ratio"] for s in found}
                      for kind, found in series.items()},
            "ratio_to": bases,
            "series": series,
            "note": SHARED,
            "master": options.master,
            "rows_per_epoch": options.rows,
            "epochs": options.epochs,
        },
        keep=not options.quick,
    )  # fmt: skip
    if not options.quick:
        write_chart(
            RESULTS / "alignment.svg",
            "Alignment: from the first to the last upstream subtask to finish",
            "ms an epoch",
            f"Median and middle half of {options.epochs} epochs, {options.rows:,} rows; {SHARED}.",
            [
                panel("one shuffle", "subtasks", series["parallelism"]),
                panel(
                    f"{PARALLELISM} subtasks, all operators together",
                    "shuffles",
                    series["shuffles"],
                ),
                panel(f"one shuffle, {PARALLELISM} subtasks", "keys of state", series["keys"]),
            ],
        )


if __name__ == "__main__":
    main()
