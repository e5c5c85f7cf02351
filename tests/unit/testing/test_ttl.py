"""State that expires, as a function sees it: every kind, by both clocks, through the harness."""

from __future__ import annotations

import ast
import datetime as dt
import operator
from typing import Any

import pytest

from cairn import KeyedProcess, state
from cairn.errors import FunctionError, PlanError
from cairn.state import TTL
from cairn.testing import Harness

SECOND = 1_000
NOTHING = (-1, None, None, None, [], {})
ONE = (1, {"v": 1}, 1, 1.0, [1], {"1": 1})
BY_EVENT = TTL("1 minute", clock="event")


class Mean:
    def create(self) -> Any:
        return (0, 0.0)

    def add(self, acc: Any, value: float) -> Any:
        return (acc[0] + 1, acc[1] + value)

    def merge(self, left: Any, right: Any) -> Any:
        return (left[0] + right[0], left[1] + right[1])

    def result(self, acc: Any) -> float:
        return float(acc[1] / acc[0])


def make_function(ttl: str | TTL) -> KeyedProcess[Any]:
    class Keep(KeyedProcess[Any]):
        value = state.Value("long", default=-1, ttl=ttl)
        pickled = state.Value(object, ttl=ttl)
        total = state.Reducing("long", operator.add, ttl=ttl)
        mean = state.Aggregating("struct<n:long,s:double>", Mean(), ttl=ttl)
        items = state.List("long", ttl=ttl)
        entries = state.Map("string", "long", ttl=ttl)

        def process(self, row: Any, ctx: Any) -> Any:
            if row.op == "fail":
                raise ValueError("as told")
            if row.op == "write":
                self.value.set(row.v)
                self.pickled.set({"v": row.v})
                self.total.add(row.v)
                self.mean.add(row.v)
                self.items.append(row.v)
                self.entries[str(row.v)] = row.v
                return None
            if row.op == "clear":
                for held in (self.value, self.pickled, self.total, self.mean, self.items):
                    held.clear()
                self.entries.clear()
                return None
            if row.op == "measure":
                return (repr((len(self.items), len(self.entries), "1" in self.entries)),)
            seen = (
                self.value.get(), self.pickled.get(), self.total.get(), self.mean.get(),
                list(self.items), dict(self.entries),
            )  # fmt: skip
            return (repr(seen),)

    return Keep()


class OneKey:
    """Each call is an epoch of one row, at a time in seconds."""

    def __init__(self, ttl: str | TTL) -> None:
        self.is_event = isinstance(ttl, TTL) and ttl.clock == "event"
        self.harness = Harness(
            make_function(ttl),
            schema="k long, op string, v long, ts timestamp",
            key_by="k",
            out="seen string",
            event_time="ts" if self.is_event else None,
        )

    def push(self, op: str, at: float, v: int = 1) -> Any:
        if not self.is_event:
            clock = self.harness.clock
            clock.advance_ms(round(at * SECOND) - clock.now_ms)
        ts = dt.datetime.fromtimestamp(at, dt.UTC)
        emitted = self.harness.push((1, op, v, ts))
        return ast.literal_eval(emitted[0].seen) if emitted else None

    def do(self, op: str, at: float, v: int = 1) -> Any:
        seen = self.push(op, at, v)
        self.harness.commit()
        return seen


CLOCKS = [TTL("1 minute"), BY_EVENT]


def refreshed(ttl: TTL) -> TTL:
    return TTL(ttl.duration, ttl.clock, "read-write")


@pytest.mark.parametrize("ttl", CLOCKS, ids=lambda ttl: ttl.clock)
def test_a_value_lives_for_its_ttl_and_not_a_millisecond_longer(ttl: TTL) -> None:
    one = OneKey(ttl)
    one.do("write", 100)
    assert one.do("look", 159.999) == ONE
    assert one.do("look", 160) == NOTHING
    assert one.do("measure", 160) == (0, 0, False)


@pytest.mark.parametrize("ttl", CLOCKS, ids=lambda ttl: ttl.clock)
def test_items_and_entries_expire_one_by_one(ttl: TTL) -> None:
    one = OneKey(ttl)
    one.do("write", 100, 1)
    one.do("write", 130, 2)
    assert one.do("look", 159) == (2, {"v": 2}, 3, 1.5, [1, 2], {"1": 1, "2": 2})
    assert one.do("look", 161) == (2, {"v": 2}, 3, 1.5, [2], {"2": 2})
    assert one.do("measure", 161) == (1, 1, False)
    assert one.do("look", 190) == NOTHING


@pytest.mark.parametrize("ttl", CLOCKS, ids=lambda ttl: ttl.clock)
def test_a_fold_begins_anew_after_it_has_expired(ttl: TTL) -> None:
    one = OneKey(ttl)
    one.do("write", 100, 5)
    one.do("write", 160, 1)
    assert one.do("look", 161) == ONE


@pytest.mark.parametrize("ttl", CLOCKS, ids=lambda ttl: ttl.clock)
def test_reading_keeps_alive_what_is_declared_so(ttl: TTL) -> None:
    one = OneKey(refreshed(ttl))
    one.do("write", 100)
    assert one.do("look", 150) == ONE
    assert one.do("look", 209) == ONE
    assert one.do("measure", 260) == (1, 1, True)
    assert one.do("look", 269) == NOTHING


@pytest.mark.parametrize("ttl", CLOCKS, ids=lambda ttl: ttl.clock)
def test_counting_and_asking_for_an_entry_keep_nothing_alive(ttl: TTL) -> None:
    one = OneKey(refreshed(ttl))
    one.do("write", 100)
    assert one.do("measure", 159) == (1, 1, True)
    assert one.do("look", 160) == NOTHING


@pytest.mark.parametrize("ttl", [*CLOCKS, *map(refreshed, CLOCKS)], ids=lambda ttl: ttl.text)
@pytest.mark.parametrize("base", [False, True])
def test_times_survive_a_restore(ttl: TTL, base: bool) -> None:
    one = OneKey(ttl)
    one.do("write", 100)
    one.do("look", 130)
    one.harness.snapshot_and_restore(base=base)
    end = 160 if ttl.refresh == "write" else 190
    assert one.do("measure", end - 1) == (1, 1, True)
    assert one.do("look", end) == NOTHING


def test_an_epoch_that_is_rolled_back_refreshes_nothing() -> None:
    one = OneKey(refreshed(BY_EVENT))
    one.do("write", 100)
    assert one.push("look", 150) == ONE
    with pytest.raises(FunctionError, match="as told"):
        one.push("fail", 151)
    assert one.do("look", 160) == NOTHING


def test_within_an_epoch_event_time_goes_on_and_the_clock_stands_still() -> None:
    by_event, by_clock = OneKey(BY_EVENT), OneKey("1 minute")
    for one, expected in ((by_event, NOTHING), (by_clock, ONE)):
        one.push("write", 100)
        assert one.push("look", 159) == ONE
        assert one.push("look", 160) == expected


def test_what_is_cleared_is_gone_for_an_older_row_too() -> None:
    one = OneKey(BY_EVENT)
    one.do("write", 100)
    # Expired by this row's time; without a watermark a row of before may follow.
    one.do("clear", 170)
    assert one.do("look", 120) == NOTHING


def test_a_write_of_before_does_not_shorten_a_life() -> None:
    one = OneKey(BY_EVENT)
    one.do("write", 100, 1)
    one.do("write", 70, 2)
    seen = one.do("look", 159)
    assert seen[:3] == (2, {"v": 2}, 3)
    # Each item and entry has a time of its own.
    assert seen[4:] == ([1], {"1": 1})


def test_values_set_to_none_are_cleared_and_refused_ones_leave_no_trace() -> None:
    class Sets(KeyedProcess[Any]):
        value = state.Value("long", ttl="1 minute")
        entries = state.Map("string", "long", ttl="1 minute")

        def process(self, row: Any, ctx: Any) -> Any:
            if row.v == 0:
                self.value.set(None)
                self.entries["a"] = None
            elif row.v < 0:
                self.entries["a"] = "text"  # type: ignore[assignment]
            else:
                self.value.set(row.v)
                self.entries["a"] = row.v

    with Harness(Sets(), "k long, v long", "k", "k long") as harness:
        harness.push((1, 5))
        with pytest.raises(FunctionError, match="state 'entries': expected bigint, found str"):
            harness.push((1, -1))
        harness.push((1, 5))
        harness.commit()
        assert (harness.state("value", 1), harness.state("entries", 1)) == (5, {"a": 5})
        harness.push((1, 0))
        harness.commit()
        assert (harness.state("value", 1), harness.state("entries", 1)) == (None, {"a": None})


@pytest.mark.parametrize(
    ("ttl", "message"),
    [
        ("soon", "ttl must be a span of time, found 'soon'"),
        ("0 seconds", "ttl must be positive"),
        (5, "ttl must be a span of time, found 5"),
    ],
)
def test_a_ttl_that_is_none_is_refused(ttl: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        state.Value("long", ttl=ttl)


@pytest.mark.parametrize("given", [{"clock": "sun"}, {"refresh": "never"}])
def test_unknown_words_in_a_ttl_are_refused(given: Any) -> None:
    with pytest.raises(PlanError, match="expected: one of"):
        TTL("1 hour", **given)


def test_a_ttl_survives_being_text() -> None:
    for ttl in (TTL("1 hour"), TTL("90 seconds", clock="event", refresh="read-write")):
        again = TTL.of(ttl.text)
        assert again is not None
        assert (again.ms, again.clock, again.refresh) == (ttl.ms, ttl.clock, ttl.refresh)
        assert again.text == ttl.text


def test_event_time_that_rows_do_not_have_is_refused() -> None:
    with pytest.raises(PlanError, match="'value': its ttl counts event time"):
        Harness(make_function(BY_EVENT), "k long, op string, v long", "k", "seen string")


class Remind(KeyedProcess[Any]):
    """A timer half a minute after each row looks at what lives for a minute."""

    last = state.Value("long", ttl=BY_EVENT)

    def process(self, row: Any, ctx: Any) -> None:
        self.last.set(row.v)
        ctx.timers.event(after="30 seconds")

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return (repr((time_ms // SECOND, self.last.get())),)


def remind() -> Harness:
    return Harness(
        Remind(), "k long, v long, ts timestamp", "k", "seen string",
        event_time="ts", watermark="1 second",
    )  # fmt: skip


def row(key: int, v: int, at: float) -> tuple[Any, ...]:
    return key, v, dt.datetime.fromtimestamp(at, dt.UTC)


def test_a_timer_sees_what_was_visible_at_its_time_however_far_the_watermark_jumps() -> None:
    with remind() as harness:
        harness.push([row(1, 5, 100)])
        harness.commit()
        # From 99 to 9999: all of it has expired by then, but not at the timer's time.
        harness.push([row(2, 6, 10_000)])
        harness.commit()
        assert [ast.literal_eval(out.seen) for out in harness.tick()] == [(130, 5)]
        harness.tick()
        assert harness._operator.tables["last"].count_held().entries == 1


def test_a_timer_after_a_restore_sees_it_too() -> None:
    with remind() as harness:
        harness.push([row(1, 5, 100)])
        harness.commit()
        harness.push([row(2, 6, 10_000)])
        harness.snapshot_and_restore(base=True)
        assert [ast.literal_eval(out.seen) for out in harness.tick()] == [(130, 5)]


def test_when_the_input_ends_timers_see_what_lives_at_their_times() -> None:
    with remind() as harness:
        harness.push([row(1, 5, 100), row(1, 7, 120)])
        harness.commit()
        seen = [ast.literal_eval(out.seen) for out in harness.drain()]
        assert seen == [(130, 7), (150, 7)]


class Wake(KeyedProcess[Any]):
    """A timer by the clock writes state that expires by event time."""

    value = state.Value("long", ttl=BY_EVENT)
    items = state.List("long", ttl=BY_EVENT)
    entries = state.Map("string", "long", ttl=BY_EVENT)

    def _seen(self) -> Any:
        return (repr((self.value.get(), list(self.items), dict(self.entries))),)

    def process(self, row: Any, ctx: Any) -> Any:
        ctx.timers.processing(after="1 second")
        return self._seen()

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        self.value.set(1)
        self.items.append(2)
        self.entries["a"] = 3
        return self._seen()


def test_what_a_timer_by_the_clock_writes_before_a_watermark_is_seen_by_rows_of_now() -> None:
    harness = Harness(
        Wake(), "k long, v long, ts timestamp", "k", "seen string",
        event_time="ts", watermark="1 second",
    )  # fmt: skip
    with harness:

        def seen(emitted: Any) -> list[Any]:
            harness.commit()
            return [ast.literal_eval(out.seen) for out in emitted]

        now = harness.clock.now_ms / SECOND
        written = (1, [2], {"a": 3})
        assert seen(harness.push([row(1, 0, now)])) == [(None, [], {})]
        harness.clock.advance_ms(2 * SECOND)
        assert seen(harness.tick()) == [written]
        assert seen(harness.push([row(1, 0, now + 61)])) == [written]
        assert seen(harness.push([row(1, 0, now + 62)])) == [(None, [], {})]
