"""When `on_timer` is called, in which order, and what it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn import KeyedProcess, state
from cairn.errors import FunctionError
from cairn.slot import records
from cairn.types.durations import MAX_MS
from tests.backends import MORE_IN_SOAK, backend_name
from tests.unit.slot.driven import GROUP_COUNT, Asked, Chain, Driven, timers_only


def test_event_timers_up_to_the_watermark_come_before_the_first_row() -> None:
    driven = Driven(Asked())
    driven.epoch((1, 0, "event 5, event 9"), (2, 0, "event 5, event 6"))
    assert driven.epoch((1, 8, ""), watermark=6) == [
        ("event", 1, 5),
        ("event", 2, 5),
        ("event", 2, 6),
        ("row", 1, 8),
    ]
    assert driven.operator.earliest_timers() == (9, None)


def test_no_event_timer_is_due_without_a_watermark() -> None:
    driven = Driven(Asked())
    driven.epoch((1, 0, "event -5"))
    assert driven.epoch() == []
    assert driven.operator.earliest_timers() == (-5, None)


def test_processing_timers_are_due_by_the_clock_of_the_epoch() -> None:
    driven = Driven(Asked(), event_time=None)
    driven.epoch((1, 0, "processing 50, processing 70"), now=10)
    assert driven.epoch(now=49) == []
    assert driven.epoch(now=50) == [("processing", 1, 50)]
    assert driven.operator.earliest_timers() == (None, 70)


def test_a_timer_is_called_once() -> None:
    driven = Driven(Asked())
    driven.epoch((1, 0, "event 5, event 5"), (1, 1, "event 5"))
    assert driven.epoch(watermark=5) == [("event", 1, 5)]
    assert driven.epoch(watermark=6) == []


def test_a_deleted_timer_is_not_called_and_deleting_none_is_fine() -> None:
    driven = Driven(Asked())
    driven.epoch((1, 0, "event 5, event 6, processing 5, delete_event 77"))
    driven.epoch((1, 0, "delete_event 5, delete_processing 5"), (2, 0, "delete_event 6"))
    assert driven.epoch(watermark=9, now=9) == [("event", 1, 6)]


def test_what_rows_set_that_is_due_comes_after_the_last_row() -> None:
    driven = Driven(Asked())
    assert driven.epoch((1, 7, "event 5, processing 3"), (2, 8, ""), watermark=6, now=4) == [
        ("row", 1, 7),
        ("row", 2, 8),
        ("event", 1, 5),
        ("processing", 1, 3),
    ]


def test_the_watermark_of_others_completes_nothing_where_rows_have_none() -> None:
    driven = Driven(Asked(), has_watermark=False)
    driven.epoch((1, 0, "event 5"))
    assert driven.epoch((1, 1, ""), watermark=100) == [("row", 1, 1)]
    assert driven.operator.earliest_timers() == (MAX_MS, None), "draining comes to it"
    assert driven.epoch(watermark=MAX_MS, draining=True) == [("event", 1, 5)]


def test_timers_come_in_time_order_with_rows_that_may_be_older() -> None:
    driven = Driven(Asked(), is_downstream=True)
    driven.epoch((1, 0, "event 5, event 8, event 12, processing 1"))
    rows = [(2, 4, "event 6"), (2, 5, ""), (3, 7, ""), (3, 11, ""), (3, 12, "")]
    assert driven.epoch(*rows, watermark=10, now=2) == [
        ("processing", 1, 1),
        ("row", 2, 4),
        ("event", 1, 5),
        ("row", 2, 5),
        ("event", 2, 6),
        ("row", 3, 7),
        ("event", 1, 8),
        ("row", 3, 11),
        ("row", 3, 12),
    ]
    assert driven.operator.earliest_timers() == (12, None)


def test_downstream_timers_without_rows_come_at_the_end() -> None:
    driven = Driven(Asked(), is_downstream=True)
    driven.epoch((1, 0, "event 5"))
    assert driven.epoch(watermark=10) == [("event", 1, 5)]


def test_rows_after_a_timer_belong_to_their_own_key() -> None:
    class Counted(KeyedProcess[Any]):
        rows = state.Value("long", default=0)

        def process(self, row: Any, ctx: Any) -> Any:
            self.rows.set((self.rows.get() or 0) + 1)
            ctx.timers.event(row.k + 2)
            return ("row", ctx.key, self.rows.get())

        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            return ("timer", ctx.key, self.rows.get())

    driven = Driven(Counted(), is_downstream=True)
    driven.epoch((1, 0, ""))
    assert driven.epoch((2, 3, ""), (1, 5, ""), watermark=20) == [
        ("timer", 1, 1),
        ("row", 2, 1),
        ("timer", 2, 1),
        ("row", 1, 2),
        ("timer", 1, 2),
    ]


def test_what_a_timer_sets_that_is_due_is_called_in_the_same_epoch() -> None:
    class Events(Chain):
        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            ctx.timers.event(after="10 ms")
            return (ctx.timer_kind, ctx.key, time_ms)

    driven = Driven(Events())
    driven.epoch((1, 0, ""), (2, 5, ""))
    assert driven.epoch(watermark=30) == [
        ("event", 1, 10),
        ("event", 2, 15),
        ("event", 1, 20),
        ("event", 2, 25),
        ("event", 1, 30),
    ]
    assert driven.operator.earliest_timers() == (35, None)


def test_a_timer_may_set_itself_again() -> None:
    class Thrice(KeyedProcess[Any]):
        calls = state.Value("long", default=0)

        def process(self, row: Any, ctx: Any) -> None:
            ctx.timers.event(5)

        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            calls = (self.calls.get() or 0) + 1
            self.calls.set(calls)
            if calls < 3:
                ctx.timers.event(time_ms)
            return ("event", ctx.key, calls)

    driven = Driven(Thrice())
    driven.epoch((1, 0, ""), (2, 0, ""))
    assert driven.epoch(watermark=5) == [("event", k, calls) for calls in (1, 2, 3) for k in (1, 2)]
    assert driven.operator.earliest_timers() == (None, None)


def test_a_timer_that_sets_itself_for_ever_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "AGAIN_MAX", 50)

    class Endless(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> None:
            ctx.timers.processing(ctx.now_ms)

        def on_timer(self, time_ms: int, ctx: Any) -> None:
            ctx.timers.processing(ctx.now_ms)

    driven = Driven(Endless())
    driven.begin()
    driven.push((1, 0, ""))
    with pytest.raises(FunctionError, match="later time") as raised:
        driven.end()
    assert raised.value.facts["operator"] == "op"


def test_a_drain_calls_every_timer_once_and_leaves_what_they_set() -> None:
    driven = Driven(Asked())
    driven.epoch((1, 0, f"event 5, event {MAX_MS}, processing 99"), (2, 0, "event 3"))
    assert driven.epoch(watermark=MAX_MS, now=1, draining=True) == [
        ("event", 2, 3),
        ("event", 1, 5),
        ("event", 1, MAX_MS),
        ("processing", 1, 99),
    ]
    assert driven.operator.earliest_timers() == (None, None)


def test_what_timers_set_in_a_drain_waits_for_the_next_epoch() -> None:
    class Events(Chain):
        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            ctx.timers.event(after="10 ms")
            return (ctx.timer_kind, ctx.key, time_ms)

    driven = Driven(Events())
    driven.epoch((1, 0, ""), (2, 5, ""))
    for calls in range(3):
        assert driven.epoch(watermark=MAX_MS, draining=True) == [
            ("event", 1, 10 + 10 * calls),
            ("event", 2, 15 + 10 * calls),
        ]
    assert driven.operator.earliest_timers() == (40, None)


def test_what_rows_set_in_a_drain_is_called_in_time_order() -> None:
    driven = Driven(Asked(), is_downstream=True)
    driven.epoch((1, 0, "event 50"))
    rows = [(2, 10, "event 20"), (2, 30, ""), (2, 60, "event 70")]
    assert driven.epoch(*rows, watermark=MAX_MS, draining=True) == [
        ("row", 2, 10),
        ("event", 2, 20),
        ("row", 2, 30),
        ("event", 1, 50),
        ("row", 2, 60),
        ("event", 2, 70),
    ]


def test_a_rolled_back_epoch_gives_its_timers_back() -> None:
    driven = Driven(Asked())
    driven.epoch((1, 0, "event 5, event 6"))
    driven.begin(watermark=5)
    driven.push((2, 7, "event 8, event 9"), (1, 7, "delete_event 6"))
    assert timers_only(driven.end(commit=False)) == [("event", 1, 5)]
    assert driven.epoch(watermark=9) == [("event", 1, 5), ("event", 1, 6)]


@pytest.mark.parametrize("draining", [False, True])
def test_an_epoch_that_fails_in_a_timer_gives_its_timers_back(draining: bool) -> None:
    class Failing(Chain):
        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            if ctx.key == 2 and ctx.now_ms == 1:
                raise RuntimeError("not yet")
            ctx.timers.event(99)
            return ("event", ctx.key, time_ms)

    driven = Driven(Failing())
    driven.epoch((1, 0, ""), (2, 0, ""), (3, 0, ""))
    with pytest.raises(FunctionError, match="not yet"):
        driven.begin(watermark=10, now=1, draining=draining)
    driven.operator.state.bring_to(driven.operator.state.version, range(GROUP_COUNT), [])
    assert driven.epoch(watermark=10, now=2) == [("event", k, 10) for k in (1, 2, 3)]
    assert driven.operator.earliest_timers() == (99, None)


def test_on_timer_may_yield_rows() -> None:
    class Yields(Chain):
        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            yield ("event", ctx.key, 1)
            yield {"what": "event", "k": ctx.key, "at": 2}

    driven = Driven(Yields())
    driven.epoch((7, 0, ""))
    assert driven.epoch(watermark=10) == [("event", 7, 1), ("event", 7, 2)]


def test_output_of_many_timers_leaves_in_batches() -> None:
    driven = Driven(Asked())
    driven.epoch(*[(k, 0, f"event {5 + k % 2}") for k in range(5000)])
    rows = driven.epoch(watermark=10)
    assert len(rows) == 5000
    assert rows == sorted(rows, key=lambda row: (row[2], row[1]))
    assert max(map(len, driven.batches)) < 2100


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
def test_timers_see_the_state_of_their_key(backend: str, tmp_path: Path) -> None:
    class Sum(KeyedProcess[Any]):
        total = state.Value("long", default=0)

        def process(self, row: Any, ctx: Any) -> None:
            self.total.set((self.total.get() or 0) + ctx.key)
            ctx.timers.event(10 + ctx.key % 700)

        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            total = self.total.get()
            self.total.clear()
            return ("event", ctx.key, total)

    driven = Driven(Sum(), backend=backend_name(backend), scratch=str(tmp_path / "db"))
    for _ in range(2):
        driven.epoch(*[(k, 0, "") for k in range(3000)])
    rows = driven.epoch(watermark=100) + driven.epoch(watermark=1000)
    assert {k: total for _, k, total in rows} == {k: 2 * k for k in range(3000)}
    assert len(rows) == 3000
    assert driven.operator.state.state_held().entries == 0
    driven.operator.close()


def test_a_new_function_finds_the_timers_of_the_old_one() -> None:
    class New(Asked):
        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            return ("new", ctx.key, time_ms)

    old, new = Driven(Asked()), Driven(New())
    old.epoch((1, 0, "event 5, event 7"))
    old.begin(watermark=5)
    old.push((2, 9, "event 6"))
    assert new.operator.adopt(old.operator)
    version = old.operator.state.version
    assert not new.operator.state.bring_to(version, range(GROUP_COUNT), [])
    assert new.epoch(watermark=9) == [("new", 1, 5), ("new", 1, 7)]


class Counted(KeyedProcess[Any]):
    n = state.Reducing("array<long>", lambda held, more: [held[0] + more[0]])

    def process(self, row: Any, ctx: Any) -> None:
        self.n.add([1])


class TimedCount(Counted):
    def process(self, row: Any, ctx: Any) -> None:
        super().process(row, ctx)
        ctx.timers.event(5)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return ("event", ctx.key, self.n.get()[0])


def test_a_function_that_gains_timers_keeps_its_state() -> None:
    old, new = Driven(Counted()), Driven(TimedCount())
    old.epoch((1, 0, ""))
    assert new.operator.adopt(old.operator)
    new.epoch((1, 0, ""))
    assert new.epoch(watermark=5) == [("event", 1, 2)]
    assert not Driven(Counted()).operator.adopt(new.operator)


def test_a_function_that_gains_timers_restores_state_that_lay_in_arrays() -> None:
    class Summed(Counted):
        total = state.Value("long")

    class TimedSum(TimedCount):
        total = state.Value("long")

    assert Driven(Summed()).operator.adopt(Driven(Summed()).operator)
    assert not Driven(TimedSum()).operator.adopt(Driven(Summed()).operator)


def test_an_operator_whose_rows_waited_elsewhere_runs_behind_the_watermark() -> None:
    driven = Driven(Asked(), delay_ms=100)
    driven.begin(watermark=1000)
    assert driven.operator.context.watermark_ms == 900
    driven.push((1, 899, ""), (1, 900, "event 950"))
    assert driven.end() == [("row", 1, 900)], "the other one is late, even so"
    assert driven.operator.earliest_timers() == (1050, None), "by the watermark of the job"
    driven.begin(watermark=1049)
    assert driven.end() == []
    driven.begin(watermark=1050)
    assert driven.end() == [("event", 1, 950)]
    driven.begin(watermark=MAX_MS, draining=True)
    assert driven.operator.context.watermark_ms == MAX_MS
