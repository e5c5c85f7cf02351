"""When `on_timer` is called, in which order, and what it sees."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from cairn import KeyedProcess, state
from cairn.backends import make_backend
from cairn.codec import codec
from cairn.durations import MAX_MS
from cairn.errors import FunctionError
from cairn.slot import records
from cairn.slot.operator import Operator
from cairn.slot.protocol import Begin
from cairn.slot.spec import InletSpec, OperatorSpec, OutletSpec
from cairn.storage.manifest import EMPTY_VERSION
from cairn.types import parse_schema

GROUP_COUNT = 4
SCHEMA = parse_schema("k long, at timestamp, ask string")
OUT = parse_schema("what string, k long, at long")


class Asked(KeyedProcess[Any]):
    """Rows say what to set: "event 5", "processing 7", "delete_event 5"; all is told."""

    def process(self, row: Any, ctx: Any) -> Any:
        for order in (row.ask or "").split(", "):
            if order:
                name, at = order.split()
                getattr(ctx.timers, name)(int(at))
        assert ctx.timer_kind is None
        return ("row", ctx.key, ctx.event_time_ms)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        assert ctx.event_time_ms == (time_ms if ctx.timer_kind == "event" else None)
        return (ctx.timer_kind, ctx.key, time_ms)


class Driven:
    """An operator, epoch after epoch."""

    def __init__(
        self,
        function: KeyedProcess[Any],
        *,
        is_downstream: bool = False,
        has_watermark: bool = True,
        event_time: str | None = "at",
        backend: str = "heap",
        scratch: str = "",
    ) -> None:
        spec = OperatorSpec(
            "op",
            (InletSpec(0, SCHEMA, ("k",), event_time),),
            cloudpickle.dumps(function),
            (OutletSpec(None, OUT, (), ()),),
            is_downstream=is_downstream,
            has_watermark=has_watermark,
        )
        self.operator = Operator(spec, make_backend(backend, scratch), group_count=GROUP_COUNT)
        self.batches: list[list[tuple[Any, ...]]] = []
        self.operator.main.targets.append(
            lambda batch: self.batches.append([tuple(r.values()) for r in batch.to_pylist()])
        )
        self.operator.declare()
        self.operator.state.bring_to(EMPTY_VERSION, range(GROUP_COUNT), [])
        self.operator.state.version = EMPTY_VERSION
        self.number = 0

    def begin(self, watermark: int | None = None, now: int = 0, *, draining: bool = False) -> None:
        self.number += 1
        begin = Begin(
            "run", 1, self.number, 0, None, now, watermark, 1, {}, {}, 0,
            passed_ms=None, is_draining=draining,
        )  # fmt: skip
        self.operator.open(begin, 0)
        self.batches.clear()
        self.operator.begin_rows()

    def push(self, *rows: tuple[int, int, str]) -> None:
        struct = codec(pa.struct(list(SCHEMA)))
        given = [
            (k, dt.datetime.fromtimestamp(at / 1000, dt.UTC), ask or None) for k, at, ask in rows
        ]
        array = struct.encode([struct.normalise(row) for row in given])
        times = None
        if self.operator.spec.event_time is not None:
            times = array.field("at").cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        groups = pa.array([k % GROUP_COUNT for k, _, _ in rows], pa.int32())
        self.operator.run(groups, times, array)
        self.operator.flush()

    def end(self, *, commit: bool = True) -> list[tuple[Any, ...]]:
        """Finish the epoch; gives what it emitted."""
        parts = self.operator.finish()
        self.operator.state.finished(f"delta-{self.number}" if parts else None)
        assert self.operator.state.pending is not None
        version = self.operator.state.pending if commit else self.operator.state.version
        assert not self.operator.state.bring_to(version, range(GROUP_COUNT), [])
        return self.emitted()

    def emitted(self) -> list[tuple[Any, ...]]:
        return [row for batch in self.batches for row in batch]

    def epoch(self, *rows: tuple[int, int, str], **begin: Any) -> list[tuple[Any, ...]]:
        self.begin(**begin)
        if rows:
            self.push(*rows)
        return self.end()


def timers_only(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [row for row in rows if row[0] != "row"]


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


class Chain(KeyedProcess[Any]):
    """Each timer sets the next one, ten milliseconds later."""

    def process(self, row: Any, ctx: Any) -> None:
        ctx.timers.event(after=10)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        ctx.timers.event(after="10 ms")
        ctx.timers.processing(after=1)
        return (ctx.timer_kind, ctx.key, time_ms)


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


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
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

    driven = Driven(Sum(), backend=backend, scratch=str(tmp_path / "db"))
    for _ in range(2):
        driven.epoch(*[(k, 0, "") for k in range(3000)])
    rows = driven.epoch(watermark=100) + driven.epoch(watermark=1000)
    assert {k: total for _, k, total in rows} == {k: 2 * k for k in range(3000)}
    assert len(rows) == 3000
    assert driven.operator.state.state_keys() == 0
    driven.operator.close()


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
        (lambda ctx: ctx.timers.event(after=1.5), "`after` is a span of time"),
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
    with pytest.raises(FunctionError, match="no event time to count from") as raised:
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
    begin = Begin("run", 1, 9, 0, 8, 1, None, 1, {}, {}, 0)
    with pytest.raises(FunctionError, match="no key is at hand"):
        driven.operator.open(begin, 0)


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


def test_a_function_that_gains_timers_keeps_its_state() -> None:
    class Counted(KeyedProcess[Any]):
        n = state.Value("long", default=0)

        def process(self, row: Any, ctx: Any) -> None:
            self.n.set((self.n.get() or 0) + 1)

    class Timed(Counted):
        def process(self, row: Any, ctx: Any) -> None:
            super().process(row, ctx)
            ctx.timers.event(5)

        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            return ("event", ctx.key, self.n.get())

    old, new = Driven(Counted()), Driven(Timed())
    old.epoch((1, 0, ""))
    assert new.operator.adopt(old.operator)
    new.epoch((1, 0, ""))
    assert new.epoch(watermark=5) == [("event", 1, 2)]
    assert not Driven(Counted()).operator.adopt(new.operator)
