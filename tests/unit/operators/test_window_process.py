"""Windows run row by row: what they emit and when, without Spark."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from cairn import windows
from cairn.operators.window_functions import WindowReduce
from cairn.operators.window_process import WindowPlan
from cairn.testing import Harness
from cairn.types import parse_schema
from cairn.windows import WindowSpec
from tests.unit.operators.windowed import (
    SESSION,
    SLIDING,
    T0_MS,
    TUMBLING,
    advanced,
    at,
    listed,
    passed,
    pushed,
    row,
    shown,
    state_is_empty,
    summed,
)

# Complete windows


def test_a_tumbling_window_emits_when_the_watermark_reaches_its_end() -> None:
    with listed(TUMBLING) as harness:
        assert pushed(harness, row(1, 1), row(9.999999, 2), row(10, 3)) == []
        assert advanced(harness, 9.999) == []
        assert advanced(harness, 10) == [(0, 10, (1, 2))]
        assert advanced(harness, 20) == [(10, 20, (3,))]
        assert state_is_empty(harness)


def test_the_rows_of_a_window_come_in_event_time_order_whenever_they_came() -> None:
    with listed(TUMBLING) as harness:
        pushed(harness, row(5, 2), row(7, 3))
        pushed(harness, row(1, 1), row(9, 4))
        assert advanced(harness, 10) == [(0, 10, (1, 2, 3, 4))]


def test_a_row_is_in_every_sliding_window_and_is_kept_once() -> None:
    with listed(SLIDING) as harness:
        pushed(harness, row(1, 1), row(6, 2), row(11, 3))
        assert len(harness.state("rows", "a")) == 3
        assert advanced(harness, 5) == [(-5, 5, (1,))]
        assert advanced(harness, 10) == [(0, 10, (1, 2))]
        assert len(harness.state("rows", "a")) == 2, "the first is in no later window"
        assert advanced(harness, 15) == [(5, 15, (2, 3))]
        assert advanced(harness, 20) == [(10, 20, (3,))]
        assert state_is_empty(harness)


def test_reduce_folds_and_gives_the_other_columns() -> None:
    with summed(SLIDING) as harness:
        pushed(harness, row(1, 1), row(6, 2), row(2, 5, "b"))
        harness.advance_watermark(at(15))
        assert harness.tick() == [
            ("a", at(-5), at(5), at(1), 1),
            ("b", at(-5), at(5), at(2), 5),
            ("a", at(0), at(10), at(1), 3),
            ("b", at(0), at(10), at(2), 5),
            ("a", at(5), at(15), at(6), 2),
        ]
        assert state_is_empty(harness) and state_is_empty(harness, "b")


def test_one_tick_of_the_watermark_completes_many_windows_in_order() -> None:
    with listed(TUMBLING) as harness:
        pushed(harness, row(31, 3), row(1, 1), row(11, 2))
        assert [r[:2] for r in advanced(harness, 100)] == [(0, 10), (10, 20), (30, 40)]


def test_a_day_by_the_calendar_emits_at_local_midnight() -> None:
    with listed(windows.tumbling("1 day", timezone="Europe/Berlin")) as harness:
        pushed(harness, row(3600, 1), row(23.5 * 3600, 2))
        assert advanced(harness, 23 * 3600 - 1) == []
        assert advanced(harness, 23 * 3600) == [(-3600, 23 * 3600, (1,))]


# Late rows


def test_a_late_row_of_a_window_that_is_open_counts() -> None:
    with listed(TUMBLING) as harness:
        pushed(harness, row(3, 1))
        advanced(harness, 9)
        assert pushed(harness, row(1, 2)) == []
        assert advanced(harness, 10) == [(0, 10, (2, 1))]
        assert harness.side("late") == []


def test_a_row_whose_windows_are_gone_goes_aside_and_is_counted() -> None:
    with listed(TUMBLING) as harness:
        pushed(harness, row(3, 1))
        advanced(harness, 10)
        harness.push([row(9.999, 2), row(10, 3)])
        assert harness._operator.late_rows == 1
        assert harness.side("late") == [row(9.999, 2)]
        harness.commit()
        assert advanced(harness, 20) == [(10, 20, (3,))]


def test_a_row_without_a_time_goes_aside() -> None:
    with listed(TUMBLING) as harness:
        harness.push([("a", None, 1), row(1, 2)])
        assert harness.side("late") == [("a", None, 1)]
        harness.commit()
        assert advanced(harness, 10) == [(0, 10, (2,))]


def test_a_row_late_for_some_sliding_windows_is_in_the_others() -> None:
    with listed(SLIDING) as harness:
        advanced(harness, 6)
        assert pushed(harness, row(1, 1)) == []
        assert advanced(harness, 10) == [(0, 10, (1,))]
        assert harness.side("late") == []
        assert state_is_empty(harness)


@pytest.mark.parametrize("make", [listed, summed])
def test_within_the_lateness_each_late_row_emits_again(make: Any) -> None:
    with make(TUMBLING, allowed_lateness_ms=5_000) as harness:
        pushed(harness, row(1, 1))
        assert len(advanced(harness, 10)) == 1
        again = pushed(harness, row(2, 2), row(3, 4))
        assert [r[:2] for r in again] == [(0, 10), (0, 10)]
        assert [r[2] for r in again] in ([(1, 2), (1, 2, 4)], [3, 7])
        assert advanced(harness, 14.999) == []
        assert len(pushed(harness, row(4, 8))) == 1
        assert advanced(harness, 15) == []
        assert state_is_empty(harness)
        assert pushed(harness, row(5, 16)) == []
        assert harness.side("late") == [row(5, 16)]


def test_the_first_row_of_a_window_may_come_within_its_lateness() -> None:
    with listed(TUMBLING, allowed_lateness_ms=5_000) as harness:
        advanced(harness, 12)
        assert pushed(harness, row(1, 1)) == [(0, 10, (1,))]
        assert pushed(harness, row(2, 2)) == [(0, 10, (1, 2))]
        advanced(harness, 15)
        assert state_is_empty(harness)


# Sessions


def test_a_session_grows_and_ends_a_gap_after_its_last_row() -> None:
    with listed(SESSION) as harness:
        pushed(harness, row(0, 1), row(7, 2))
        pushed(harness, row(14, 3))
        assert harness.timers("a")["event"] == [T0_MS + 24_001], "one timer, of the end now"
        assert advanced(harness, 24) == [], "a row at 24 would go on with it"
        assert advanced(harness, 24.001) == [(0, 24, (1, 2, 3))]
        assert state_is_empty(harness)


@pytest.mark.parametrize("make", [listed, summed])
def test_a_row_between_two_sessions_makes_them_one(make: Any) -> None:
    with make(SESSION) as harness:
        pushed(harness, row(0, 1), row(15, 4))
        assert len(harness.state("windows", "a")) == 2
        pushed(harness, row(8, 2))
        assert len(harness.state("windows", "a")) == 1
        assert harness.timers("a")["event"] == [T0_MS + 25_001]
        assert advanced(harness, 100) in ([(0, 25, (1, 2, 4))], [(0, 25, 7)])
        assert state_is_empty(harness)


def test_rows_exactly_a_gap_apart_share_a_session() -> None:
    with listed(SESSION) as harness:
        pushed(harness, row(0, 1))
        advanced(harness, 10)
        pushed(harness, row(10, 2))
        pushed(harness, row(20.000001, 3))
        assert advanced(harness, 100) == [(0, 20, (1, 2)), (20.000001, 30.000001, (3,))]


def test_an_old_row_is_in_time_when_it_goes_on_with_an_open_session() -> None:
    with listed(SESSION) as harness:
        pushed(harness, row(20, 2))
        advanced(harness, 29)
        pushed(harness, row(12, 1), row(9, 0))
        assert advanced(harness, 31) == [(12, 30, (1, 2))]
        assert harness.side("late") == [row(9, 0)]


def test_a_late_row_that_makes_a_session_longer_opens_it_again() -> None:
    with listed(SESSION, allowed_lateness_ms=60_000) as harness:
        pushed(harness, row(0, 1))
        assert advanced(harness, 12) == [(0, 10, (1,))]
        assert pushed(harness, row(8, 2)) == []
        assert advanced(harness, 19) == [(0, 18, (1, 2))]
        assert pushed(harness, row(4, 3)) == [(0, 18, (1, 3, 2))]
        advanced(harness, 78)
        assert not state_is_empty(harness)
        assert advanced(harness, 78.001) == []
        assert state_is_empty(harness)


def test_merging_sessions_leaves_the_timers_of_others_alone() -> None:
    # The removal of the first session is due when the second is complete.
    with listed(SESSION, allowed_lateness_ms=30_000) as harness:
        pushed(harness, row(0, 1))
        advanced(harness, 11)
        pushed(harness, row(30, 2))
        assert T0_MS + 40_001 in harness.timers("a")["event"]
        pushed(harness, row(35, 3))
        assert advanced(harness, 40.001) == []
        assert list(harness.state("windows", "a")) == [(T0_MS + 45_000) * 1000]


# Early results


@pytest.mark.parametrize("make", [listed, summed])
def test_every_n_rows_a_window_emits_what_it_has(make: Any) -> None:
    with make(TUMBLING, early_rows=2) as harness:
        rows = [row(n, 1) for n in range(5)] + [row(11, 1)]
        early = pushed(harness, *rows)
        assert [r[:2] for r in early] == [(0, 10), (0, 10)]
        assert [r[2] for r in early] in ([(1,) * 2, (1,) * 4], [2, 4])
        assert len(pushed(harness, row(6, 1))) == 1
        assert [r[2] for r in advanced(harness, 10)] in ([(1,) * 6], [6])


def test_early_results_by_the_clock_come_only_after_rows() -> None:
    with listed(TUMBLING, early_ms=1_000) as harness:
        pushed(harness, row(1, 1))
        assert passed(harness, 0.5) == []
        pushed(harness, row(2, 2))
        assert passed(harness, 0.5) == [(0, 10, (1, 2))]
        assert passed(harness, 5) == []
        assert harness.timers("a")["processing"] == []
        pushed(harness, row(3, 3))
        assert passed(harness, 1) == [(0, 10, (1, 2, 3))]
        assert advanced(harness, 10) == [(0, 10, (1, 2, 3))]
        assert state_is_empty(harness)


def test_the_early_triggers_of_merged_sessions_become_one() -> None:
    with listed(SESSION, early_ms=2_000, early_rows=3) as harness:
        pushed(harness, row(0, 1), row(15, 3))
        assert pushed(harness, row(8, 2)) == [(0, 25, (1, 2, 3))]
        assert passed(harness, 3) == []


def test_sessions_that_become_one_count_their_rows_together() -> None:
    with listed(SESSION, early_rows=3) as harness:
        assert pushed(harness, row(0, 1), row(1, 2), row(15, 4), row(16, 5)) == []
        assert pushed(harness, row(8, 3)) == [(0, 26, (1, 2, 3, 4, 5))]
        assert pushed(harness, row(9, 3)) == []


def test_reduce_keeps_a_row_that_differs_only_in_the_sign_of_zero() -> None:
    schema = parse_schema("k string, ts timestamp, v double")
    function = WindowReduce(WindowPlan(TUMBLING), schema, ["k"], lambda left, right: right)
    with Harness(function, schema, "k", function.schema, event_time="ts") as harness:
        harness.push([("a", at(1), 0.0), ("a", at(1), -0.0), ("a", at(1), -0.0)])
        harness.commit()
        harness.push(("a", at(1), -0.0))
        harness.commit()
        harness.advance_watermark(at(10))
        assert str(harness.tick()[0][-1]) == "-0.0"


# Global windows


def test_the_global_window_emits_every_n_rows_and_when_drained() -> None:
    with listed(windows.global_(), early_rows=2) as harness:
        assert pushed(harness, row(1, 1), row(2, 2), row(3, 3)) == [(None, None, (1, 2))]
        assert advanced(harness, 10**6) == []
        assert shown(harness.drain()) == [(None, None, (1, 2, 3))]
        assert shown(harness.drain()) == []
        assert pushed(harness, row(10**6, 4), row(10**6, 5))[0][2][:3] == (1, 2, 3)
        assert shown(harness.drain()) == [], "nothing is new"


def test_the_global_window_needs_no_event_time() -> None:
    with listed(windows.global_(), event_time=None) as harness:
        assert pushed(harness, row(2, 1), row(1, 2)) == []
        assert shown(harness.drain()) == [(None, None, (1, 2))]


# Processing time


@pytest.mark.parametrize("event_time", [None, "ts"])
def test_windows_by_the_clock_take_rows_as_they_come(event_time: str | None) -> None:
    spec = windows.tumbling("10 seconds", time="processing")
    with listed(spec, event_time=event_time) as harness:
        pushed(harness, row(99, 1))
        harness.clock.sleep(9)
        pushed(harness, row(1, 2))
        assert passed(harness, 0.999) == []
        assert passed(harness, 0.001) == [(0, 10, (1, 2))]
        assert pushed(harness, row(1, 3)) == []
        assert passed(harness, 10) == [(10, 20, (3,))]
        assert state_is_empty(harness)


def test_sessions_by_the_clock_end_after_a_pause() -> None:
    with summed(windows.session("10 seconds", time="processing"), event_time=None) as harness:
        pushed(harness, row(0, 1))
        harness.clock.sleep(7)
        pushed(harness, row(0, 2))
        assert passed(harness, 10) == []
        assert passed(harness, 0.001) == [(0, 17, 3)]
        assert state_is_empty(harness)


def test_draining_completes_windows_by_the_clock() -> None:
    with summed(windows.sliding("10 s", "5 s", time="processing")) as harness:
        pushed(harness, row(0, 1))
        assert shown(harness.drain()) == [(-5, 5, 1), (0, 10, 1)]
        assert state_is_empty(harness)


# Life


@pytest.mark.parametrize("spec", [TUMBLING, SLIDING, SESSION, windows.global_()])
@pytest.mark.parametrize("make", [listed, summed])
def test_draining_leaves_no_window_without_a_result(make: Any, spec: WindowSpec) -> None:
    with make(spec, allowed_lateness_ms=1_000, early_ms=1_000) as harness:
        pushed(harness, row(1, 1), row(2, 2), row(3, 4, "b"))
        results = {r[:-1]: r[-1] for r in harness.drain()}
        assert {r[0] for r in results} == {"a", "b"}
        assert harness.timers("a") == {"event": [], "processing": []}


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("make", [listed, summed])
def test_open_windows_survive_a_restore(make: Any, base: bool) -> None:
    with make(SESSION, early_rows=3) as harness:
        pushed(harness, row(0, 1), row(15, 4))
        harness.snapshot_and_restore(base=base)
        assert len(pushed(harness, row(8, 2))) == 1
        harness.snapshot_and_restore(base=base)
        assert advanced(harness, 100) in ([(0, 25, (1, 2, 4))], [(0, 25, 7)])
        assert state_is_empty(harness)


def test_an_epoch_rolled_back_leaves_windows_as_they_were() -> None:
    with listed(SESSION) as harness:
        pushed(harness, row(0, 1), row(15, 3))
        timers = harness.timers("a")
        harness.push(row(8, 2))
        harness.rollback()
        assert harness.timers("a") == timers
        assert advanced(harness, 100) == [(0, 10, (1,)), (15, 25, (3,))]


def test_rows_at_the_end_of_the_calendar_have_a_window() -> None:
    last = dt.datetime.max.replace(tzinfo=dt.UTC)
    with listed(TUMBLING, allowed_lateness_ms=1000) as harness:
        harness.push(("a", last, 1))
        ((_, start, end, values),) = harness.drain()
        assert start < end == last and values == (1,)
        assert state_is_empty(harness)
