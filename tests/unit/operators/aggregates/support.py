"""Aggregations without Spark: the functions on a Harness, fed partials as Spark would make them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from cairn.operators.aggregates.accumulate import Accumulators, make_aggregate
from cairn.operators.aggregates.parse import parse_calls
from cairn.operators.aggregates.partial import Partials, make_partials
from cairn.operators.aggregates.running import Aggregation, RunningAggregate
from cairn.operators.aggregates.windowed import WindowAggregate
from cairn.operators.window_process import WindowPlan
from cairn.testing import Harness

SCHEMA = pa.schema([("k", pa.int64()), ("at", pa.int64()), ("v", pa.int64())])
TIMESTAMP = pa.timestamp("us", "UTC")


def made(plan: WindowPlan | None) -> tuple[Aggregation, Partials]:
    """count(*) and max(v) per key, of windows or running."""
    calls = parse_calls({"n": "count(*)", "high": "max(v)"}, ["k"])
    aggregates = [make_aggregate(c, pa.int64(), pa.int64(), is_timed=False) for c in calls]
    bounds = [("window_start", TIMESTAMP), ("window_end", TIMESTAMP)]
    results = [("n", pa.int64()), ("high", pa.int64())]
    is_timed = plan is not None and plan.has_late_rows
    partials = make_partials(SCHEMA, ["k"], aggregates, order="at", time="at" if is_timed else None)
    accumulators = Accumulators(aggregates)
    if plan is None:
        schema = pa.schema([("k", pa.int64()), *results])
        return RunningAggregate(accumulators, partials.layout, schema), partials
    schema = pa.schema([("k", pa.int64()), *bounds, *results])
    return WindowAggregate(plan, accumulators, partials.layout, schema), partials


class Aggregated:
    """An aggregation by the epoch. Times are in milliseconds, and so are windows."""

    def __init__(self, plan: WindowPlan | None, now_ms: int = 0) -> None:
        function, self.partials = made(plan)
        time = self.partials.layout.time
        self.harness = Harness(
            function, self.partials.schema, "k", function.schema, event_time=time, now_ms=now_ms
        )

    def push(self, *rows: tuple[Any, Any, Any]) -> None:
        """Rows (key, milliseconds, value), as one batch."""
        layout = self.partials.layout
        given = []
        for key, at_ms, value in rows:
            row = {"k": key, layout.count: 1, layout.parts[1]: value}
            if layout.time is not None:
                row[layout.time] = None if at_ms is None else _timestamp(at_ms)
            given.append(row)
        if given:
            self.harness.push(given)

    def epoch(
        self, *rows: tuple[Any, Any, Any], watermark_ms: int | None = None
    ) -> list[tuple[Any, ...]]:
        """An epoch of one batch, and the watermark that the next one runs with."""
        self.push(*rows)
        return self.end(watermark_ms=watermark_ms)

    def end(self, *, watermark_ms: int | None = None) -> list[tuple[Any, ...]]:
        """What the epoch under way emits, in order."""
        before = len(self.harness.outputs)
        self.harness.commit()
        found = self.harness.outputs[before:]
        if watermark_ms is not None:
            self.harness.advance_watermark(watermark_ms)
        return in_ms(found)


def in_ms(rows: list[Any]) -> list[tuple[Any, ...]]:
    """In order, nulls last."""
    found = [tuple(_ms(value) for value in row) for row in rows]
    return sorted(found, key=lambda row: [(value is None, value or 0) for value in row])


def _timestamp(at_ms: int) -> Any:
    return pa.scalar(at_ms * 1000, pa.int64()).cast(TIMESTAMP).as_py()


def _ms(value: Any) -> Any:
    return round(value.timestamp() * 1000) if hasattr(value, "timestamp") else value
