"""How much faster is an interval join by the batch than row by row, on one core, without Spark?

Auctions (id, seller, a title of 40 characters, time) are joined with people (id, name, city, time)
whose id is the seller, within ten seconds of event time. The operator runs in this process as it
does in a slot: rows come in Arrow batches of 10 k, both sides mixed; state is snapshotted and
promoted after each epoch. Time is the processor time of this process. The row-by-row join of
earlier versions, which is the model in the tests, runs over fewer such rows in the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from harness import SEED, note, report

from cairn.key_groups import key_groups
from cairn.operators.join_plan import JoinPlan
from cairn.operators.joins import Join
from cairn.testing import Harness
from cairn.testing.checkpoint import GROUP_COUNT
from cairn.types import parse_schema

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.row_join import RowJoin

AUCTIONS = parse_schema("id bigint, seller bigint, title string, ts timestamp")
PEOPLE = parse_schema("person bigint, name string, city string, ts timestamp")
SLICE_ROWS = 10_000
RATIO_MIN = 10.0


def make_epochs(epochs: int, rows: int, keys: int) -> list[list[tuple[Any, Any, Any]]]:
    """Return, for each epoch, batches of (key groups, times, rows): three auctions a person."""
    rng = np.random.default_rng(SEED)
    made = []
    for epoch in range(epochs):
        start_us = epoch * 20_000_000
        times = np.sort(rng.integers(start_us, start_us + 20_000_000, rows))
        lanes = np.where(rng.random(rows) < 0.25, 1, 0).astype(np.int32)
        ids = rng.integers(0, keys, rows)
        text = np.char.add("a title of some length, number ", (ids % 9973).astype(str))
        stamps = pa.array(times, pa.timestamp("us", "UTC"))
        auctions = pa.StructArray.from_arrays(
            [pa.array(np.arange(rows)), pa.array(ids), pa.array(text), stamps],
            fields=list(AUCTIONS),
            mask=pa.array(lanes == 1),
        )
        people = pa.StructArray.from_arrays(
            [pa.array(ids), pa.array(text), pa.array(text), stamps],
            fields=list(PEOPLE),
            mask=pa.array(lanes == 0),
        )
        whole = pa.StructArray.from_arrays(
            [pa.array(lanes), auctions, people], ["lane", "l0", "l1"]
        )
        groups = pa.array(key_groups(pa.array(ids), pa.int64(), GROUP_COUNT).astype(np.int32))
        made.append(
            [
                tuple(column.slice(at, SLICE_ROWS) for column in (groups, pa.array(times), whole))
                for at in range(0, rows, SLICE_ROWS)
            ]
        )
    return made


def measure(function: Any, plan: JoinPlan, epochs: list[Any], backend: str) -> tuple[float, int]:
    """Return microseconds per row, snapshots included, and the number of results."""
    results = 0

    def count(batch: pa.RecordBatch) -> None:
        nonlocal results
        results += batch.num_rows

    with Harness(
        function,
        {"left": AUCTIONS, "right": PEOPLE},
        {"left": "seller", "right": "person"},
        plan.schema([pa.int64()]),
        event_time="ts",
        watermark="1 second",
        backend=backend,
    ) as harness:
        for outlet in harness._operator.outlets:
            outlet.targets[:] = [count]
        rows, seconds = 0, 0.0
        for number, epoch in enumerate(epochs):
            started = time.process_time()
            harness._begin()
            for groups, times, batch in epoch:
                harness._see(times)
                harness._operator.run(groups, times, batch)
            harness.commit()
            if number:  # The first epoch finds nothing in state.
                seconds += time.process_time() - started
                rows += sum(len(groups) for groups, _, _ in epoch)
    return seconds / rows * 1e6, results


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=200_000, help="rows of an epoch")
    arguments.add_argument("--epochs", type=int, default=6)
    arguments.add_argument("--keys", type=int, default=100_000)
    arguments.add_argument("--backend", default="heap")
    arguments.add_argument("--quick", action="store_true", help="less, and nothing is stored")
    given = arguments.parse_args()
    if given.quick:
        given.rows, given.epochs = 50_000, 3
    result: dict[str, Any] = {"rows": given.rows, "epochs": given.epochs, "keys": given.keys}
    ratios = []
    for how in ("inner", "full"):
        plan = JoinPlan(AUCTIONS, PEOPLE, (("seller", "person"),), -10_000, 10_000, how)
        epochs = make_epochs(given.epochs, given.rows, given.keys)
        fewer = make_epochs(3, given.rows // 4, given.keys // 4)
        best = min(measure(Join(plan), plan, epochs, given.backend) for _ in range(3))
        model, found = min(measure(RowJoin(plan), plan, fewer, given.backend) for _ in range(2))
        same = measure(Join(plan), plan, fewer, given.backend)[1]
        assert same == found, f"{how}: {same} results by the batch, {found} row by row"
        ratios.append(model / best[0])
        note(f"{how}: {best[0]:.2f} us a row, {model:.1f} us row by row: {ratios[-1]:.1f} x")
        result[how] = {"us_per_row": best[0], "row_by_row_us": model, "ratio": ratios[-1]}
    if not given.quick:
        result["ratio"] = min(ratios)
        report(f"joins-{given.backend}", result)
    if given.backend == "heap" and min(ratios) < RATIO_MIN:
        raise SystemExit(f"{min(ratios):.1f} x the rows of the join row by row, wanted {RATIO_MIN}")


if __name__ == "__main__":
    main()
