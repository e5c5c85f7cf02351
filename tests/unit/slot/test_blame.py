"""An error of a user's function names a line in the user's file, wherever it comes up."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from cairn import BatchProcess, FunctionError, KeyedProcess, Process, WindowFunction, state, windows
from cairn.functions import Function
from cairn.operators.window_functions import WindowApply, WindowReduce
from cairn.operators.window_process import WindowPlan
from cairn.protocol.spec import InletSpec, OperatorSpec
from cairn.testing import Harness
from cairn.types import parse_schema
from tests.unit.operators.windowed import SCHEMA as TIMED
from tests.unit.operators.windowed import row as timed_row

SCHEMA = "k long, v long"


def refused(
    function: Function, *, rows: Any = (1, 2), key_by: str | None = "k", **options: Any
) -> FunctionError:
    with (
        pytest.raises(FunctionError) as raised,
        Harness(
            function, options.pop("schema", SCHEMA), key_by, options.pop("out", "k long"), **options
        ) as harness,
    ):
        harness.push(rows)
        harness.commit()
        harness.tick()
    return raised.value


def check_place(error: FunctionError, name: str, line: str = "") -> None:
    """The place is in this file, in that function, and at that line of it."""
    where, _, found = error.at.rpartition(" in ")
    file, _, number = where.rpartition(":")
    assert (file, found) == (__file__, name)
    assert f"\n  at: {error.at}" in str(error)
    with open(__file__) as source:
        assert line in source.read().splitlines()[int(number) - 1]


class Does(KeyedProcess):
    total = state.Reducing("long", operator.add)
    small = state.Value("tinyint")

    def __init__(self, does: Callable[[Any, Any], Any]) -> None:
        self.does = does

    def process(self, row: Any, ctx: Any) -> Any:
        return self.does(self, ctx)


def reads_json(self: Any, ctx: Any) -> None:
    json.loads("{")  # in the library


def sets_too_much(self: Any, ctx: Any) -> None:
    self.small.set(1000)  # too much


def adds_text(self: Any, ctx: Any) -> None:
    self.total.add(1)
    self.total.add("1")  # no number


def emits_aside(self: Any, ctx: Any) -> None:
    ctx.output("aside", (1,))  # not declared


@pytest.mark.parametrize(
    ("does", "line"),
    [
        (reads_json, "in the library"),
        (sets_too_much, "too much"),
        (adds_text, "no number"),
        (emits_aside, "not declared"),
    ],
)
def test_error_in_a_library_or_in_cairn_is_placed_at_the_users_line(
    does: Callable[[Any, Any], Any], line: str
) -> None:
    check_place(refused(Does(does)), does.__name__, line)


def test_row_that_does_not_fit_is_placed_at_the_function() -> None:
    error = refused(Does(lambda self, ctx: ("x",)))
    assert "does not fit its schema" in str(error)
    check_place(error, "process", "def process")


def test_value_that_is_no_row_is_placed_at_the_function() -> None:
    check_place(refused(Does(lambda self, ctx: 5)), "process", "def process")


class Timed(KeyedProcess):
    def process(self, row: Any, ctx: Any) -> Any:
        ctx.timers.processing(at=0)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return self.emitted  # nobody has set it


class TimedMisfit(Timed):
    emitted = ("x",)


def test_error_of_a_timer_is_placed() -> None:
    check_place(refused(Timed()), "on_timer", "nobody has set it")
    error = refused(TimedMisfit())
    assert "does not fit its schema" in str(error)
    assert error.at.startswith(__file__)


class Opens(KeyedProcess):
    def open(self, ctx: Any) -> None:
        raise OSError("no such host")  # in open

    def process(self, row: Any, ctx: Any) -> Any: ...


class Committed(KeyedProcess):
    def process(self, row: Any, ctx: Any) -> Any: ...

    def on_epoch_committed(self, epoch: int) -> None:
        raise OSError("no such host")  # in on_epoch_committed


class Broadcasts(Process):
    rules = state.Broadcast("string", "long")

    def process(self, row: Any, ctx: Any) -> Any:
        self.rules["a"] = 1  # not here

    def process_broadcast(self, row: Any, ctx: Any) -> Any: ...


class Batches(BatchProcess):
    total = state.Value("long")

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        self.total.put_many(ctx.keys, ["x"])  # no number


class Ends(BatchProcess):
    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any: ...

    def end_epoch(self, ctx: Any) -> Any:
        return pa.record_batch({"z": [1]})


class Mean:
    def create(self) -> list[int]:
        return [0, 0]

    def add(self, acc: list[int], value: Any) -> list[int]:
        return acc + value  # no list

    def merge(self, a: list[int], b: list[int]) -> list[int]:
        return a

    def result(self, acc: list[int]) -> float:
        return 0.0


class Aggregates(KeyedProcess):
    mean = state.Aggregating("array<long>", Mean())

    def process(self, row: Any, ctx: Any) -> Any:
        self.mean.add(row.v)


@pytest.mark.parametrize(
    ("function", "name", "line", "options"),
    [
        (Opens(), "open", "in open", {}),
        (Committed(), "on_epoch_committed", "in on_epoch_committed", {}),
        (Broadcasts(), "process", "not here", {"key_by": None, "broadcast": "name string"}),
        (Batches(), "process", "no number", {}),
        (Ends(), "end_epoch", "def end_epoch", {}),
        (Aggregates(), "add", "no list", {}),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Function) else "",
)
def test_error_of_each_method_is_placed(
    function: Function, name: str, line: str, options: dict[str, Any]
) -> None:
    error = refused(function, **options)
    assert error.operator == "harness"
    check_place(error, name, line)


class Wide(WindowFunction):
    def process(self, key: Any, window: Any, rows: Any, ctx: Any) -> Any:
        return {"nothing": 1}


def no_row(left: Any, right: Any) -> Any:
    return None


@pytest.mark.parametrize("kind", ["apply", "reduce"])
def test_what_a_function_of_windows_returned_is_placed_at_that_function(kind: str) -> None:
    plan, schema = WindowPlan(windows.tumbling("10 seconds")), parse_schema(TIMED)
    made: Any = WindowReduce(plan, schema, ["k"], no_row)
    if kind == "apply":
        made = WindowApply(plan, schema, ["k"], Wide(), "n long")
    rows = [timed_row(1, 1), timed_row(2, 2), timed_row(60, 3)]
    error = refused(
        made, rows=rows, schema=TIMED, out=made.schema, event_time="ts", watermark="0 seconds"
    )
    check_place(
        error, *(("process", "def process") if kind == "apply" else ("no_row", "def no_row"))
    )


def test_plan_error_under_a_row_says_which_row() -> None:
    error = refused(Does(lambda self, ctx: Does.total.add(1)))
    assert (error.operator, error.key, error.cause_type) == ("harness", "1", "PlanError")
    check_place(error, "<lambda>", "Does.total.add(1)")


def test_function_whose_module_is_missing_in_the_slot_says_what_to_do() -> None:
    inlet = InletSpec(0, parse_schema(SCHEMA), ("k",))
    spec = OperatorSpec("score", (inlet,), b"cno_such_module\nScore\n.", ())
    with pytest.raises(FunctionError, match="addPyFile") as raised:
        spec.load()
    assert "operator 'score'" in str(raised.value) and "no_such_module" in str(raised.value)
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


class BrokenError(Exception):
    def __str__(self) -> str:
        return self.args[1]  # type: ignore[no-any-return]


def test_an_error_whose_message_cannot_be_made_is_placed_all_the_same() -> None:
    def does(function: Any, ctx: Any) -> None:
        raise BrokenError("one argument")

    error = refused(Does(does))
    assert "raised BrokenError: (str() of it raised IndexError)" in str(error)
    check_place(error, "does", 'raise BrokenError("one argument")')
