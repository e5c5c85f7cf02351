"""How fast is `.aggregate` in the slot, compared with one group_by of pyarrow on the same rows?

One core, in one process, without Spark: partials by the row as Spark sends them, through the
operator with its state, results and delta, an epoch per batch. The group_by has no state and
covers one epoch at a time. Both take the best of several epochs, in CPU time.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from harness import SEED, note, report

from cairn.operators.aggregates.accumulate import Accumulators, make_aggregate
from cairn.operators.aggregates.parse import parse_calls
from cairn.operators.aggregates.partial import Partials, make_partials
from cairn.operators.aggregates.running import Aggregation, RunningAggregate
from cairn.operators.aggregates.windowed import WindowAggregate
from cairn.operators.window_process import WindowPlan
from cairn.testing import Harness
from cairn.windows import Tumbling

TIME = pa.timestamp("us", "UTC")
BID = pa.struct([("price", pa.int64()), ("channel", pa.string()), ("url", pa.string())])
Aggregates = list[tuple[str, str]]
CASES: dict[str, tuple[dict[str, tuple[str, pa.DataType, pa.DataType]], Aggregates]] = {
    "count, sum": (
        {"n": ("count(*)", pa.int64(), pa.int64()), "x": ("sum(l)", pa.int64(), pa.int64())},
        [("l", "count"), ("l", "sum")],
    ),
    "avg, min, max": (
        {
            "a": ("avg(d)", pa.float64(), pa.float64()),
            "b": ("min(d)", pa.float64(), pa.float64()),
            "c": ("max(l)", pa.int64(), pa.int64()),
        },
        [("d", "mean"), ("d", "min"), ("l", "max")],
    ),
    "max of text": ({"x": ("max(s)", pa.string(), pa.string())}, [("s", "max")]),
    "last of a struct": ({"x": ("last(bid)", BID, BID)}, [("at", "max")]),
    "max_by": ({"x": ("max_by(s, l)", pa.string(), pa.string())}, [("l", "max")]),
    "count(distinct)": (
        {"x": ("count(distinct s)", pa.string(), pa.int64())},
        [("s", "count_distinct")],
    ),
    "approx_count_distinct": (
        {"x": ("approx_count_distinct(l)", pa.int64(), pa.int64())},
        [("l", "count_distinct")],
    ),
}


def make(
    asked: dict[str, tuple[str, pa.DataType, pa.DataType]], plan: WindowPlan | None
) -> tuple[Aggregation, Partials]:
    schema = pa.schema([("k", pa.string()), ("at", TIME)])
    calls = parse_calls({name: text for name, (text, _, _) in asked.items()}, ["k"])
    aggregates = [
        make_aggregate(call, given, result, is_timed=True, by_type=pa.int64())
        for call, (_, given, result) in zip(calls, asked.values(), strict=True)
    ]
    is_timed = plan is not None
    partials = make_partials(schema, ["k"], aggregates, order="0", time="at" if is_timed else None)
    results = [aggregate.field for aggregate in aggregates]
    if plan is None:
        out = pa.schema([("k", pa.string()), *results])
        return RunningAggregate(Accumulators(aggregates), partials.layout, out), partials
    out = pa.schema([("k", pa.string()), ("window_start", TIME), ("window_end", TIME), *results])
    return WindowAggregate(plan, Accumulators(aggregates), partials.layout, out), partials


def make_rows(rng: np.random.Generator, rows: int, keys: int, epoch: int) -> dict[str, Any]:
    number = rng.integers(0, keys, rows)
    at = np.sort(rng.integers(0, 10_000_000, rows)) + epoch * 10_000_000
    price = rng.integers(0, 1 << 40, rows)
    channel = pa.array([f"channel-{i}" for i in range(1000)])
    url = pa.array([f"https://example.com/{i:08}/item.htm?query=1" for i in range(1000)])
    pick = pa.array(rng.integers(0, 1000, rows))
    names = pa.array([f"key-{i}" for i in range(keys)])
    bid = [pa.array(price), channel.take(pick), url.take(pick)]
    return {
        "k": names.take(pa.array(number)),
        "at": pa.array(at),
        "l": pa.array(price),
        "d": pa.array(rng.random(rows)),
        "s": channel.take(pick),
        "bid": pa.StructArray.from_arrays(bid, fields=list(BID)),
    }


def as_partials(
    asked: dict[str, tuple[str, Any, Any]], made: Partials, rows: dict[str, Any]
) -> pa.StructArray:
    """What Spark's projection makes of rows."""
    count = len(rows["k"])
    ones = pa.array(np.ones(count, np.int64))
    found = {"k": rows["k"], made.layout.count: ones}
    if made.layout.time is not None:
        found[made.layout.time] = rows["at"].cast(TIME)
    parts = iter(made.layout.parts)
    for text, _, _ in asked.values():
        function, argument = text.replace("distinct ", "").rstrip(")").split("(")
        argument = argument.split(",")[0]
        if argument == "*":
            next(parts)
            continue
        value = rows[argument]
        columns = {
            "avg": [value, ones],
            "last": [rows["at"], value],
            "max_by": [rows["l"], value],
        }.get(function, [value])
        if function == "approx_count_distinct":
            hashes = value.to_numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            offsets = pa.array(np.arange(count + 1, dtype=np.int32))
            columns = [pa.ListArray.from_arrays(offsets, pa.array(hashes.view(np.int64)))]
        found |= {next(parts): column for column in columns}
    arrays = [found[field.name].cast(field.type) for field in made.schema]
    return pa.StructArray.from_arrays(arrays, fields=list(made.schema))


class Silent(Harness):
    """A harness that leaves results in Arrow."""

    def _take(self, tag: str | None, batch: pa.RecordBatch) -> None:
        pass

    def run_epoch(self, rows: pa.StructArray, times: pa.Array | None) -> None:
        self._begin()
        self._operator.run(pa.array(np.zeros(len(rows), np.int32)), times, rows)
        self.commit()


def timed(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(case: str, *, windowed: bool, rows: int, keys: int, epochs: int, backend: str) -> Any:
    asked, plain = CASES[case]
    function, made = make(asked, WindowPlan(Tumbling(60_000)) if windowed else None)
    rng = np.random.default_rng(SEED)
    ours, theirs = [], []
    with Silent(
        function, made.schema, "k", function.schema, event_time=made.layout.time, backend=backend
    ) as harness:
        for epoch in range(epochs):
            fresh = make_rows(rng, rows, keys, epoch)
            partials = as_partials(asked, made, fresh)
            times = fresh["at"] if made.layout.time is not None else None
            ours.append(timed(functools.partial(harness.run_epoch, partials, times)))
            if made.layout.time is not None:
                harness.advance_watermark((epoch + 1) * 10_000)
            table = pa.table({name: fresh[name] for name in {"k", *(c for c, _ in plain)}})
            grouped = table.group_by("k", use_threads=False)
            theirs.append(timed(functools.partial(grouped.aggregate, plain)))
    best, bare = rows / min(ours), rows / min(theirs)
    return {"rows_per_second": round(best), "group_by": round(bare), "ratio": best / bare}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000, help="rows of an epoch")
    parser.add_argument("--keys", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--backend", default="heap")
    parser.add_argument("--case", choices=CASES, help="only this one")
    options = parser.parse_args()
    found = {}
    for case in [options.case] if options.case else CASES:
        for kind in ("running", "windows"):
            name = f"{case} ({kind})"
            found[name] = measure(
                case,
                windowed=kind == "windows",
                rows=options.rows,
                keys=options.keys,
                epochs=options.epochs,
                backend=options.backend,
            )
            note(f"{name}: {found[name]}")
    report("aggregates", {"options": vars(options), "cases": found})


if __name__ == "__main__":
    main()
