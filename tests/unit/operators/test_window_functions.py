"""What users give to run over windows: how it is called, what it may return, what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from cairn import WindowFunction, state, windows
from cairn.errors import FunctionError, PlanError
from cairn.operators.window_functions import (
    WindowApply,
    WindowReduce,
    check_window_function,
    result_schema,
)
from cairn.operators.window_process import WindowPlan
from cairn.testing import Harness
from cairn.types import parse_schema
from tests.unit.operators.windowed import (
    SCHEMA,
    TUMBLING,
    Listed,
    at,
    row,
    total,
)


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
        ({"c": 1}, "returned a row with 'c'; the declared columns are a"),
        (5, "returned 5; expected a tuple, dict or row"),
        ("text", "returned 'text'; expected a tuple, dict or row"),
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


# Refusals


class Stateful(Listed):
    count = state.Value("bigint")


class Empty(WindowFunction):
    pass


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Listed, r"give an object, Listed\(\), not the class"),
        (total, "total is not a WindowFunction"),
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
        ({"early_rows": 0}, "early_every_rows of windows must be positive, found 0"),
        ({"early_ms": 0}, "early_every of windows must be positive, found 0 ms"),
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
