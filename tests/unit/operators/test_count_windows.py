"""Windows of a number of rows, against slices of lists: reduced, listed and aggregated."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import Job, windows
from cairn.errors import PlanError
from cairn.operators.aggregates import counted
from cairn.operators.aggregates.accumulate import Accumulators, make_aggregate
from cairn.operators.aggregates.counted import CountAggregate
from cairn.operators.aggregates.parse import parse_calls
from cairn.operators.aggregates.partial import make_partials
from cairn.operators.window_functions import WindowApply, WindowReduce
from cairn.operators.window_process import WindowPlan
from cairn.testing import Harness
from cairn.types import parse_schema
from tests.marks import for_soak
from tests.stored_harness import StoredHarness
from tests.unit.operators.windowed import Listed, total
from tests.unit.plan.programs import source

DDL = "k string, v bigint"
SCHEMA = parse_schema(DDL)
CASES = ("reduce", "process", "aggregate")


def harness_of(case: str, spec: windows.Count, **options: Any) -> Harness:
    plan = WindowPlan(spec)
    if case == "reduce":
        reduced = WindowReduce(plan, SCHEMA, ["k"], total)
        return StoredHarness(reduced, DDL, "k", reduced.schema, **options)
    if case == "process":
        applied = WindowApply(plan, SCHEMA, ["k"], Listed(), "vs array<bigint>")
        return StoredHarness(applied, DDL, "k", applied.schema, **options)
    made, partials = aggregated(spec)
    return StoredHarness(made, partials.schema, "k", made.schema, **options)


def aggregated(spec: windows.Count, sql: str = "sum(v)") -> Any:
    (call,) = parse_calls({"total": sql}, ["k"])
    aggregate = make_aggregate(call, pa.int64(), pa.int64(), is_timed=False)
    partials = make_partials(SCHEMA, ["k"], [aggregate], order=None, may_group=False)
    time = pa.timestamp("us", "UTC")
    fields = [
        ("k", pa.string()),
        ("window_start", time),
        ("window_end", time),
        ("total", pa.int64()),
    ]
    return CountAggregate(
        spec, Accumulators([aggregate]), partials.layout, pa.schema(fields)
    ), partials


def given_rows(case: str, rows: list[Any]) -> list[Any]:
    return [(k, 1, v) for k, v in rows] if case == "aggregate" else rows


class Model:
    """All rows of each key; a window is a slice of them."""

    def __init__(self, spec: windows.Count) -> None:
        self.spec = spec
        self.rows: dict[Any, list[int]] = {}

    def run(self, rows: list[Any]) -> list[Any]:
        full = []
        for key, value in rows:
            held = self.rows.setdefault(key, [])
            held.append(value)
            start = len(held) - self.spec.size
            if start >= 0 and start % self.spec.every == 0:
                full.append((key, held[start:]))
        return full


ROWS = st.tuples(st.none() | st.sampled_from(["a", "b"]), st.integers(0, 9))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("backend", "examples"),
    [("heap", 25), ("rocksdb", 8), for_soak("postgres", 8), for_soak("redis", 8)],
)
def test_a_window_emits_when_it_has_all_its_rows(
    case: str, backend: str, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that a few rows are taken in several parts.
    monkeypatch.setattr(counted, "SPREAD_ROWS_MAX", 8)

    @settings(max_examples=examples)
    @given(
        st.lists(st.lists(st.lists(ROWS, max_size=8), max_size=3), max_size=4),
        st.integers(1, 4),
        st.integers(1, 5),
        st.data(),
    )
    def check(epochs: list[Any], size: int, every: int, data: st.DataObject) -> None:
        spec = windows.count(size, every=every)
        model = Model(spec)
        with harness_of(case, spec, backend=backend) as harness:
            for pushes in epochs:
                if data.draw(st.booleans(), label="fails"):
                    for rows in pushes:
                        harness.push(given_rows(case, rows))
                    harness.rollback()
                before = len(harness.outputs)
                for rows in pushes:
                    harness.push(given_rows(case, rows))
                harness.snapshot_and_restore()
                found = harness.outputs[before:]
                assert all(row[1] is None and row[2] is None for row in found)
                full = model.run([row for rows in pushes for row in rows])
                if case == "process":
                    assert [(row[0], list(row[3])) for row in found] == full
                else:
                    sums = sorted((str(key), sum(values)) for key, values in full)
                    assert sorted((str(row[0]), row[3]) for row in found) == sums
            for key, values in model.rows.items():
                assert harness.state("counted", key) == len(values)
                starts = range(0, len(values), spec.every)
                held = {s + spec.size for s in starts if s + spec.size > len(values)}
                assert set(harness.state("windows", key)) == held, "only open windows are kept"
                if case == "process":
                    kept = min((end - spec.size for end in held), default=len(values))
                    assert len(harness.state("rows", key)) <= max(0, len(values) - kept)

    check()


def test_a_window_is_a_number_of_rows_and_a_row_is_in_those_around_it() -> None:
    assert windows.count(3) == windows.Count(3, 3)
    assert windows.Count(3, 3).assign(4) == [(3, 6)]
    assert windows.Count(4, 2).assign(5) == [(2, 6), (4, 8)]
    assert windows.Count(4, 2).assign(1) == [(0, 4)]
    assert windows.Count(2, 5).assign(3) == []
    for size, every in ((0, 1), (1, 0), (True, 1), (1.5, 1)):
        with pytest.raises(PlanError, match="expected: a positive number of rows"):
            windows.count(size, every=every)  # type: ignore[arg-type]


def test_options_that_count_windows_do_not_have_are_refused() -> None:
    keyed = source(Job("counted"), "rows").key_by("k")
    for option in ({"allowed_lateness": "1 s"}, {"early_every_rows": 2}, {"early_every": "1 s"}):
        with pytest.raises(PlanError, match="emit when they are full"):
            keyed.window(windows.count(3), **option)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"have no count\(DISTINCT"):
        aggregated(windows.Count(3, 3), "count(DISTINCT v)")


def test_rows_are_counted_in_the_order_of_their_time_and_none_is_late() -> None:
    schema = parse_schema("k string, ts bigint, v bigint")
    function = WindowApply(
        WindowPlan(windows.count(2)), schema, ["k"], Listed(), "vs array<bigint>"
    )
    with Harness(function, schema, "k", function.schema, event_time="ts") as harness:
        harness.advance_watermark(100)
        harness.push([("a", 9, 3), ("a", 7, 1), ("a", 8, 2)])
        assert [list(row.vs) for row in harness.outputs] == [[1, 2]]
        assert harness.side("late") == []
