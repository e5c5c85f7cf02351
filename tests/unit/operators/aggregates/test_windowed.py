"""Aggregates of windows on a harness: against a model in plain Python, and case by case."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.operators.window_process import WindowPlan
from cairn.types.durations import MAX_MS
from cairn.windows import Global, Session, Sliding, Tumbling, WindowSpec
from tests.unit.operators.aggregates.support import Aggregated, in_ms

Row = tuple[int, int, int]
Spans = dict[tuple[int, int, int], list[Any]]
"""(key, start, end) -> [values, whether there is something to emit]."""


class Model:
    """Windows of a few keys, one row after the other, in milliseconds."""

    def __init__(self, spec: WindowSpec, lateness_ms: int) -> None:
        self.spec = spec
        self.lateness_ms = lateness_ms
        self.held: Spans = {}
        self.watermark_ms: int | None = None
        self.late = 0
        self.past_ms = 1 if isinstance(spec, Session) else 0
        """A session has passed only when the watermark is beyond its end."""

    def take(self, rows: list[Row]) -> None:
        gone = (
            None
            if self.watermark_ms is None
            else self.watermark_ms - self.lateness_ms - self.past_ms
        )
        before = list(self.held)
        for key, at, value in rows:
            if isinstance(self.spec, Session):
                self._take_session(key, at, value, gone, before)
                continue
            bounds = [(s // 1000, e // 1000) for s, e in self.spec.assign(at * 1000)]
            open_ = [(s, e) for s, e in bounds if gone is None or e > gone]
            self.late += not open_
            for start, end in open_:
                held = self.held.setdefault((key, start, end), [[], True])
                held[0].append(value)
                held[1] = True

    def _take_session(
        self, key: int, at: int, value: int, gone: int | None, before: list[tuple[int, int, int]]
    ) -> None:
        assert isinstance(self.spec, Session)
        start, end = at, at + self.spec.gap_ms
        if gone is not None and end <= gone:
            if not any(k == key and e > gone and s <= end and start <= e for k, s, e in before):
                self.late += 1
                return
        values = [value]
        for span in [s for s in self.held if s[0] == key and s[1] <= end and start <= s[2]]:
            values += self.held.pop(span)[0]
            start, end = min(start, span[1]), max(end, span[2])
        self.held[key, start, end] = [values, True]

    def end(self, watermark_ms: int) -> list[tuple[Any, ...]]:
        found = []
        if self.watermark_ms is not None:
            for (key, start, end), held in list(self.held.items()):
                if end + self.past_ms <= self.watermark_ms:
                    if held[1]:
                        found.append((key, start, end, len(held[0]), max(held[0])))
                        held[1] = False
                    if end + self.past_ms + self.lateness_ms <= self.watermark_ms:
                        del self.held[key, start, end]
        self.watermark_ms = max(watermark_ms, self.watermark_ms or watermark_ms)
        return sorted(found)


SPECS: list[WindowSpec] = [
    Tumbling(10),
    Tumbling(7, offset_ms=3),
    Sliding(10, 5),
    Sliding(10, 4),
    Session(6),
]
ROW = st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(-9, 9))
EPOCHS = st.lists(
    st.tuples(st.lists(st.lists(ROW, max_size=8), max_size=2), st.integers(0, 70)), max_size=6
)


@pytest.mark.parametrize("lateness_ms", [0, 8])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_windows_are_those_of_a_model_row_by_row(spec: WindowSpec, lateness_ms: int) -> None:
    @given(EPOCHS, st.integers(0, 5))
    def check(epochs: list[tuple[list[list[Row]], int]], restored_at: int) -> None:
        job, model = Aggregated(WindowPlan(spec, lateness_ms)), Model(spec, lateness_ms)
        for number, (batches, watermark_ms) in enumerate(epochs):
            late_before = model.late
            for batch in batches:
                job.push(*batch)
                # As the harness gives them: in the order of their times.
                model.take(sorted(batch, key=lambda row: row[1]))
            if any(batches):
                assert job.harness._operator.late_rows == model.late - late_before
            watermark_ms = max(watermark_ms, job.harness.watermark_ms or 0)
            assert job.end(watermark_ms=watermark_ms) == model.end(watermark_ms)
            if number == restored_at:
                # An epoch of its own.
                expected = [*in_ms(job.harness.outputs), *model.end(watermark_ms)]
                job.harness.snapshot_and_restore()
                assert in_ms(job.harness.outputs) == sorted(expected)
        expected = sorted(
            (key, start, end, len(values), max(values))
            for (key, start, end), (values, is_new) in model.held.items()
            if is_new
        )
        assert in_ms(job.harness.drain()) == expected

    check()


def test_a_window_is_emitted_when_the_watermark_reaches_its_end() -> None:
    job = Aggregated(WindowPlan(Tumbling(10)))
    assert job.epoch((1, 3, 5), (1, 9, 6), (1, 10, 7), watermark_ms=9) == []
    assert job.epoch(watermark_ms=10) == []
    assert job.epoch() == [(1, 0, 10, 2, 6)]
    assert job.epoch() == []


def test_the_earliest_end_is_told_as_a_timer() -> None:
    job = Aggregated(WindowPlan(Tumbling(10)))
    assert job.harness._operator.earliest_timers() == (None, None)
    job.epoch((1, 13, 5), (2, 35, 6), watermark_ms=20)
    assert job.harness._operator.earliest_timers() == (20, None)
    job.epoch()
    assert job.harness._operator.earliest_timers() == (40, None)


def test_a_late_row_within_the_allowed_lateness_updates_the_result() -> None:
    job = Aggregated(WindowPlan(Tumbling(10), allowed_lateness_ms=5))
    job.epoch((1, 3, 5), watermark_ms=12)
    assert job.epoch() == [(1, 0, 10, 1, 5)]
    assert job.epoch((1, 4, 9)) == [(1, 0, 10, 2, 9)]
    job.epoch(watermark_ms=15)
    assert job.epoch((1, 4, 9)) == []
    assert job.harness._operator.late_rows == 1


def test_a_row_of_a_sliding_window_counts_only_where_windows_are_left() -> None:
    job = Aggregated(WindowPlan(Sliding(10, 5)))
    job.epoch(watermark_ms=10)
    assert job.epoch((1, 7, 5), watermark_ms=15) == []
    assert job.epoch() == [(1, 5, 15, 1, 5)]


def test_a_session_is_bridged_by_a_row_between_two() -> None:
    job = Aggregated(WindowPlan(Session(5)))
    job.epoch((1, 0, 1), (1, 10, 2), (2, 5, 9), watermark_ms=4)
    job.epoch((1, 5, 3), watermark_ms=16)
    assert job.epoch() == [(1, 0, 15, 3, 3), (2, 5, 10, 1, 9)]
    assert job.harness.state("windows", 1) == {}


def test_rows_without_a_time_are_counted_apart() -> None:
    job = Aggregated(WindowPlan(Tumbling(10)))
    job.push((1, None, 1), (1, 2, 1))
    assert (job.harness._operator.untimed_rows, job.harness._operator.late_rows) == (1, 0)


def test_windows_by_the_clock_end_when_it_has_come_there() -> None:
    job = Aggregated(WindowPlan(Tumbling(10, time="processing")), now_ms=3)
    assert job.epoch((1, 0, 5)) == []
    assert job.harness._operator.earliest_timers() == (None, 10)
    job.harness.clock.advance_ms(7)
    assert job.epoch((1, 0, 6)) == [(1, 0, 10, 1, 5)]
    assert in_ms(job.harness.drain()) == [(1, 10, 20, 1, 6)]


def test_sessions_by_the_clock_end_after_a_pause() -> None:
    job = Aggregated(WindowPlan(Session(10, time="processing")), now_ms=3)
    job.epoch((1, 0, 5))
    job.harness.clock.advance_ms(10)
    job.epoch((1, 0, 6))
    job.harness.clock.advance_ms(11)
    assert job.epoch() == [(1, 3, 23, 2, 6)]


def test_the_global_window_emits_early_and_when_drained() -> None:
    job = Aggregated(WindowPlan(Global(), early_rows=2))
    assert job.epoch((1, 3, 5), (2, 3, 1)) == []
    assert job.epoch((1, 4, 6)) == [(1, None, None, 2, 6)]
    assert job.epoch((1, 4, 7)) == []
    assert in_ms(job.harness.drain()) == [(1, None, None, 3, 7), (2, None, None, 1, 1)]
    assert job.harness.drain() == []


def test_the_global_window_asks_to_be_drained_without_reading_its_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Aggregated(WindowPlan(Global(), early_rows=2))
    operator = job.harness._operator
    assert operator.earliest_timers() == (None, None)
    job.epoch((1, 3, 5), (2, 3, 1))
    with monkeypatch.context() as patch:
        patch.setattr(type(operator.function.windows), "between", None)  # type: ignore[attr-defined]
        assert operator.earliest_timers() == (None, MAX_MS)
    job.harness.drain()
    assert operator.earliest_timers() == (None, None)
    assert job.epoch((1, 4, 7), (1, 4, 8)) == [(1, None, None, 3, 8)]


def test_early_results_come_after_enough_rows() -> None:
    job = Aggregated(WindowPlan(Tumbling(10), early_rows=2))
    assert job.epoch((1, 3, 5), (2, 3, 5), (2, 4, 1), watermark_ms=1) == [(2, 0, 10, 2, 5)]
    assert job.epoch((1, 3, 5)) == [(1, 0, 10, 2, 5)]
    assert job.epoch((1, 3, 5), watermark_ms=10) == []
    assert job.epoch() == [(1, 0, 10, 3, 5), (2, 0, 10, 2, 5)]


def test_early_results_come_by_the_clock_and_ask_for_an_epoch() -> None:
    job = Aggregated(WindowPlan(Tumbling(10), early_ms=50))
    assert job.epoch((1, 3, 5), watermark_ms=1) == []
    assert job.harness._operator.earliest_timers() == (10, 50)
    job.harness.clock.advance_ms(50)
    assert job.epoch() == [(1, 0, 10, 1, 5)]
    assert job.harness._operator.earliest_timers() == (10, None)
    job.harness.clock.advance_ms(500)
    assert job.epoch() == []
    assert job.epoch((1, 4, 7)) == []


def test_an_abandoned_epoch_leaves_no_windows() -> None:
    job = Aggregated(WindowPlan(Tumbling(10), early_rows=1))
    job.epoch((1, 3, 5), watermark_ms=1)
    job.push((1, 3, 9), (2, 3, 9))
    job.harness.rollback()
    assert job.epoch((3, 3, 1)) == [(3, 0, 10, 1, 1)]
    assert job.harness.state("windows", 2) == {}


def test_draining_completes_everything() -> None:
    job = Aggregated(WindowPlan(Session(5), allowed_lateness_ms=3))
    job.epoch((1, 3, 5), (1, 100, 6))
    assert in_ms(job.harness.drain()) == [(1, 3, 8, 1, 5), (1, 100, 105, 1, 6)]
    assert job.harness._operator.context.watermark_ms == MAX_MS
