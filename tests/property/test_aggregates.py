"""Aggregations against a plain model of all rows: any batches, abandoned epochs, restarts, late
rows, and partials that Spark makes by the row or grouped ahead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.backends import BACKENDS
from cairn.backends.cached.backend import CachedBackend
from cairn.operators.aggregates import assign
from cairn.operators.window_process import WindowPlan
from cairn.windows import Session, Sliding, Tumbling, WindowSpec
from tests.aggregates_model import (
    ASKED,
    SIGNED,
    Row,
    WindowModel,
    expected_results,
    group_partials,
    make_aggregation,
    make_partial_rows,
    sort_key,
)
from tests.backends import IN_TURN, OUTSIDE, WITH_SERVERS
from tests.marks import for_soak, in_turn
from tests.stored_harness import StoredHarness

ROW = st.builds(
    Row,
    st.none() | st.sampled_from(["", "a", "é", "a key of more than sixteen bytes"]),
    st.integers(0, 60),
    st.none() | st.integers(-3, 3),
    st.none() | st.sampled_from(["", "b", "é", "𐍈", "text of more than sixteen bytes"]),
    st.none() | st.sampled_from([-1.5, -0.0, 0.0, 2.0, math.inf, math.nan]),
    st.just(1),
)
BATCH = st.tuples(st.lists(ROW, max_size=9), st.booleans())
"""Rows, and whether they are grouped ahead."""
SPECS: list[WindowSpec] = [Tumbling(10), Sliding(10, 4), Session(6)]


@pytest.fixture(scope="module", autouse=True)
def small_tables() -> Any:
    """Let some states leave the arrays for the database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedBackend, "table_bytes_max", 300)
        yield


class Machine:
    """An aggregation on one slot, fed with rows of the stream."""

    def __init__(
        self,
        plan: WindowPlan | None,
        backend: str,
        asked: dict[str, str] = ASKED,
        **options: Any,
    ) -> None:
        self.plan = plan
        self.asked = asked
        function, self.partials = make_aggregation(plan, asked, **options)
        self.harness = StoredHarness(
            function,
            self.partials.schema,
            "k",
            function.schema,
            event_time=self.partials.layout.time,
            backend=backend,
        )

    def push(self, rows: list[Row], is_grouped: bool) -> None:
        partials = make_partial_rows(self.partials, rows, self.asked)
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

        return group_partials(self.partials, rows, pane, self.asked)

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


def signed_results(rows: list[Row]) -> tuple[Any, ...]:
    return expected_results(rows, SIGNED)


def assert_same(
    found: list[tuple[Any, ...]],
    expected: list[tuple[Any, ...]],
    asked: dict[str, str] = ASKED,
) -> None:
    assert len(found) == len(expected), (found, expected)
    for one, other in zip(found, expected, strict=True):
        # NaN is not equal to itself, and 0.0 may stand for -0.0.
        texts = [
            [repr(v).removeprefix("-") if v == 0 else repr(v) for v in row] for row in (one, other)
        ]
        names = [*range(len(one) - len(asked)), *asked]
        wrong = [each for each in zip(names, *texts, strict=True) if each[1] != each[2]]
        assert not wrong, (wrong, one, other)


STEPS = st.lists(BATCH | BATCH | st.sampled_from(["end", "end", "restore", "abandon"]), max_size=12)


@pytest.mark.parametrize("backend", WITH_SERVERS)
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


@pytest.mark.parametrize(("spec", "backend"), in_turn(SPECS, IN_TURN), ids=str)
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
            for name in ("s__seen", "v__seen", "kinds_both__values"):
                assert {entry[0] for entry in harness.state(name, key)} <= starts


class View:
    """What is left of changes: the rows with 1, less those with -1."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.contents: dict[str, tuple[Any, ...]] = {}
        self.seen = 0

    def follow(self, outputs: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Apply what was emitted since, and return the rows that hold now."""
        for row in outputs[self.seen :]:
            content = tuple(_ms(value) for value in row[:-1])
            # By its text, because NaN is not equal to itself.
            name = repr(content).replace("-0.0", "0.0")
            self.counts[name] += row[-1]
            self.contents[name] = content
        self.seen = len(outputs)
        assert set(self.counts.values()) <= {0, 1}, self.counts
        held = [self.contents[name] for name, count in self.counts.items() if count]
        return sorted(held, key=sort_key)


TURN = st.tuples(st.lists(ROW, max_size=6), st.lists(st.integers(0, 99), max_size=4), st.booleans())
"""New rows, the places of rows to take back among all that are left, whether they are grouped."""


def take_turn(held: list[Row], turn: Any) -> list[Row]:
    """Change the rows that are left, and return the changes."""
    rows, places, _ = turn
    changes = list(rows)
    held += rows
    for place in places:
        if held:
            changes.append(held.pop(place % len(held))._replace(change=-1))
    return changes


def group_by_key(rows: Sequence[Row]) -> dict[str | None, list[Row]]:
    found: dict[str | None, list[Row]] = {}
    for row in rows:
        found.setdefault(row.k, []).append(row)
    return found


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        *in_turn(list(BACKENDS), [False, True]),
        *(for_soak(backend, changes) for backend in OUTSIDE for changes in (False, True)),
    ],
)
@settings(suppress_health_check=list(HealthCheck))
@given(epochs=st.lists(st.lists(TURN, max_size=2), max_size=6), restored_at=st.integers(0, 5))
def test_rows_that_are_taken_back_leave_the_results_of_the_others(
    backend: str, changes: bool, epochs: list[Any], restored_at: int
) -> None:
    machine = Machine(None, backend, SIGNED, takes_back=True, changes=changes)
    held: list[Row] = []
    view, shown = View(), set()
    with machine.harness as harness:
        for number, turns in enumerate(epochs):
            touched = set()
            for turn in turns:
                rows = take_turn(held, turn)
                touched |= {row.k for row in rows}
                machine.push(rows, turn[2])
            found = machine.end()
            present = group_by_key(held)
            if changes:
                expected = [(key, *signed_results(rows)) for key, rows in present.items()]
                assert_same(view.follow(harness.outputs), sorted(expected, key=sort_key), SIGNED)
            else:
                # A key that was shown and has no rows left is shown once more, empty.
                expected = [
                    (key, *signed_results(present.get(key, [])))
                    for key in touched
                    if key in present or key in shown
                ]
                assert_same(found, sorted(expected, key=sort_key), SIGNED)
                shown = (shown | touched) & set(present)
            if number == restored_at:
                harness.snapshot_and_restore(base=bool(number % 2))
        # Nothing is left of keys without rows.
        for key in {row.k for turns in epochs for rows, _, _ in turns for row in rows}:
            if key not in group_by_key(held):
                assert harness.state("aggregates", key) is None
                for name in ("kinds_s__counts", "high_s__counts", "low_v__counts"):
                    assert harness.state(name, key) == {}


@pytest.mark.parametrize(
    ("spec", "backend", "emit"), in_turn(SPECS, IN_TURN, ["change", "final"]), ids=str
)
@settings(suppress_health_check=list(HealthCheck))
@given(
    epochs=st.lists(st.tuples(st.lists(BATCH, max_size=2), st.integers(0, 70)), max_size=6),
    lateness_ms=st.sampled_from([0, 8]),
    restored_at=st.integers(0, 5),
)
def test_changes_of_windows_add_up_to_their_results(
    spec: WindowSpec, backend: str, emit: str, epochs: list[Any], lateness_ms: int, restored_at: int
) -> None:
    shows_changes = emit == "change"
    plan = WindowPlan(spec, lateness_ms, early_rows=1 if shows_changes else None)
    machine = Machine(plan, backend, changes=True)
    model = WindowModel(spec, results, lateness_ms, shows_changes=shows_changes)
    view, gone = View(), {}
    with machine.harness as harness:
        for number, (batches, watermark_ms) in enumerate(epochs):
            for rows, is_grouped in batches:
                machine.push(rows, is_grouped)
                model.take(sorted(rows, key=lambda row: row.at))
            before = {window: list(held[0]) for window, held in model.held.items()}
            watermark_ms = max(watermark_ms, harness.watermark_ms or 0)
            machine.end()
            model.end(watermark_ms)
            harness.advance_watermark(watermark_ms)
            gone |= {window: rows for window, rows in before.items() if window not in model.held}
            shown = {window: held[0] for window, held in model.held.items() if not held[1]}
            expected = [(*window, *results(rows)) for window, rows in (gone | shown).items()]
            assert_same(view.follow(harness.outputs), sorted(expected, key=sort_key))
            if number == restored_at:
                harness.snapshot_and_restore(base=bool(number % 2))
                view.follow(harness.outputs)
                before = {window: list(held[0]) for window, held in model.held.items()}
                model.end(watermark_ms)
                gone |= {w: rows for w, rows in before.items() if w not in model.held}


@pytest.mark.parametrize(("spec", "backend"), in_turn(SPECS, IN_TURN[::-1]), ids=str)
@settings(suppress_health_check=list(HealthCheck))
@given(epochs=st.lists(st.lists(TURN, max_size=2), max_size=5))
def test_windows_take_rows_back(spec: WindowSpec, backend: str, epochs: list[Any]) -> None:
    plan = WindowPlan(spec, early_rows=1)
    machine = Machine(plan, backend, SIGNED, takes_back=True, changes=True)
    held: list[Row] = []
    view = View()
    with machine.harness as harness:
        for turns in epochs:
            for turn in turns:
                machine.push(take_turn(held, turn), turn[2])
            machine.end()
            if isinstance(spec, Session):
                # A session stays as long as it was, so only its rows are compared.
                found = Counter(
                    row[0] for row in view.follow(harness.outputs) for _ in range(row[3])
                )
                assert found == Counter(row.k for row in held)
                continue
            model = WindowModel(spec, signed_results)
            model.take(held)
            assert_same(view.follow(harness.outputs), model.drain(), SIGNED)


@settings(suppress_health_check=list(HealthCheck))
@given(epochs=st.lists(st.lists(BATCH, max_size=2), max_size=6))
def test_an_aggregate_of_an_aggregate_is_that_of_the_present_results(epochs: list[Any]) -> None:
    """How many keys have that many rows, and what their values come to."""
    first = Machine(None, "heap", {"n": "count(*)", "total": "sum(v)"}, changes=True)
    second = Machine(None, "heap", SIGNED, takes_back=True, changes=True)
    held: list[Row] = []
    view = View()
    with first.harness, second.harness:
        for batches in epochs:
            for rows, is_grouped in batches:
                first.push(rows, is_grouped)
                held += rows
            before = len(first.harness.outputs)
            first.harness.commit()
            changes = [
                Row(f"{n} rows", 0, total, key, None, change)
                for key, n, total, change in first.harness.outputs[before:]
            ]
            second.push(changes, False)
            second.harness.commit()
            inner = [
                Row(
                    f"{len(rows)} rows",
                    0,
                    sum(found) if (found := _some(rows)) else None,
                    key,
                    None,
                )
                for key, rows in group_by_key(held).items()
            ]
            expected = [(key, *signed_results(rows)) for key, rows in group_by_key(inner).items()]
            assert_same(view.follow(second.harness.outputs), sorted(expected, key=sort_key), SIGNED)


def _some(rows: Sequence[Row]) -> list[int]:
    return [row.v for row in rows if row.v is not None]


@pytest.mark.parametrize("changes", [False, True])
@settings(suppress_health_check=list(HealthCheck))
@given(
    epochs=st.lists(st.tuples(st.lists(ROW, max_size=5), st.integers(0, 30)), max_size=8),
    restored_at=st.integers(0, 7),
)
def test_results_at_intervals_come_when_they_are_due(
    changes: bool, epochs: list[Any], restored_at: int
) -> None:
    machine = Machine(None, "heap", every_ms=25, changes=changes)
    held: list[Row] = []
    due: dict[str | None, int] = {}
    now_ms = 0
    with machine.harness as harness:
        for number, (rows, wait_ms) in enumerate(epochs):
            machine.push(rows, False)
            held += rows
            for row in rows:
                due.setdefault(row.k, now_ms + 25)
            before = len(harness.outputs)
            if number == restored_at:
                harness.snapshot_and_restore()
            else:
                harness.commit()
            found = [tuple(row) for row in harness.outputs[before:]]
            if changes:
                found = [row[:-1] for row in found if row[-1] > 0]
            ready = [key for key, at_ms in due.items() if at_ms <= now_ms]
            expected = [(key, *results(group_by_key(held)[key])) for key in ready]
            if changes:
                assert {row[0] for row in found} <= set(ready)
            else:
                assert_same(plain(found), sorted(expected, key=sort_key))
            due = {key: at_ms for key, at_ms in due.items() if key not in ready}
            assert harness._operator.earliest_timers() == (None, min(due.values(), default=None))
            now_ms += wait_ms
            harness.clock.advance_ms(wait_ms)
        if not changes:
            expected = [(key, *results(group_by_key(held)[key])) for key in due]
            assert_same(plain(harness.drain()), sorted(expected, key=sort_key))
