"""Windows run row by row: what they emit and when, without Spark."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import WindowFunction, state, windows
from cairn.errors import FunctionError, PlanError
from cairn.testing import Harness
from cairn.types import parse_schema
from cairn.window_functions import (
    WindowApply,
    WindowReduce,
    check_window_function,
    result_schema,
)
from cairn.window_process import WindowPlan
from cairn.windows import Session, WindowSpec

SCHEMA = "k string, ts timestamp, v bigint"
T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
T0_MS = int(T0.timestamp() * 1000)


def at(seconds: float) -> dt.datetime:
    return T0 + dt.timedelta(seconds=seconds)


def row(seconds: float, v: int, k: str = "a") -> tuple[str, dt.datetime, int]:
    return (k, at(seconds), v)


class Listed(WindowFunction):
    """All values of a window, in order."""

    def process(self, key: Any, window: Any, rows: Iterable[Any], ctx: Any) -> Any:
        yield ([r.v for r in rows],)


def total(left: Any, right: Any) -> Any:
    return left._replace(v=left.v + right.v)


def listed(spec: WindowSpec, *, event_time: str | None = "ts", **plan: Any) -> Harness:
    function = WindowApply(
        WindowPlan(spec, **plan), parse_schema(SCHEMA), ["k"], Listed(), "vs array<bigint>"
    )
    return Harness(function, SCHEMA, "k", function.schema, event_time=event_time, now_ms=T0_MS)


def summed(spec: WindowSpec, *, event_time: str | None = "ts", **plan: Any) -> Harness:
    function = WindowReduce(WindowPlan(spec, **plan), parse_schema(SCHEMA), ["k"], total)
    return Harness(function, SCHEMA, "k", function.schema, event_time=event_time, now_ms=T0_MS)


def shown(results: list[Any]) -> list[Any]:
    """(start, end, value) with bounds in seconds since T0."""
    return [
        (*(None if t is None else (t - T0).total_seconds() for t in r[1:3]), r[-1]) for r in results
    ]


def pushed(harness: Harness, *rows: Any) -> list[Any]:
    """The rows as one epoch, committed; what came out, timers at its end included."""
    before = len(harness.outputs)
    harness.push(list(rows))
    harness.commit()
    return shown(harness.outputs[before:])


def advanced(harness: Harness, seconds: float) -> list[Any]:
    """What comes out when the watermark gets there."""
    harness.advance_watermark(at(seconds))
    return shown(harness.tick())


def passed(harness: Harness, seconds: float) -> list[Any]:
    """What comes out when so much time passes by the clock."""
    harness.clock.sleep(seconds)
    return shown(harness.tick())


def state_is_empty(harness: Harness, key: str = "a") -> bool:
    names = set(harness.function.made_state())
    held = [harness.state(name, key) for name in names]
    return not any(held) and harness.timers(key) == {"event": [], "processing": []}


TUMBLING = windows.tumbling("10 seconds")
SLIDING = windows.sliding("10 seconds", "5 seconds")
SESSION = windows.session("10 seconds")


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


class Lived(Listed):
    def open(self, ctx: Any) -> None:
        self.told: list[str] = ["open"]

    def on_epoch_committed(self, epoch: int) -> None:
        self.told.append(f"committed {epoch}")

    def close(self) -> None:
        self.told.append("close")


def test_a_window_function_is_opened_told_and_closed() -> None:
    function = WindowApply(
        WindowPlan(TUMBLING), parse_schema(SCHEMA), ["k"], Lived(), "vs array<bigint>"
    )
    harness = Harness(function, SCHEMA, "k", function.schema, event_time="ts")
    inner = harness.function.function
    harness.push(row(1, 1))
    harness.commit()
    harness.push(row(2, 1))
    harness.close()
    assert [told.split()[0] for told in inner.told] == ["open", "committed", "close"]


class Pair(NamedTuple):
    b: str
    a: int


@dataclass
class PairObject:
    b: str
    a: int


@pytest.mark.parametrize(
    "result",
    [
        (1, "x"),
        {"b": "x", "a": 1},
        Pair("x", 1),
        PairObject("x", 1),
        [(1, "x")],
        iter([{"a": 1, "b": "x"}]),
    ],
    ids=["tuple", "dict", "named tuple", "dataclass", "list", "iterator"],
)
def test_a_window_function_gives_rows_of_any_form(result: Any) -> None:
    made = (lambda: result) if not hasattr(result, "__next__") else (lambda: [(1, "x")])

    class Given(WindowFunction):
        def process(self, key: Any, window: Any, rows: Any, ctx: Any) -> Any:
            assert key == ctx.key and window.start == at(0) and window.end == at(10)
            return made()

    function = WindowApply(
        WindowPlan(TUMBLING), parse_schema(SCHEMA), ["k"], Given(), "a bigint, b string"
    )
    with Harness(function, SCHEMA, "k", function.schema, event_time="ts") as harness:
        harness.push(row(1, 1))
        harness.commit()
        harness.advance_watermark(at(10))
        assert harness.tick() == [("a", at(0), at(10), 1, "x")]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"c": 1}, "gave a row with 'c'; declared are a"),
        (5, "gave 5; expected a tuple, dict or row"),
        ("text", "gave 'text'; expected a tuple, dict or row"),
    ],
)
def test_what_is_no_row_is_refused(result: Any, message: str) -> None:
    class Given(WindowFunction):
        def process(self, key: Any, window: Any, rows: Any, ctx: Any) -> Any:
            return result

    function = WindowApply(WindowPlan(TUMBLING), parse_schema(SCHEMA), ["k"], Given(), "a bigint")
    with Harness(function, SCHEMA, "k", function.schema, event_time="ts") as harness:
        harness.push(row(1, 1))
        harness.commit()
        harness.advance_watermark(at(10))
        with pytest.raises(FunctionError, match=message):
            harness.tick()


def test_a_reduce_that_returns_nothing_is_told() -> None:
    function = WindowReduce(
        WindowPlan(TUMBLING), parse_schema(SCHEMA), ["k"], lambda left, right: None
    )
    with Harness(function, SCHEMA, "k", function.schema, event_time="ts") as harness:
        harness.push(row(1, 1))
        with pytest.raises(FunctionError, match=r"reduce\(\) returned None; expected a row"):
            harness.push(row(2, 1))


def test_several_key_columns_stand_before_the_window() -> None:
    schema = parse_schema("x bigint, ts timestamp, y string, v bigint")
    function = WindowReduce(WindowPlan(TUMBLING), schema, ["y", "x"], total)
    assert function.schema.names == ["y", "x", "window_start", "window_end", "ts", "v"]
    with Harness(function, schema, ("y", "x"), function.schema, event_time="ts") as harness:
        harness.push([(1, at(1), "p", 3), (1, at(2), "p", 4), (1, at(1), "q", 5)])
        harness.commit()
        harness.advance_watermark(at(10))
        assert sorted(harness.tick()) == [
            ("p", 1, at(0), at(10), at(1), 7),
            ("q", 1, at(0), at(10), at(1), 5),
        ]


def test_a_window_of_windows_replaces_the_bounds_of_the_inner_ones() -> None:
    schema = parse_schema("k string, window_start timestamp, window_end timestamp, n bigint")
    function = WindowReduce(WindowPlan(TUMBLING), schema, ["k"], lambda left, right: left)
    assert function.schema.names == ["k", "window_start", "window_end", "n"]


def test_rows_at_the_end_of_the_calendar_have_a_window() -> None:
    last = dt.datetime.max.replace(tzinfo=dt.UTC)
    with listed(TUMBLING, allowed_lateness_ms=1000) as harness:
        harness.push(("a", last, 1))
        ((_, start, end, values),) = harness.drain()
        assert start < end == last and values == (1,)
        assert state_is_empty(harness)


# Refusals


class Stateful(Listed):
    count = state.Value("bigint")


class Empty(WindowFunction):
    pass


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Listed, r"give an object, Listed\(\), not the class"),
        (total, "total is no WindowFunction"),
        (Empty(), "Empty has no process"),
        (Stateful(), "declares state count"),
    ],
)
def test_what_cannot_run_over_windows_is_refused(function: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_window_function(function, "w")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"early_rows": 0}, "early_every_rows of windows is 0"),
        ({"early_ms": 0}, "early_every of windows is 0 ms"),
    ],
)
def test_triggers_that_make_no_sense_are_refused(plan: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        WindowPlan(TUMBLING, **plan)


def test_windows_by_the_clock_know_no_lateness() -> None:
    with pytest.raises(PlanError, match="no row is late there"):
        WindowPlan(windows.session("1 s", time="processing"), allowed_lateness_ms=1)


@pytest.mark.parametrize(
    ("keys", "columns"), [(["k"], "k bigint"), (["k"], "window_end bigint"), (["window_start"], "")]
)
def test_names_that_would_be_there_twice_are_refused(keys: list[str], columns: str) -> None:
    schema = parse_schema("k string, window_start timestamp")
    with pytest.raises(PlanError, match="would be there twice"):
        result_schema(schema, keys, list(parse_schema(columns)) if columns else [])


# Against a model


class Model:
    """Windows over rows held in a list, computed anew whenever something is asked."""

    def __init__(self, spec: WindowSpec) -> None:
        self.spec = spec
        self.kept: list[tuple[int, int]] = []
        self.late: list[tuple[int, int]] = []
        self.results: Counter[tuple[int, int, tuple[int, ...]]] = Counter()
        self.watermark_ms: int | None = None

    def windows(self, rows: list[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        if isinstance(self.spec, Session):
            gap_us = self.spec.gap_ms * 1000
            start = end = None
            for time, v in sorted(rows):
                if start is None or end is None or time > end:
                    start = time
                else:
                    found[start, time + gap_us] = found.pop((start, end))
                end = time + gap_us
                found.setdefault((start, end), []).append(v)
            return found
        for time, v in sorted(rows):
            for bounds in self.spec.assign(time):
                found.setdefault(bounds, []).append(v)
        return found

    def is_done(self, end_us: int) -> bool:
        mark = self.watermark_ms
        return mark is not None and windows.complete_ms(self.spec, end_us) <= mark

    def add(self, time: int, v: int) -> None:
        around = [bounds for bounds, vs in self.windows([*self.kept, (time, v)]).items() if v in vs]
        if all(self.is_done(end) for _, end in around):
            self.late.append((time, v))
        else:
            self.kept.append((time, v))

    def move(self, watermark_ms: int | None) -> None:
        """The windows that a watermark completes emit."""
        before = self.watermark_ms
        for bounds, vs in self.windows(self.kept).items():
            done_ms = windows.complete_ms(self.spec, bounds[1])
            is_new = before is None or done_ms > before
            if is_new and (watermark_ms is None or done_ms <= watermark_ms):
                self.results[*bounds, tuple(vs)] += 1
        if watermark_ms is not None:
            self.watermark_ms = watermark_ms
        if isinstance(self.spec, Session):
            gone = [b for b in self.windows(self.kept) if self.is_done(b[1])]
            self.kept = [r for r in self.kept if not any(s <= r[0] < e for s, e in gone)]


specs = st.one_of(
    st.integers(1, 12).map(lambda n: windows.tumbling(f"{n} ms", offset=f"{n - 1} ms")),
    st.integers(1, 12).flatmap(
        lambda n: st.integers(1, n).map(lambda m: windows.sliding(f"{n} ms", f"{m} ms"))
    ),
    st.integers(1, 6).map(lambda n: windows.session(f"{n} ms")),
)
# Often on a whole millisecond, where bounds and watermarks are.
moments = st.one_of(st.integers(0, 40).map(lambda ms: ms * 1000), st.integers(0, 40_000))
streams = st.lists(st.tuples(st.lists(moments, max_size=6), st.integers(0, 8)), max_size=8)


@settings(max_examples=150, deadline=None)
@given(specs, streams, st.booleans())
def test_windows_agree_with_the_model(
    spec: WindowSpec, epochs: list[tuple[list[int], int]], restores: bool
) -> None:
    model = Model(spec)
    mark = count = 0
    all_rows: list[tuple[int, int]] = []
    in_time = True
    with listed(spec) as harness:
        for times, step in epochs:
            rows = []
            for time in sorted(times):
                count += 1
                rows.append((time, count))
                all_rows.append((T0_MS * 1000 + time, count))
                in_time &= time >= mark * 1000
            for time, v in rows:
                model.add(T0_MS * 1000 + time, v)
            for time, v in rows:  # One by one: rows of one time keep their order.
                harness.push(("a", T0 + dt.timedelta(microseconds=time), v))
            harness.commit()
            if restores:
                harness.snapshot_and_restore()
            mark += step
            harness.advance_watermark(T0_MS + mark)
            harness.tick()
            model.move(T0_MS + mark)
        harness.drain()
        model.move(None)
        microsecond = dt.timedelta(microseconds=1)
        found = Counter(
            (*(T0_MS * 1000 + (t - T0) // microsecond for t in (start, end)), values)
            for _, start, end, values in harness.outputs
        )
        assert found == model.results
        if in_time:
            batch = model.windows(all_rows)
            assert found == Counter((*bounds, tuple(vs)) for bounds, vs in batch.items())
        assert [v for _, _, v in harness.side("late")] == [v for _, v in model.late]
        assert state_is_empty(harness)


@settings(max_examples=60, deadline=None)
@given(specs.filter(lambda spec: not isinstance(spec, Session)), streams, st.integers(0, 10))
def test_the_last_result_of_a_window_has_every_row_that_was_not_too_late(
    spec: WindowSpec, epochs: list[tuple[list[int], int]], lateness_ms: int
) -> None:
    expected: dict[tuple[int, int], list[tuple[int, int]]] = {}
    late = []
    mark: int | None = None
    count = 0
    with listed(spec, allowed_lateness_ms=lateness_ms) as harness:
        for times, step in epochs:
            for time in sorted(times):
                count += 1
                open_ = [
                    bounds
                    for bounds in spec.assign(T0_MS * 1000 + time)
                    if mark is None or bounds[1] // 1000 + lateness_ms > T0_MS + mark
                ]
                for bounds in open_:
                    expected.setdefault(bounds, []).append((time, count))
                if not open_:
                    late.append(count)
                harness.push(("a", T0 + dt.timedelta(microseconds=time), count))
            harness.commit()
            mark = step + (mark or 0)
            harness.advance_watermark(T0_MS + mark)
            harness.tick()
        harness.drain()
        last = {(start, end): values for _, start, end, values in harness.outputs}
        moment = dt.timedelta(microseconds=1)
        assert {
            tuple(T0_MS * 1000 + (t - T0) // moment for t in bounds): values
            for bounds, values in last.items()
        } == {bounds: tuple(v for _, v in sorted(rows)) for bounds, rows in expected.items()}
        assert [v for _, _, v in harness.side("late")] == late
        assert state_is_empty(harness)
