"""Aggregations against a plain model of all rows: any batches, abandoned epochs, restarts, late
rows, and partials that Spark makes by the row or grouped ahead.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.backends import BACKENDS
from cairn.operators.aggregates import assign
from cairn.operators.window_process import WindowPlan
from cairn.testing import Harness
from cairn.windows import Session, Sliding, Tumbling, WindowSpec
from tests.aggregates_model import (
    ASKED,
    Row,
    WindowModel,
    expected_results,
    group_partials,
    make_aggregation,
    make_partial_rows,
    sort_key,
)

ROW = st.builds(
    Row,
    st.none() | st.sampled_from(["", "a", "é", "a key of more than sixteen bytes"]),
    st.integers(0, 60),
    st.none() | st.integers(-3, 3),
    st.none() | st.sampled_from(["", "b", "é", "𐍈", "text of more than sixteen bytes"]),
    st.none() | st.sampled_from([-1.5, -0.0, 0.0, 2.0, math.inf, math.nan]),
)
BATCH = st.tuples(st.lists(ROW, max_size=9), st.booleans())
"""Rows, and whether they are grouped ahead."""
SPECS: list[WindowSpec] = [Tumbling(10), Sliding(10, 4), Session(6)]


class Machine:
    """An aggregation on one slot, fed with rows of the stream."""

    def __init__(self, plan: WindowPlan | None, backend: str) -> None:
        self.plan = plan
        function, self.partials = make_aggregation(plan)
        self.harness = Harness(
            function,
            self.partials.schema,
            "k",
            function.schema,
            event_time=self.partials.layout.time,
            backend=backend,
        )

    def push(self, rows: list[Row], is_grouped: bool) -> None:
        partials = make_partial_rows(self.partials, rows)
        if is_grouped and not isinstance(getattr(self.plan, "windows", None), Session):
            partials = self._group(partials)
        if len(partials):
            self.harness.push(partials.to_pylist())

    def _group(self, rows: Any) -> Any:
        pane = None
        if self.plan is not None:
            spec = self.plan.windows

            def pane(times: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
                return assign.panes(spec, times)  # type: ignore[arg-type]

        return group_partials(self.partials, rows, pane)

    def end(self) -> list[tuple[Any, ...]]:
        before = len(self.harness.outputs)
        self.harness.commit()
        return plain(self.harness.outputs[before:])


def plain(rows: list[Any]) -> list[tuple[Any, ...]]:
    found = [tuple(_ms(value) for value in row) for row in rows]
    return sorted(found, key=sort_key)


def _ms(value: Any) -> Any:
    return round(value.timestamp() * 1000) if hasattr(value, "timestamp") else value


def results(rows: list[Row]) -> tuple[Any, ...]:
    return expected_results(rows)


def assert_same(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    assert len(found) == len(expected), (found, expected)
    for one, other in zip(found, expected, strict=True):
        # NaN is not equal to itself, and 0.0 may stand for -0.0.
        texts = [
            [repr(v).removeprefix("-") if v == 0 else repr(v) for v in row] for row in (one, other)
        ]
        names = [*range(len(one) - len(ASKED)), *ASKED]
        wrong = [each for each in zip(names, *texts, strict=True) if each[1] != each[2]]
        assert not wrong, (wrong, one, other)


STEPS = st.lists(BATCH | BATCH | st.sampled_from(["end", "end", "restore", "abandon"]), max_size=12)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_running_results_are_those_of_all_rows_so_far(backend: str, steps: list[Any]) -> None:
    machine = Machine(None, backend)
    committed: dict[str | None, list[Row]] = {}
    fresh: list[Row] = []
    with machine.harness:
        for step in [*steps, "end"]:
            if isinstance(step, tuple):
                machine.push(*step)
                fresh += step[0]
                continue
            if step == "abandon":
                machine.harness.rollback()
                fresh = []
                continue
            for row in fresh:
                committed.setdefault(row.k, []).append(row)
            expected = [(key, *results(committed[key])) for key in {row.k for row in fresh}]
            if step == "restore":
                before = len(machine.harness.outputs)
                machine.harness.snapshot_and_restore(base=bool(len(steps) % 2))
                found = plain(machine.harness.outputs[before:])
            else:
                found = machine.end()
            assert_same(found, sorted(expected, key=sort_key))
            fresh = []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@settings(suppress_health_check=list(HealthCheck))
@given(
    epochs=st.lists(st.tuples(st.lists(BATCH, max_size=2), st.integers(0, 70)), max_size=6),
    lateness_ms=st.sampled_from([0, 8]),
    restored_at=st.integers(0, 5),
)
def test_windows_are_those_of_a_model_row_by_row(
    spec: WindowSpec, backend: str, epochs: list[Any], lateness_ms: int, restored_at: int
) -> None:
    machine = Machine(WindowPlan(spec, lateness_ms), backend)
    model = WindowModel(spec, results, lateness_ms)
    harness = machine.harness
    with harness:
        for number, (batches, watermark_ms) in enumerate(epochs):
            for rows, is_grouped in batches:
                machine.push(rows, is_grouped)
                model.take(sorted(rows, key=lambda row: row.at))
            found = machine.end()
            watermark_ms = max(watermark_ms, harness.watermark_ms or 0)
            harness.advance_watermark(watermark_ms)
            assert_same(found, model.end(watermark_ms))
            if number == restored_at:
                before = len(harness.outputs)
                harness.snapshot_and_restore(base=bool(number % 2))
                assert_same(plain(harness.outputs[before:]), model.end(watermark_ms))
        assert_same(plain(harness.drain()), model.drain())
        # No value is left behind by a window that is gone.
        for key in {row.k for batches, _ in epochs for rows, _ in batches for row in rows}:
            starts = {window[0] for window in harness.state("windows", key).values()}
            for name in ("kinds_s__values", "kinds_v__values", "kinds_both__values"):
                assert {entry[0] for entry in harness.state(name, key)} <= starts
