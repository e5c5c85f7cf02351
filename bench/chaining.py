"""How much faster is a chain of five steps in one process than with a shuffle before each?

Two chains, on epochs of 200 k rows, each chained and not (`Job(chaining=False)`), in turns in
the same run. *stateful*: a count per key, then four steps without keys, one of which keeps
a list of its own. *stateless*: five steps without keys or state. Both write to a sink that
drops its rows. The first two epochs of every run are left out.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from harness import file_stream, note, report, work_dir, write_files

import cairn
from cairn import Job, KeyedProcess, Process, sinks, state

PARALLELISM = 2
WARM_UP = 2
SCHEMA = "k long, v double"
KEPT = 100


class Count(KeyedProcess):
    n = state.Value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        n = self.n.get() + 1
        self.n.set(n)
        return row.k, row.v + n


class Scale(Process):
    def process(self, row: Any, ctx: Any) -> Any:
        return row.k, row.v * 1.5


class Keep(Process):
    """Passes rows on; remembers the first ones that are out of the ordinary."""

    odd = state.OperatorList("double")

    def process(self, row: Any, ctx: Any) -> Any:
        if row.v < 0.01 and len(self.odd) < KEPT:
            self.odd.append(row.v)
        return row


class Small(Process):
    def process(self, row: Any, ctx: Any) -> Any:
        return row if row.v < 1e9 else None


STEPS: dict[str, list[Any]] = {
    "stateful": [Count, Scale, Keep, Small, Scale],
    "stateless": [Scale, Small, Scale, Small, Scale],
}


def job_of(stream: Any, chain: str, *, chaining: bool) -> Job:
    job = Job(f"chain-{chain}", chaining=chaining)
    rows: Any = job.source("rows", stream)
    for index, step in enumerate(STEPS[chain]):
        at = rows.key_by("k") if issubclass(step, KeyedProcess) else rows
        rows = at.process(step(), schema=SCHEMA, uid=f"step-{index}")
    rows.sink_to(sinks.Noop(), uid="out")
    return job


def run_chain(
    spark: Any, source: Path, checkpoint: Path, rows: int, chain: str, *, chaining: bool
) -> dict[str, float]:
    job = job_of(file_stream(spark, source), chain, chaining=chaining)
    stages = len(job.graph().levels)
    run = job.start(
        checkpoint=str(checkpoint),
        parallelism=PARALLELISM,
        trigger="available-now",
        retained_epochs=1000,
    )
    run.wait()
    epochs = sorted(run.epochs(), key=lambda epoch: epoch.epoch)
    ends = [epoch.wall_ms / 1000 for epoch in epochs]
    last = epochs[-1].operators["step-4"].rows_in
    if last != rows:
        raise SystemExit(f"{last} rows came to the last step, expected {rows}")
    return {
        "rows_per_s": round(rows * (len(ends) - WARM_UP) / (ends[-1] - ends[WARM_UP - 1])),
        "stages": stages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows per epoch")
    parser.add_argument("--epochs", type=int, default=6, help="measured epochs per run")
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a trial; nothing is kept")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.epochs, options.runs = 50_000, 3, 1
    spark = cairn.session(
        "bench", master=f"local[{PARALLELISM}]", driver__memory="4g", ui__enabled=False
    )
    measured: dict[str, dict[str, list[dict[str, float]]]] = {
        chain: {"chained": [], "unchained": []} for chain in STEPS
    }
    with work_dir() as work:
        files = options.epochs + WARM_UP
        write_files(work / "input", files=files, rows=options.rows, keys=options.keys)
        for index in range(options.runs):
            for chain, ways in measured.items():
                for way, results in ways.items():
                    result = run_chain(
                        spark, work / "input", work / f"{index}-{chain}-{way}", options.rows,
                        chain, chaining=way == "chained",
                    )  # fmt: skip
                    results.append(result)
                    note(f"{chain}, {way}: {result['rows_per_s']:,} rows/s")
    median = {
        chain: {
            way: statistics.median(r["rows_per_s"] for r in found) for way, found in ways.items()
        }
        for chain, ways in measured.items()
    }
    ratio = {chain: round(w["chained"] / w["unchained"], 2) for chain, w in median.items()}
    print(f"\n{'five steps':<14}{'chained':>18}{'unchained':>18}{'ratio':>10}")
    for chain, ways in median.items():
        told = "".join(f"{rate:>11,.0f} rows/s" for rate in ways.values())
        print(f"{chain:<14}{told}{ratio[chain]:>8.2f} ×")
    report(
        "chaining",
        {
            "times_faster": ratio,
            "rows_per_s": median,
            "stages": {
                chain: {way: found[0]["stages"] for way, found in ways.items()}
                for chain, ways in measured.items()
            },
            "runs": {
                chain: {way: [r["rows_per_s"] for r in found] for way, found in ways.items()}
                for chain, ways in measured.items()
            },
            "steps": {chain: [s.__name__ for s in steps] for chain, steps in STEPS.items()},
            "rows_per_epoch": options.rows,
            "epochs": options.epochs,
            "keys": options.keys,
        },
        keep=not options.quick,
    )


if __name__ == "__main__":
    main()
