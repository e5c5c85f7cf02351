"""Rows that a function fails on: what a letter says, what is undone, and what still fails."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from cairn import BatchProcess, KeyedProcess, Process, WindowFunction, state
from cairn.backends.packing import Packing
from cairn.errors import CorruptFileError, FunctionError, PlanError
from cairn.operators.window_functions import WindowApply
from cairn.operators.window_process import WindowPlan
from cairn.plan.deploy import job_spec
from cairn.protocol.letters import SAMPLE_CHARS_MAX, SAMPLE_MAX
from cairn.slot import dead_letters
from cairn.testing import Harness
from cairn.types import parse_schema
from cairn.types.codec import codec
from cairn.windows import tumbling
from tests.backends import MORE_IN_SOAK
from tests.stored_harness import StoredHarness
from tests.unit.operators.aggregates.support import made as aggregate
from tests.unit.slot.one_level import Checkpoint, Count, run

ROW = "k string, at timestamp, v long"
AT = dt.datetime(2026, 1, 1, 12, 0, 0, 250_000, tzinfo=dt.UTC)
SECOND = dt.timedelta(seconds=1)


def parsed(text: str) -> int:
    return int(text)


class Doing(KeyedProcess[Any]):
    """Calls what it is given, then counts."""

    n = state.Value("long", default=0)
    fresh = state.Value("long", ttl=state.TTL("20 milliseconds", refresh="read-write"))

    def __init__(self, act: Any) -> None:
        self.act = act

    def process(self, row: Any, ctx: Any) -> Any:
        self.n.set(self.n.get() + 1)
        result = self.act(self, row, ctx)
        return (row.v,) if result is None else result


class Timed(Doing):
    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        self.n.set(-1)
        ctx.timers.event(time_ms + 1000)
        raise RuntimeError("no")


def letters(act: Any, function: Any = Doing, **more: Any) -> Harness:
    return StoredHarness(
        function(act), ROW, "k", "x long", sides={"odd": "y string"}, event_time="at",
        on_error="dead-letter", **more,
    )  # fmt: skip


def raise_on(value: int, error: Exception) -> Any:
    def act(self: Any, row: Any, ctx: Any) -> None:
        if row.v == value:
            raise error

    return act


def test_a_letter_says_operator_error_place_key_row_time_and_epoch() -> None:
    with letters(lambda self, row, ctx: (row.v == 2 and parsed("two")) or None) as harness:
        epoch = harness.epoch
        rows = [("a", AT - SECOND, 1), ("a", AT, 2), ("b", AT + SECOND, 3)]
        assert harness.push(rows) == [(1,), (3,)]
        (letter,) = harness.side("errors")
        assert letter.operator == "harness" and letter.key == "a" and letter.epoch == epoch
        assert letter.error == "ValueError: invalid literal for int() with base 10: 'two'"
        assert json.loads(letter.row) == {"k": "a", "at": "2026-01-01T12:00:00.250000Z", "v": 2}
        assert letter.event_time == AT
        assert harness.state("n", "a") == 1
        assert harness._operator.error_rows == 1


def test_the_traceback_begins_in_the_users_code() -> None:
    with letters(lambda self, row, ctx: parsed("two")) as harness:
        harness.push(("a", AT, 1))
        (letter,) = harness.side("errors")
        lines = letter.traceback.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert "test_dead_letters.py" in lines[1] and "in process" in lines[1]
        assert "in parsed" in letter.traceback and "cairn/slot/" not in letter.traceback
        assert lines[-1] == letter.error


def test_letters_of_two_attempts_are_equal_though_objects_have_moved() -> None:
    kept: list[Any] = []

    def act(self: Any, row: Any, ctx: Any) -> None:
        kept.append(object())
        raise LookupError(kept[-1])

    seen = []
    for _ in range(2):
        with letters(act) as harness:
            harness.push(("a", AT, 1))
            seen.append(harness.side("errors"))
    assert seen[0] == seen[1] and "object at 0x…" in seen[0][0].error


def deeper(number: int) -> int:
    return deeper(number + 1)


def test_an_endless_recursion_has_a_short_letter_that_does_not_tell_how_deep_it_went() -> None:
    with letters(lambda self, row, ctx: deeper(0)) as harness:
        harness.push(("a", AT, 1))
        (letter,) = harness.side("errors")
        assert letter.error.startswith("RecursionError")
        assert "[Previous line repeated many times]" in letter.traceback


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


def test_an_error_that_cannot_be_printed_and_one_with_half_characters_have_letters() -> None:
    def act(self: Any, row: Any, ctx: Any) -> None:
        raise UnprintableError if row.v == 1 else ValueError("\ud800")

    with letters(act) as harness:
        harness.push([("a", AT, 1), ("a", AT + SECOND, 2)])
        errors = [letter.error for letter in harness.side("errors")]
        assert errors == [
            "UnprintableError: (str() of it raised RuntimeError)",
            "ValueError: ?",
        ]


def test_what_a_row_emitted_before_it_failed_is_not_emitted_however_much() -> None:
    def act(self: Any, row: Any, ctx: Any) -> Iterator[Any]:
        for number in range(40_000 if row.v == 2 else 1500):
            ctx.output("odd", (str(row.v),))
            yield (row.v,)
            if number == 39_999:
                raise RuntimeError("late")

    with letters(act) as harness:
        emitted = harness.push([("a", AT + number * SECOND, number) for number in (1, 2, 3)])
        assert emitted == [(1,)] * 1500 + [(3,)] * 1500
        assert harness.side("odd") == [("1",)] * 1500 + [("3",)] * 1500
        assert len(harness.side("errors")) == 1


@dataclasses.dataclass
class Out:
    x: Any


@pytest.mark.parametrize(
    "bad",
    [
        ("text",), (1 << 63,), (1, 2), {"x": 1.5}, {"z": 1}, Out("no"), [(1,), (None, 1)],
        [(5,), ("text",)], "text", 7,
    ],
)  # fmt: skip
def test_a_row_that_emits_what_does_not_fit_is_put_aside_alone(bad: Any) -> None:
    with letters(lambda self, row, ctx: bad if row.v == 2 else None) as harness:
        rows = [("a", AT + number * SECOND, number) for number in (1, 2, 3)]
        assert harness.push(rows) == [(1,), (3,)]
        (letter,) = harness.side("errors")
        assert json.loads(letter.row)["v"] == 2
        assert harness.state("n", "a") == 2


class Mean:
    def create(self) -> Any:
        return (0, 0)

    def add(self, accumulator: Any, value: int) -> Any:
        return (accumulator[0] + 1, accumulator[1] + value)

    def merge(self, left: Any, right: Any) -> Any:
        return (left[0] + right[0], left[1] + right[1])

    def result(self, accumulator: Any) -> float:
        return float(accumulator[1] / accumulator[0])


BRIEF = state.TTL("1 hour")


class Keeping(Doing):
    """Has state of every kind, of types that have more values in Python than in a file."""

    text = state.Value("string")
    span = state.Value("interval day to second")
    row = state.Value("struct<names:array<string>,n:long>")
    total = state.Reducing("long", lambda a, b: a + b)
    mean = state.Aggregating("struct<n:bigint,s:bigint>", Mean())
    items = state.List("long")
    entries = state.Map("string", "long")
    numbers = state.Map("long", "string")
    brief = state.Value("long", ttl=BRIEF)
    brief_items = state.List("string", ttl=BRIEF)
    brief_entries = state.Map("long", "long", ttl=BRIEF)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        self.items.append(1)
        self.total.add(2**63)


HALF = "half \ud800"
WRITES: list[Any] = [
    lambda f: f.n.set(2**63),
    lambda f: f.n.set(-(2**63) - 1),
    lambda f: f.text.set(HALF),
    lambda f: f.span.set(dt.timedelta.max),
    lambda f: f.row.set((["fine", HALF], 1)),
    lambda f: f.row.set((["fine"], 2**63)),
    lambda f: [f.total.add(2**62), f.total.add(2**62)],
    lambda f: f.mean.add(2**63),
    lambda f: f.items.append(2**63),
    lambda f: f.items.extend([1, 2**63]),
    lambda f: f.items.set([2**63]),
    lambda f: f.entries.update({"fine": 2**63}),
    lambda f: f.entries.update({HALF: 1}),
    lambda f: f.numbers.update({2**63: "fine"}),
    lambda f: f.numbers.get(2**63),
    lambda f: f.brief.set(2**63),
    lambda f: f.brief_items.append(HALF),
    lambda f: f.brief_entries.update({1: 2**63}),
    lambda f: f.brief_entries.update({2**63: 1}),
]


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@pytest.mark.parametrize("write", WRITES)
def test_a_row_that_writes_what_cannot_be_stored_is_put_aside_alone(
    write: Any, backend: str
) -> None:
    def act(self: Any, row: Any, ctx: Any) -> None:
        if row.v == 2:
            self.items.append(2)
            write(self)

    with letters(act, Keeping, backend=backend) as harness:
        rows = [("a", AT + number * SECOND, number) for number in (1, 2, 3)]
        assert harness.push(rows) == [(1,), (3,)]
        (letter,) = harness.side("errors")
        assert json.loads(letter.row)["v"] == 2 and "TypeError: state '" in letter.error
        harness.commit()
        assert harness.state("n", "a") == 2
        assert not harness.state("items", "a")


def test_a_timer_that_writes_what_cannot_be_stored_is_put_aside() -> None:
    def act(self: Any, row: Any, ctx: Any) -> None:
        ctx.timers.processing(after=1)

    with letters(act, Keeping) as harness:
        harness.push(("a", AT, 1))
        harness.commit()
        harness.clock.advance_ms(10)
        harness.tick()
        (letter,) = harness.side("errors")
        assert json.loads(letter.row)["timer"] == "processing" and "out of range" in letter.error
        harness.commit()
        assert not harness.state("items", "a")


class Ruled(KeyedProcess[Any]):
    rules = state.Broadcast("string", "long")

    def process_broadcast(self, row: Any, ctx: Any) -> None:
        self.rules["fine"] = row.rule
        self.rules[HALF if row.rule == 1 else "rule"] = 2**63 - 2 + row.rule

    def process(self, row: Any, ctx: Any) -> Any:
        return (self.rules["rule"],)


def test_a_broadcast_row_that_writes_what_cannot_be_stored_is_put_aside() -> None:
    with Harness(
        Ruled(), "k string", "k", "x long", broadcast="rule long", on_error="dead-letter"
    ) as harness:
        harness.push_broadcast([(0,), (1,), (2,)])
        assert [json.loads(letter.row) for letter in harness.side("errors")] == [
            {"rule": 1}, {"rule": 2}
        ]  # fmt: skip
        harness.commit()
        assert harness.push(("a",)) == [(2**63 - 2,)]


class Listing(Process[Any]):
    seen = state.OperatorList("long")

    def process(self, row: Any, ctx: Any) -> Any:
        self.seen.append(row.v)
        self.seen.append(2**62 * row.v)


def test_a_row_that_lists_what_cannot_be_stored_is_put_aside() -> None:
    with Harness(Listing(), "v long", None, "x long", on_error="dead-letter") as harness:
        harness.push([(1,), (2,), (-2,)])
        (letter,) = harness.side("errors")
        assert letter.row == '{"v": 2}'
        harness.commit()
        assert list(harness.function.seen) == [1, 2**62, -2, -(2**63)]


@pytest.mark.parametrize("write", [write for write in WRITES if write is not WRITES[14]])
def test_what_cannot_be_stored_fails_the_epoch_with_operator_state_and_key(write: Any) -> None:
    def act(self: Any, row: Any, ctx: Any) -> None:
        if row.v == 2:
            write(self)

    with (
        Harness(Keeping(act), ROW, "k", "x long", event_time="at") as harness,
        pytest.raises(FunctionError) as raised,
    ):
        harness.push([("a", AT, 1), ("b", AT + SECOND, 2)])
        harness.commit()
    assert raised.value.operator == "harness" and raised.value.key == "'b'"
    assert raised.value.state in str(raised.value)


def test_an_error_with_half_a_character_can_be_sent_to_the_driver() -> None:
    act = raise_on(1, ValueError(HALF))
    with (
        Harness(Doing(act), ROW, "k", "x long", event_time="at") as harness,
        pytest.raises(FunctionError, match=r"ValueError: half \?") as raised,
    ):
        harness.push(("a", AT, 1))
    assert raised.value.message.encode()


def test_misfits_of_side_outputs_and_unknown_ones_count_as_failures() -> None:
    def act(self: Any, row: Any, ctx: Any) -> None:
        ctx.output("odd" if row.v == 1 else "unheard", (1,))

    with letters(act) as harness:
        assert harness.push([("a", AT, 1), ("a", AT + SECOND, 2)]) == []
        first, second = harness.side("errors")
        assert "side output 'odd' emitted a row that does not fit" in first.error
        assert "no side output 'unheard' is declared" in second.error
        assert harness.side("odd") == []


def test_reading_that_keeps_state_alive_is_undone_too() -> None:
    def act(self: Any, row: Any, ctx: Any) -> None:
        if row.v == 1:
            self.fresh.set(1)
        if row.v == 2:
            self.fresh.get()
            raise RuntimeError("after reading")

    with letters(act) as harness:
        for value in (1, 2):
            harness.push(("a", AT, value))
            harness.commit()
            harness.clock.advance_ms(15)
        harness.push(("a", AT, 3))
        assert harness.state("fresh", "a") is None


def test_a_timer_that_fails_is_gone_and_the_letter_has_it_in_place_of_a_row() -> None:
    def act(self: Any, row: Any, ctx: Any) -> None:
        ctx.timers.event(row.v)

    with letters(act, Timed) as harness:
        harness.push([("a", AT, 5000), ("b", AT, 6000)])
        harness.advance_watermark(5500)
        harness.tick()
        (letter,) = harness.side("errors")
        assert json.loads(letter.row) == {"timer": "event", "time_ms": 5000}
        assert (letter.key, letter.error) == ("a", "RuntimeError: no")
        assert letter.event_time == dt.datetime(1970, 1, 1, 0, 0, 5, tzinfo=dt.UTC)
        assert harness.timers("a")["event"] == [] and harness.timers("b")["event"] == [6000]
        assert harness.state("n", "a") == 1
        harness.snapshot_and_restore()
        harness.tick()
        assert len(harness.side("errors")) == 1


class Again(Timed):
    def on_timer_failed(self, time_ms: int, ctx: Any) -> None:
        if time_ms < 7000:
            ctx.timers.event(time_ms + 1000)
        else:
            raise ValueError("enough")


def test_on_timer_failed_may_set_another_timer_and_fails_the_epoch_if_it_raises() -> None:
    with letters(lambda self, row, ctx: ctx.timers.event(row.v), Again) as harness:
        harness.push(("a", AT, 5000))
        harness.advance_watermark(6500)
        harness.tick()
        times = [json.loads(letter.row)["time_ms"] for letter in harness.side("errors")]
        assert times == [5000, 6000] and harness.timers("a")["event"] == [7000]
        harness.advance_watermark(7500)
        with pytest.raises(FunctionError, match=r"on_timer_failed\(\) of operator.*enough"):
            harness.tick()


class Sum(WindowFunction):
    def process(self, key: Any, window: Any, rows: Any, ctx: Any) -> Any:
        return (sum(row.v for row in rows),)


def test_a_window_whose_function_fails_is_not_kept_for_ever() -> None:
    made = WindowApply(
        WindowPlan(tumbling("1 minute"), 0, None, None), parse_schema(ROW), ("k",), Sum(), "x long"
    )
    with Harness(
        made, ROW, "k", made.schema, event_time="at", watermark="0 seconds", on_error="dead-letter"
    ) as harness:
        minute = dt.timedelta(minutes=1)
        harness.push([("a", AT, None), ("a", AT, 1), ("b", AT, 2), ("a", AT + minute, 4)])
        harness.commit()
        harness.drain()
        assert [(row.k, row.x) for row in harness.outputs] == [("b", 2), ("a", 4)]
        (letter,) = harness.side("errors")
        assert letter.key == "a" and "TypeError" in letter.error
        tables = harness._operator.tables
        assert not any(len(rows) for table in tables.values() for rows in table.rows)


def test_what_is_no_fault_of_the_row_fails_the_epoch() -> None:
    for error in (CorruptFileError("a broken file"), MemoryError()):
        with letters(raise_on(2, error)) as harness:
            harness.push(("a", AT, 1))
            with pytest.raises(type(error)):
                harness.push(("a", AT, 2))
            assert harness.side("errors") == []


def test_an_error_out_of_the_database_fails_the_epoch() -> None:
    inner: dict[str, Any] = {"__name__": "cairn.backends.rocksdb.database"}
    exec("def get():\n    raise OSError('the disk is gone')", inner)
    with (
        letters(lambda self, row, ctx: inner["get"]()) as harness,
        pytest.raises(OSError, match="the disk is gone"),
    ):
        harness.push(("a", AT, 1))


def read_damaged(*_: Any) -> None:
    packing = Packing("value", codec(pa.string()), codec(pa.timestamp("us", "UTC")), None)
    packing.value_of(b"\xc1")


def test_a_row_of_the_database_that_cannot_be_decoded_fails_the_epoch() -> None:
    with (
        letters(read_damaged) as harness,
        pytest.raises(msgspec.DecodeError),
    ):
        harness.push(("a", AT, 1))
    assert harness.side("errors") == []


class Unopened(Doing):
    def open(self, ctx: Any) -> None:
        raise RuntimeError("no connection")


def test_open_still_fails_the_epoch() -> None:
    with pytest.raises(FunctionError, match=r"open\(\).*no connection"):
        letters(None, Unopened)


def test_a_sink_that_fails_is_no_fault_of_the_row() -> None:
    def refuse(batch: pa.RecordBatch) -> None:
        raise ValueError("the sink is full")

    with letters(lambda self, row, ctx: None) as harness:
        harness._operator.main.targets.append(refuse)
        with pytest.raises(ValueError, match="the sink is full"):
            harness.push([("a", AT, 1)])
        assert harness._operator.error_rows == 0


def test_letters_that_nobody_takes_are_counted_and_the_first_ones_logged(caplog: Any) -> None:
    with letters(raise_on(2, RuntimeError("no"))) as harness:
        for outlet in harness._operator.outlets:
            if outlet.tag == "errors":
                outlet.targets.clear()
        harness.push([("a", AT, 2)] * 20 + [("a", AT, 1)])
        logged = caplog.text
        assert {(r.operator, r.epoch) for r in caplog.records} == {("harness", harness.epoch)}
        assert logged.count("put a row aside") == dead_letters.LOGGED_PER_EPOCH_MAX
        assert 'row: {"k": "a", "at": "2026-01-01T12:00:00.250000Z", "v": 2}' in logged
        assert "RuntimeError: no" in logged and "no more of them are shown" in logged
        assert harness._operator.error_rows == 20
        harness.commit()
        harness.push(("a", AT, 1))
        assert harness._operator.error_rows == 0


def test_a_few_rows_put_aside_are_sampled_with_error_key_row_and_place_cut_short() -> None:
    with letters(raise_on(2, RuntimeError("no " * 1000))) as harness:
        harness.push([("a" * 1000, AT, 2)] * 20)
        kept = harness._operator.letters
        assert kept is not None and len(kept.sample) == SAMPLE_MAX < 20
        first = kept.sample[0]
        assert first.error.startswith("RuntimeError: no no") and first.error.endswith("…")
        assert first.row.startswith('{"k": "aaa') and str(first.key).startswith("aaa")
        texts = (first.error, first.row, str(first.key))
        assert {len(text) for text in texts} == {SAMPLE_CHARS_MAX}
        assert first.at is not None and "test_dead_letters.py:" in first.at
        harness.commit()
        harness.push(("a", AT, 1))
        assert kept.sample == [], "they are of the epoch"


def test_rolled_back_letters_are_gone_and_come_again() -> None:
    with letters(raise_on(2, RuntimeError("no"))) as harness:
        harness.push([("a", AT, 1), ("a", AT, 2)])
        harness.rollback()
        assert harness.side("errors") == []
        harness.push([("a", AT, 1), ("a", AT, 2)])
        assert len(harness.side("errors")) == 1 and harness.state("n", "a") == 1


class Connected(KeyedProcess[Any]):
    paid = state.Reducing("double", lambda a, b: a + b)

    def on_orders(self, row: Any, ctx: Any) -> Any:
        return row.id, self.paid.get(0.0)

    def on_payments(self, row: Any, ctx: Any) -> Any:
        self.paid.add(row.amount)
        if row.amount < 0:
            raise ValueError("negative")

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        yield (row.rule, 0.0)
        if row.rule < 0:
            raise ValueError("negative rule")


def test_handlers_of_connected_streams_and_broadcast_rows_are_forgiven() -> None:
    with Harness(
        Connected(), {"orders": "id long", "payments": "order long, amount double"},
        {"orders": "id", "payments": "order"}, "id long, paid double",
        broadcast="rule long", on_error="dead-letter",
    ) as harness:  # fmt: skip
        assert harness.push_broadcast([(1,), (-1,), (2,)]) == [(1, 0.0), (2, 0.0)]
        harness.push(payments=[(1, 2.0), (1, -1.0)])
        assert harness.push(orders=(1,)) == [(1, 2.0)]
        rule, payment = harness.side("errors")
        assert (json.loads(rule.row), rule.key) == ({"rule": -1}, None)
        assert (json.loads(payment.row), payment.key) == ({"order": 1, "amount": -1.0}, "1")
        assert (rule.input, payment.input) == ("broadcast", "payments")


class Reminded(KeyedProcess[Any]):
    def on_orders(self, row: Any, ctx: Any) -> Any:
        ctx.timers.processing(after=1)

    def on_payments(self, row: Any, ctx: Any) -> Any:
        raise ValueError("no payments")

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        raise ValueError("no timers")


def test_a_letter_names_the_connected_input_of_its_row_and_none_of_a_timer() -> None:
    with Harness(
        Reminded(), {"orders": "id long", "payments": "order long"},
        {"orders": "id", "payments": "order"}, "id long", on_error="dead-letter",
    ) as harness:  # fmt: skip
        harness.push(orders=(1,), payments=(1,))
        harness.commit()
        harness.clock.advance_ms(10)
        harness.tick()
        row, timer = harness.side("errors")
        assert (row.input, json.loads(row.row)) == ("payments", {"order": 1})
        assert (timer.input, json.loads(timer.row)["timer"]) == (None, "processing")


def test_of_a_broadcast_row_only_the_first_subtask_writes_a_letter() -> None:
    with Harness(
        Connected(), {"orders": "id long", "payments": "order long, amount double"},
        {"orders": "id", "payments": "order"}, "id long, paid double",
        broadcast="rule long", on_error="dead-letter",
    ) as harness:  # fmt: skip
        harness._begin()
        harness._operator.context.subtask = 1
        harness.push_broadcast((-1,))
        assert harness.side("errors") == [] and harness._operator.error_rows == 0


class Unkeyed(Process[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        return (10 // row.v,)


def test_functions_without_keys_put_rows_aside() -> None:
    with Harness(Unkeyed(), "v long", None, "x long", on_error="dead-letter") as harness:
        assert harness.push([(5,), (0,), (2,)]) == [(2,), (5,)]
        (letter,) = harness.side("errors")
        assert (letter.input, letter.key, letter.row) == (None, None, '{"v": 0}')


class Halving(BatchProcess):
    def open(self, ctx: Any) -> None:
        self.calls: list[int] = []

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        self.calls.append(batch.num_rows)
        if 13 in batch["v"].to_pylist():
            raise ValueError("unlucky")
        return batch.select(["v"]).rename_columns(["x"])

    def end_epoch(self, ctx: Any) -> None:
        if self.calls[0] == 1:
            raise RuntimeError("at the end")


def test_a_batch_is_tried_in_halves_until_a_row_fails_alone() -> None:
    with letters(None, lambda act: Halving()) as harness:
        rows = [("a", AT + number * SECOND, number) for number in range(64)]
        assert [x for (x,) in harness.push(rows)] == [n for n in range(64) if n != 13]
        (letter,) = harness.side("errors")
        assert (letter.key, json.loads(letter.row)["v"]) == ("a", 13)
        assert letter.input is None
        assert letter.event_time == AT + 13 * SECOND
        assert len(harness.function.calls) == 1 + 2 * 6
        harness.function.calls[0] = 1
        with pytest.raises(FunctionError, match=r"end_epoch\(\).*at the end"):
            harness.commit()


class Putting(BatchProcess):
    last = state.Value("long")
    names = state.Map("long", "string")

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        values = batch["v"].to_pylist()
        self.last.put_many(ctx.keys, [2**62 * v for v in values])
        self.names.put_many(ctx.keys, values, [HALF if v == 3 else "fine" for v in values])
        return pa.record_batch({"x": [2**61 * v for v in values]})


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
def test_rows_of_a_batch_that_write_or_emit_what_cannot_be_stored_are_put_aside_alone(
    backend: str,
) -> None:
    with letters(None, lambda act: Putting(), backend=backend) as harness:
        rows = [(k, AT, v) for k, v in [("a", 1), ("b", 2), ("c", -2), ("d", 3), ("e", 4)]]
        assert harness.push(rows) == [(2**61,), (-(2**62),)]
        assert sorted(letter.key for letter in harness.side("errors")) == ["b", "d", "e"]
        harness.commit()
        assert harness.state("last", "c") == -(2**63) and harness.state("last", "d") is None


def test_a_way_to_treat_errors_that_is_unknown_is_refused() -> None:
    with pytest.raises(PlanError, match="on_error must be 'fail' or 'dead-letter', found 'skip'"):
        Harness(Unkeyed(), "v long", None, "x long", on_error="skip")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="schema of dead letters"):
        Harness(
            Unkeyed(), "v long", None, "x long", sides={"errors": "x long"}, on_error="dead-letter"
        )


def test_aggregations_run_no_code_of_users_and_keep_no_journal() -> None:
    function, partials = aggregate(None)
    with Harness(
        function, partials.schema, "k", function.schema, on_error="dead-letter"
    ) as harness:
        row = {"k": 1, partials.layout.count: 1, partials.layout.parts[1]: 5}
        harness.push([row, row])
        harness.commit()
        assert harness.outputs == [(1, 2, 5)]
        assert harness._operator.journal is None and harness._operator.error_rows == 0


class Picky(Count):
    def process(self, row: Any, ctx: Any) -> Any:
        result = super().process(row, ctx)
        if row.v == 13:
            raise ValueError(object())
        return result


def test_attempts_in_two_slots_acknowledge_the_same(tmp_path: Path) -> None:
    made = Checkpoint(function=Picky())
    made.spec = job_spec(
        made.graph, job_id="j", checkpoint=made.store.url, backend="heap", on_error="dead-letter"
    )
    rows: list[tuple[int, int | None]] = [(1, 1), (1, 13), (2, 13), (1, None), (3, 5), (2, 2)]
    first = run(made.slot(tmp_path / "a"), made.begin(), rows)
    second = run(made.slot(tmp_path / "b"), made.begin(attempt=1), rows)
    assert first.operators == second.operators
    assert (first.operators[0].error_rows, first.operators[0].rows_out) == (2, 3)
