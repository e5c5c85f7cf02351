"""Timers that fail and timers that are refused: what is said, of which key and timer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cairn import KeyedProcess, Process
from cairn.errors import FunctionError
from cairn.protocol.messages import Begin
from cairn.sinks.base import Execution
from cairn.testing import Harness
from cairn.types.durations import MAX_MS
from tests.unit.slot.driven import Asked, Chain, Driven


def test_an_error_in_on_timer_names_operator_key_and_timer() -> None:
    class Failing(Chain):
        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            raise ZeroDivisionError("by zero")

    driven = Driven(Failing())
    driven.epoch((7, 0, ""))
    with pytest.raises(FunctionError) as raised:
        driven.begin(watermark=10)
    text = str(raised.value)
    assert "on_timer() of operator 'op' raised ZeroDivisionError: by zero" in text
    assert "key: 7" in text
    assert "timer: event at 1970-01-01T00:00:00.010000+00:00" in text
    assert "in on_timer" in text
    assert raised.value.facts["timer"] == "event at 1970-01-01T00:00:00.010000+00:00"
    assert "row" not in raised.value.facts


def test_an_error_in_a_timer_between_rows_does_not_name_a_row() -> None:
    class Failing(Chain):
        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            ctx.output("nowhere", ())

    driven = Driven(Failing(), is_downstream=True)
    driven.epoch((7, 0, ""))
    driven.begin(watermark=20)
    with pytest.raises(FunctionError, match="no side output 'nowhere'") as raised:
        driven.push((8, 5, ""), (8, 15, ""))
    assert raised.value.facts["key"] == "7"
    assert raised.value.facts["operator"] == "op"
    assert "row" not in raised.value.facts


def test_what_on_timer_returns_must_be_rows() -> None:
    class Wrong(Chain):
        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            return "text"

    driven = Driven(Wrong())
    driven.epoch((7, 0, ""))
    with pytest.raises(FunctionError, match=r"on_timer\(\) returned 'text'"):
        driven.begin(watermark=10)


def refused(
    use: Callable[[Any], Any],
    *,
    event_time: str | None = "at",
    kind: type[KeyedProcess[Any]] = Asked,
) -> FunctionError:
    class Using(kind):  # type: ignore[misc, valid-type]
        def process(self, row: Any, ctx: Any) -> None:
            use(ctx)

    driven = Driven(Using(), event_time=event_time)
    driven.begin()
    with pytest.raises(FunctionError) as raised:
        driven.push((1, 0, ""))
    return raised.value


@pytest.mark.parametrize(
    "use",
    [
        lambda ctx: ctx.timers.event(),
        lambda ctx: ctx.timers.processing(),
        lambda ctx: ctx.timers.event(5, after=5),
        lambda ctx: ctx.timers.processing(5, after="1 s"),
    ],
)
def test_a_timer_needs_exactly_one_of_at_and_after(use: Callable[[Any], Any]) -> None:
    error = refused(use)
    assert "TypeError: a timer needs exactly one of `at` and `after`" in str(error)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda ctx: ctx.timers.event(1.5), "milliseconds since 1970 or a datetime; found 1.5"),
        (lambda ctx: ctx.timers.event(after=1.5), "`after` must be a duration"),
        (lambda ctx: ctx.timers.event(after="soon"), "after must be a span of time"),
        (lambda ctx: ctx.timers.event(MAX_MS + 1), "out of range"),
        (lambda ctx: ctx.timers.delete_event("x"), "milliseconds since 1970 or a datetime"),
    ],
)
def test_a_wrong_time_is_refused(use: Callable[[Any], Any], expected: str) -> None:
    assert expected in str(refused(use))


def test_a_timer_without_on_timer_is_refused() -> None:
    class Plain(KeyedProcess[Any]):
        pass

    error = refused(lambda ctx: ctx.timers.processing(5), kind=Plain)
    assert "give Using a method on_timer(self, time_ms, ctx)" in str(error)
    assert error.facts["operator"] == "op"


def test_a_process_that_uses_a_timer_is_told_that_it_has_none() -> None:
    class Unkeyed(Process[Any]):
        def process(self, row: Any, ctx: Any) -> None:
            ctx.timers.processing(after="1 s")

    harness = Harness(Unkeyed(), "v long", None, "v long")
    with harness, pytest.raises(FunctionError) as raised:
        harness.push((1,))
    assert "Unkeyed uses a timer, but is a Process" in str(raised.value)
    assert "next: use key_by(...) and a KeyedProcess" in str(raised.value)
    assert "on_timer" not in str(raised.value)


def test_an_event_timer_without_event_time_is_refused() -> None:
    for use in (lambda ctx: ctx.timers.event(5), lambda ctx: ctx.timers.delete_event(5)):
        error = refused(use, event_time=None)
        assert "no event time" in str(error)
        assert "ctx.timers.processing" in str(error)


def test_an_event_timer_after_a_processing_timer_needs_a_time() -> None:
    class Wrong(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> None:
            ctx.timers.processing(after=0)

        def on_timer(self, time_ms: int, ctx: Any) -> None:
            ctx.timers.event(after="1 s")

    driven = Driven(Wrong())
    driven.begin()
    driven.push((1, 0, ""))
    with pytest.raises(FunctionError, match="without an event time to count from") as raised:
        driven.end()
    assert raised.value.facts["timer"] == "processing at 1970-01-01T00:00:00+00:00"


def test_timers_outside_a_key_are_refused() -> None:
    class Eager(Asked):
        def open(self, ctx: Any) -> None:
            self.ctx = ctx
            if ctx.now_ms == 0:
                ctx.timers.event(5)

        def on_epoch_committed(self, epoch: int) -> None:
            self.ctx.timers.processing(5)

    driven = Driven(Eager())
    with pytest.raises(FunctionError, match="no key is at hand"):
        driven.begin(now=0)
    driven.begin(now=1)
    driven.end()
    begin = Begin("run", 1, 9, Execution(), 8, 1, None, 1, {}, {}, 0)
    with pytest.raises(FunctionError, match="no key is at hand"):
        driven.operator.open(begin, 0)
