"""Aggregations without Spark: partials as Spark would make them, and the results as a plain model
of all rows has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cairn.operators.aggregates.accumulate import (
    Accumulators,
    Aggregate,
    make_aggregate,
    net_rows,
)
from cairn.operators.aggregates.counted import CountAggregate
from cairn.operators.aggregates.edges import Edge, ValueBy
from cairn.operators.aggregates.grouping import number_values
from cairn.operators.aggregates.objects import Sketch
from cairn.operators.aggregates.parse import Call, parse_calls
from cairn.operators.aggregates.partial import Partials, make_partials
from cairn.operators.aggregates.parts import Count, Moments, Part
from cairn.operators.aggregates.running import Aggregation, RunningAggregate
from cairn.operators.aggregates.sets import SetPart
from cairn.operators.aggregates.signed import FloatSum
from cairn.operators.aggregates.windowed import WindowAggregate
from cairn.operators.window_process import WindowPlan
from cairn.windows import Count as CountWindows
from cairn.windows import Session, WindowSpec

TIMESTAMP = pa.timestamp("us", "UTC")
PAIR = pa.struct([("c0", pa.int64()), ("c1", pa.string())])
SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("at", pa.int64()),
        ("v", pa.int64()),
        ("s", pa.string()),
        ("y", pa.float64()),
    ]
)


class Row(NamedTuple):
    k: str | None
    at: int
    """Milliseconds."""
    v: int | None
    s: str | None
    y: float | None
    change: int = 1
    """-1: the row is taken back."""


TERMS: dict[str, tuple[pa.DataType, Callable[[Row], Any]]] = {
    "v": (pa.int64(), lambda row: row.v),
    "s": (pa.string(), lambda row: row.s),
    "y": (pa.float64(), lambda row: row.y),
    "(y > 0)": (pa.bool_(), lambda row: None if row.y is None else row.y > 0),
    "(y < 2)": (pa.bool_(), lambda row: None if row.y is None else row.y < 2),
    "v, s": (PAIR, lambda row: None if None in (row.v, row.s) else (row.v, row.s)),
}
"""SQL, and what it says in Python."""

ASKED = {
    "n": "count(*)",
    "n_some": "count(*) filter (where y > 0)",
    "n_v": "count(v)",
    "total": "sum(v)",
    "total_some": "sum(v) filter (where y > 0)",
    "mean": "avg(v)",
    "low_v": "min(v)",
    "high_y": "max(y)",
    "low_s": "min(s)",
    "high_s": "max(s) filter (where y > 0)",
    "first_s": "first(s)",
    "last_s": "last(s, true)",
    "last_some": "last(v) filter (where y > 0)",
    "by_y": "max_by(s, y)",
    "by_s": "min_by(v, s) filter (where y > 0)",
    "kinds_s": "count(distinct s)",
    "kinds_v": "count(distinct v) filter (where y > 0)",
    "kinds_of_some": "count(distinct v) filter (where y < 2)",
    "kinds_of_all": "count(distinct v)",
    "kinds_both": "count(distinct v, s)",
    "nearly": "approx_count_distinct(v)",
}
SIGNED = {
    "n": "count(*)",
    "n_some": "count(*) filter (where y > 0)",
    "n_v": "count(v)",
    "total": "sum(v)",
    "total_y": "sum(y)",
    "mean": "avg(v) filter (where y > 0)",
    "mean_y": "avg(y)",
    "low_v": "min(v)",
    "high_y": "max(y)",
    "high_s": "max(s) filter (where y > 0)",
    "low_s": "min(s)",
    "kinds_s": "count(distinct s)",
    "kinds_both": "count(distinct v, s) filter (where y > 0)",
}
"""Functions that rows can be taken back from."""


def term(sql: str) -> tuple[pa.DataType, Callable[[Row], Any]]:
    # Of several distinct columns, Spark sees one struct.
    return TERMS["v, s" if "named_struct" in sql else sql]


def make_aggregates(asked: dict[str, str], *, takes_back: bool = False) -> list[Aggregate]:
    found = [net_rows()] if takes_back else []
    for call in parse_calls(asked, ["k"]):
        given = pa.int64() if call.argument is None else term(call.argument)[0]
        result = given
        if "count" in call.function:
            result = pa.int64()
        elif call.function == "avg":
            result = pa.float64()
        by = None if call.by is None else term(call.by)[0]
        found.append(
            make_aggregate(call, given, result, is_timed=True, by_type=by, takes_back=takes_back)
        )
    return found


def make_aggregation(
    plan: WindowPlan | None,
    asked: dict[str, str] = ASKED,
    *,
    takes_back: bool = False,
    changes: bool = False,
    every_ms: int | None = None,
    keys: Sequence[str] = ("k",),
) -> tuple[Aggregation, Partials]:
    aggregates = make_aggregates(asked, takes_back=takes_back)
    is_timed = plan is not None and plan.has_late_rows
    partials = make_partials(
        SCHEMA,
        keys,
        aggregates,
        order="at",
        time="at" if is_timed else None,
        change="_change" if takes_back else None,
    )
    results = [aggregate.field for aggregate in aggregates][int(takes_back) :]
    accumulators = Accumulators(aggregates)
    columns = [SCHEMA.field(key) for key in keys]
    bounds = [pa.field("window_start", TIMESTAMP), pa.field("window_end", TIMESTAMP)]
    if plan is None:
        schema = pa.schema([*columns, *results])
        running = RunningAggregate(
            accumulators, partials.layout, schema, changes=changes, every_ms=every_ms
        )
        return running, partials
    schema = pa.schema([*columns, *bounds, *results])
    if isinstance(plan.windows, CountWindows):
        return CountAggregate(plan.windows, accumulators, partials.layout, schema), partials
    windows = WindowAggregate(plan, accumulators, partials.layout, schema, changes=changes)
    return windows, partials


# Partials


def make_partial_rows(
    partials: Partials, rows: Sequence[Row], asked: dict[str, str] = ASKED
) -> pa.StructArray:
    """What Spark's projection makes of rows."""
    layout = partials.layout
    found: dict[str, pa.Array] = {
        "k": pa.array([row.k for row in rows], pa.string()),
        layout.count: pa.array([1] * len(rows), pa.int64()),
    }
    if layout.is_keyless:
        found[layout.keys[0]] = pa.array([True] * len(rows), pa.bool_())
    if layout.time is not None:
        found[layout.time] = pa.array([row.at * 1000 for row in rows], TIMESTAMP)
    names = zip(layout.parts, layout.conditions, strict=True)
    for aggregate in make_aggregates(asked, takes_back=layout.weight is not None):
        for part in aggregate.parts:
            call, where = aggregate.call, aggregate.call.where
            taken = [next(names) for _ in part.names]
            if (condition := taken[0][1]) is not None:
                assert where is not None
                is_in = [term(where)[1](row) is True for row in rows]
                found[condition] = pa.array(is_in, pa.bool_())
                call = replace(call, where=None)
            made = zip(_part_values(call, part, rows), part.partial_types, strict=True)
            for (name, _), (values, type_) in zip(taken, made, strict=True):
                if name != layout.count:
                    found[name] = pa.array(values, type_)
    arrays = [found[field.name] for field in partials.schema]
    return pa.StructArray.from_arrays(arrays, fields=list(partials.schema))


def _part_values(call: Call, part: Part, rows: Sequence[Row]) -> list[list[Any]]:
    raw = [1 if call.argument is None else term(call.argument)[1](row) for row in rows]
    counts = [call.where is None or term(call.where)[1](row) is True for row in rows]
    values = [value if is_in else None for value, is_in in zip(raw, counts, strict=True)]
    if isinstance(part, SetPart):
        return [[{"c0": v[0], "c1": v[1]} if isinstance(v, tuple) else v for v in values]]
    if isinstance(part, FloatSum):
        return _float_sums(values, rows)
    if isinstance(part, Count):
        pairs = zip(values, rows, strict=True)
        return [[0 if value is None else row.change for value, row in pairs]]
    if isinstance(part, Edge):
        seen = [
            is_in and (value is not None or not call.skips_nulls)
            for value, is_in in zip(raw, counts, strict=True)
        ]
        return [[r.at * 1000 if is_in else None for r, is_in in zip(rows, seen, strict=True)], raw]
    if isinstance(part, ValueBy):
        assert call.by is not None
        by = [term(call.by)[1](r) if is_in else None for r, is_in in zip(rows, counts, strict=True)]
        return [by, raw]
    if isinstance(part, Sketch):
        return [[[] if v is None else [(v * 0x9E3779B97F4A7C15 + 1) % (1 << 62)] for v in values]]
    assert not isinstance(part, Moments), "not asked for here"
    if part.names == ("sum",):
        pairs = zip(values, rows, strict=True)
        return [[None if value is None else value * row.change for value, row in pairs]]
    return [values]


def _float_sums(values: list[Any], rows: Sequence[Row]) -> list[list[Any]]:
    found: list[list[Any]] = [[], [], [], []]
    for value, row in zip(values, rows, strict=True):
        is_finite = value is not None and math.isfinite(value)
        found[0].append(value * row.change if is_finite else 0.0)
        special = [value is not None and math.isnan(value), value == math.inf, value == -math.inf]
        for column, is_it in zip(found[1:], special, strict=True):
            column.append(row.change if is_it else 0)
    return found


def group_partials(
    partials: Partials,
    rows: pa.StructArray,
    pane: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]] | None = None,
    asked: dict[str, str] = ASKED,
) -> pa.StructArray:
    """What Spark's grouping ahead makes of the same rows: one per key, pane and kept values."""
    made = Accumulators(make_aggregates(asked, takes_back=partials.layout.weight is not None))
    kept = [
        name
        for (_, part), name in zip(_part_columns(made), partials.layout.parts, strict=True)
        if isinstance(part, SetPart)
    ]
    layout = partials.layout
    columns = {name: rows.field(name) for name in partials.schema.names}
    if layout.time is not None and pane is not None:
        times = columns[layout.time].cast(pa.int64()).to_numpy()
        columns[layout.time] = pa.array(pane(times)).cast(TIMESTAMP)
    named = (*layout.keys, layout.time, *kept, *layout.conditions)
    by = list(dict.fromkeys(name for name in named if name is not None))
    whole = pa.StructArray.from_arrays([columns[name] for name in by], by)
    at, count = number_values(whole)
    merged = made.merge_rows(at, count, made.read([columns[name] for name in layout.parts]))
    stored = made.store(merged)
    first = pa.array([at.tolist().index(number) for number in range(count)], pa.int64())
    found = {name: columns[name].take(first) for name in by}
    found[layout.count] = pa.array(np.bincount(at, minlength=count))
    for name, array in zip(layout.parts, stored, strict=True):
        if name in found:
            continue
        if pa.types.is_list(columns[name].type):
            # Hashes are not grouped ahead by any plan, but lists of them merge all the same.
            lists: list[list[int]] = [[] for _ in range(count)]
            for number, hashes in zip(at.tolist(), columns[name].to_pylist(), strict=True):
                lists[number] += hashes
            array = pa.array(lists, columns[name].type)
        found[name] = array
    arrays = [found[field.name].cast(field.type) for field in partials.schema]
    return pa.StructArray.from_arrays(arrays, fields=list(partials.schema))


def _part_columns(made: Accumulators) -> list[tuple[str, Part]]:
    return [(name, part) for name, part in made.named_parts for _ in part.names]


# The model


def expected_results(rows: Sequence[Row], asked: dict[str, str] = ASKED) -> tuple[Any, ...]:
    """The results for a key that has had these rows."""
    return tuple(_result(call, rows) for call in parse_calls(asked, ["k"]))


def _result(call: Call, rows: Sequence[Row]) -> Any:
    if call.where is not None:
        rows = [row for row in rows if term(call.where)[1](row) is True]
    if call.argument is None:
        return len(rows)
    get = term(call.argument)[1]
    values = [get(row) for row in rows if get(row) is not None]
    if call.function == "count":
        return len(values)
    if "distinct" in call.function:
        return len(set(values))
    if call.function in ("first", "last"):
        held = [(r.at, *place(get(r))) for r in rows if not call.skips_nulls or get(r) is not None]
        if not held:
            return None
        return (min if call.function == "first" else max)(held)[-1]
    if call.function in ("max_by", "min_by"):
        assert call.by is not None
        by = term(call.by)[1]
        pairs = [(place(by(row)), *place(get(row))) for row in rows if by(row) is not None]
        return (max if call.function == "max_by" else min)(pairs)[-1] if pairs else None
    if not values:
        return None
    if call.function == "sum":
        return sum(values)
    if call.function == "avg":
        return sum(values) / len(values)
    return (max if call.function == "max" else min)((place(value), value) for value in values)[1]


def place(value: Any) -> tuple[Any, ...]:
    """Null first, text by its bytes, NaN last; then the value itself."""
    if value is None:
        return (0, b"", None)
    if isinstance(value, str):
        return (1, value.encode(), value)
    if isinstance(value, float):
        return (1, (math.isnan(value), 0.0 if math.isnan(value) else value), value)
    return (1, value, value)


class WindowModel:
    """Windows of a few keys, one row (key, milliseconds, ...) after the other."""

    def __init__(
        self,
        spec: WindowSpec,
        result: Callable[[list[Any]], tuple[Any, ...]],
        lateness_ms: int = 0,
        *,
        shows_changes: bool = False,
    ) -> None:
        self.spec = spec
        self.result = result
        self.lateness_ms = lateness_ms
        self.shows_changes = shows_changes
        """Windows that got rows are emitted at the end of the epoch, complete or not."""
        self.held: dict[tuple[Any, int, int], list[Any]] = {}
        """(key, start, end) -> [rows, whether there is something to emit]."""
        self.before: list[tuple[Any, int, int]] = []
        """Those of the epoch before: a late row may join them, and no others."""
        self.watermark_ms: int | None = None
        self.late = 0
        self.past_ms = 1 if isinstance(spec, Session) else 0
        """A session has passed only when the watermark is beyond its end."""

    def take(self, rows: Sequence[Any]) -> None:
        gone = (
            None
            if self.watermark_ms is None
            else self.watermark_ms - self.lateness_ms - self.past_ms
        )
        for row in rows:
            key, at = row[:2]
            if isinstance(self.spec, Session):
                self._take_session(row, gone)
                continue
            bounds = [(s // 1000, e // 1000) for s, e in self.spec.assign(at * 1000)]
            open_ = [(s, e) for s, e in bounds if gone is None or e > gone]
            self.late += not open_
            for start, end in open_:
                held = self.held.setdefault((key, start, end), [[], True])
                held[0].append(row)
                held[1] = True

    def _take_session(self, row: Any, gone: int | None) -> None:
        assert isinstance(self.spec, Session)
        key, start = row[:2]
        end = start + self.spec.gap_ms
        if gone is not None and end <= gone:
            known = self.before
            if not any(k == key and e > gone and s <= end and start <= e for k, s, e in known):
                self.late += 1
                return
        rows = [row]
        for span in [s for s in self.held if s[0] == key and s[1] <= end and start <= s[2]]:
            rows += self.held.pop(span)[0]
            start, end = min(start, span[1]), max(end, span[2])
        self.held[key, start, end] = [rows, True]

    def end(self, watermark_ms: int) -> list[tuple[Any, ...]]:
        """What the epoch emits, and the watermark that the next one runs with."""
        found = []
        for (key, start, end), held in list(self.held.items()):
            reached_ms = self.watermark_ms
            is_complete = reached_ms is not None and end + self.past_ms <= reached_ms
            if held[1] and (is_complete or self.shows_changes):
                found.append((key, start, end, *self.result(held[0])))
                held[1] = not is_complete and not self.shows_changes
            if reached_ms is not None and end + self.past_ms + self.lateness_ms <= reached_ms:
                del self.held[key, start, end]
        self.watermark_ms = max(watermark_ms, self.watermark_ms or watermark_ms)
        self.before = list(self.held)
        return sorted(found, key=sort_key)

    def drain(self) -> list[tuple[Any, ...]]:
        """Everything that was not emitted; early results come once more, when they are final."""
        found = [
            (*window, *self.result(rows))
            for window, (rows, is_new) in self.held.items()
            if is_new or self.shows_changes
        ]
        return sorted(found, key=sort_key)


def sort_key(row: Sequence[Any]) -> list[Any]:
    return [(value is not None, str(value)) for value in row]
