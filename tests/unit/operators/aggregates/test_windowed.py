"""Aggregates of windows on a harness: against a model in plain Python, and case by case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.operators.window_process import WindowPlan
from cairn.testing import Harness
from cairn.types.durations import MAX_MS
from cairn.windows import Global, Session, Sliding, Tumbling, WindowSpec
from tests.aggregates_model import Row as AnyRow
from tests.aggregates_model import WindowModel, make_aggregation, make_partial_rows
from tests.unit.operators.aggregates.support import Aggregated, in_ms

Row = tuple[int, int, int]


def count_and_max(rows: list[Row]) -> tuple[int, int]:
    return len(rows), max(value for _, _, value in rows)


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
        job, model = (
            Aggregated(WindowPlan(spec, lateness_ms)),
            WindowModel(spec, count_and_max, lateness_ms),
        )
        for number, (batches, watermark_ms) in enumerate(epochs):
            late_before = model.late
            for batch in batches:
                job.push(*batch)
                # As the harness gives them: in the order of their times.
                model.take(sorted(batch, key=lambda row: row[1]))
            if any(batches):
                assert job.harness._operator.late_rows == model.late - late_before
            watermark_ms = max(watermark_ms, job.harness.watermark_ms or 0)
            assert job.end(watermark_ms=watermark_ms) == sorted(model.end(watermark_ms))
            if number == restored_at:
                # An epoch of its own.
                expected = [*in_ms(job.harness.outputs), *model.end(watermark_ms)]
                job.harness.snapshot_and_restore()
                assert in_ms(job.harness.outputs) == sorted(expected)
        expected = sorted(
            (*window, *count_and_max(rows))
            for window, (rows, is_new) in model.held.items()
            if is_new
        )
        assert in_ms(job.harness.drain()) == expected

    check()


@pytest.mark.parametrize("calls", [[(86, 95)], [(86,), (95,)], [(95,), (86,)]])
def test_a_late_row_joins_no_session_of_its_own_epoch_however_rows_are_cut(
    calls: list[tuple[int, ...]],
) -> None:
    job = Aggregated(WindowPlan(Session(10)))
    # Key 2 has a session that is open in state: row 86 touches it.
    job.epoch((2, 96, 0), watermark_ms=101)
    for times in calls:
        job.push(*((key, at, at) for at in times for key in (1, 2)))
    assert job.harness._operator.late_rows == 1
    assert job.end(watermark_ms=1000) == []
    assert job.epoch() == [(1, 95, 105, 1, 95), (2, 86, 106, 3, 95)]


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


def test_a_value_of_two_panes_counts_once_in_the_window_of_both() -> None:
    asked = {"kinds": "count(distinct s)"}
    function, partials = make_aggregation(WindowPlan(Sliding(10, 4)), asked)
    time = partials.layout.time
    with Harness(function, partials.schema, "k", function.schema, event_time=time) as harness:
        # A window of another key comes first, and has no value.
        rows = [(None, 20, None), ("a", 42, ""), ("a", 45, "")]
        given = [AnyRow(k, at, None, s, None) for k, at, s in rows]
        harness.push(make_partial_rows(partials, given, asked).to_pylist())
        harness.commit()
        found = [row[-1] for row in harness.drain() if row[0] == "a"]
    assert found == [1] * len(found)
