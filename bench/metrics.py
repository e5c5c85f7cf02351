"""How much of a slot's work is measuring: where rows fall, which keys are hot, and user metrics?

Drives an operator as a slot does, without Spark: count and sum per key, row by row and by the
batch; and beside it, over the same rows, only that which measures. In processor time, so a busy
machine matters little; runs take turns. Prints which part of the slot's time measuring is, and
what an `inc()` adds to a row.

    python bench/metrics.py [--rows 500000] [--keys 100000] [--runs 7]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from harness import SEED, note, report

from cairn import BatchProcess, KeyedProcess, state
from cairn.backends import make_backend
from cairn.protocol.messages import Begin
from cairn.protocol.spec import InletSpec, OperatorSpec, OutletSpec
from cairn.sinks.base import Execution
from cairn.slot.heat import Heat
from cairn.slot.operator import Operator
from cairn.storage.manifest import EMPTY_VERSION
from cairn.types import parse_schema

GROUP_COUNT = 128
BATCH_ROWS = 10_000
SCHEMA = parse_schema("k long, v double")


class ByRow(KeyedProcess[Any]):
    held = state.Value("struct<n: bigint, s: double>")

    def process(self, row: Any, ctx: Any) -> Any:
        held = self.held.get()
        self.held.set((1, row.v) if held is None else (held.n + 1, held.s + row.v))


class Counted(ByRow):
    """The same with a counter of its own."""

    def open(self, ctx: Any) -> None:
        self.rows = ctx.metrics.counter("rows")

    def process(self, row: Any, ctx: Any) -> Any:
        self.rows.inc()
        held = self.held.get()
        self.held.set((1, row.v) if held is None else (held.n + 1, held.s + row.v))


class ByBatch(BatchProcess):
    held = state.Value("struct<n: bigint, s: double>")

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        grouped = pa.table({"k": ctx.keys, "v": batch["v"]}).group_by("k", use_threads=False)
        found = grouped.aggregate([([], "count_all"), ("v", "sum")])
        keys = found["k"].combine_chunks()
        before = self.held.get_many(keys)
        n = pc.add(found["count_all"].combine_chunks(), pc.fill_null(before.field("n"), 0))
        s = pc.add(found["v_sum"].combine_chunks(), pc.fill_null(before.field("s"), 0.0))
        self.held.put_many(keys, pa.StructArray.from_arrays([n, s], ["n", "s"]))


class Slot:
    """One operator that owns every key."""

    def __init__(self, function: Any, scratch: str) -> None:
        spec = OperatorSpec(
            uid="op",
            inlets=(InletSpec(0, SCHEMA, keys=("k",)),),
            function=cloudpickle.dumps(function),
            outlets=(OutletSpec(None, SCHEMA, (), ()),),
        )
        self.operator = Operator(spec, make_backend("heap", scratch), group_count=GROUP_COUNT)
        self.operator.declare()
        self.operator.state.bring_to(EMPTY_VERSION, range(GROUP_COUNT), [])
        self.operator.state.version = EMPTY_VERSION
        self.operator.heat = None
        self.number = 0

    def epoch(self, groups: pa.Array, rows: pa.StructArray) -> float:
        """The processor time of an epoch, in seconds."""
        self.number += 1
        operator = self.operator
        started = time.thread_time()
        operator.open(self._begin(), 0)
        operator.begin_rows()
        for at in range(0, len(rows), BATCH_ROWS):
            operator.run(groups.slice(at, BATCH_ROWS), None, rows.slice(at, BATCH_ROWS))
        operator.finish()
        spent = time.thread_time() - started
        operator.state.name_pending(f"delta-{self.number}")
        operator.state.bring_to(operator.state.pending or "", range(GROUP_COUNT), [])
        return spent

    def _begin(self) -> Begin:
        return Begin(
            run_id="bench", term=1, epoch=self.number, execution=Execution(), parent=None, now_ms=0,
            watermark_ms=None, parallelism=1, group_count=GROUP_COUNT, inline_bytes_max=0,
        )  # fmt: skip


def measure(heat: Heat, groups: pa.Array, rows: pa.StructArray) -> float:
    """Return the processor time of a slot's measurements of an epoch, in seconds."""
    started = time.thread_time()
    heat.reset()
    for at in range(0, len(rows), BATCH_ROWS):
        heat.add(groups.slice(at, BATCH_ROWS), rows.slice(at, BATCH_ROWS))
    heat.group_rows()
    heat.hot_keys()
    return time.thread_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rng = np.random.default_rng(SEED)
    columns = [rng.integers(0, options.keys, options.rows), rng.random(options.rows)]
    rows = pa.StructArray.from_arrays([pa.array(c) for c in columns], fields=list(SCHEMA))
    groups = pa.array((columns[0] % GROUP_COUNT).astype(np.int32))
    gc.disable()
    heat = Heat((InletSpec(0, SCHEMA, keys=("k",)),), GROUP_COUNT)
    with tempfile.TemporaryDirectory() as scratch:
        slots = {
            "by row": Slot(ByRow(), f"{scratch}/1"),
            "by row, with a counter": Slot(Counted(), f"{scratch}/2"),
            "by batch": Slot(ByBatch(), f"{scratch}/3"),
        }
        spent: dict[str, list[float]] = {name: [] for name in (*slots, "measuring")}
        for index in range(options.runs + 1):
            took = {name: slot.epoch(groups, rows) for name, slot in slots.items()}
            took["measuring"] = measure(heat, groups, rows)
            if index:  # The first is warm-up.
                for name, seconds in took.items():
                    spent[name].append(seconds)
            note(", ".join(f"{name}: {seconds:.3f} s" for name, seconds in took.items()))
    best = {name: min(held) for name, held in spent.items()}
    counter_s = best["by row, with a counter"] - best["by row"]
    report(
        "metrics",
        {
            "of_the_slots_time": {
                api: round(best["measuring"] / (best[api] + best["measuring"]), 3)
                for api in ("by row", "by batch")
            },
            "inc_ns": round(counter_s / options.rows * 1e9),
            "cpu_ns_per_row": {
                name: round(seconds / options.rows * 1e9, 1) for name, seconds in best.items()
            },
            "median_cpu_ns_per_row": {
                name: round(statistics.median(held) / options.rows * 1e9, 1)
                for name, held in spent.items()
            },
            "rows": options.rows,
            "keys": options.keys,
            "runs": options.runs,
        },
        keep=not options.quick,
    )


if __name__ == "__main__":
    main()
