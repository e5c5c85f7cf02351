"""`on_epoch_end`: which keys it is called for, when, and what it may do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import KeyedProcess, PlanError, state
from cairn.errors import FunctionError
from cairn.slot.records import RecordRunner
from cairn.testing import Harness
from tests.backends import MORE_IN_SOAK
from tests.stored_harness import StoredHarness

SCHEMA = "k string, v long"


class Totals(KeyedProcess[Any]):
    """One result per key and epoch."""

    total = state.Value("long", default=0)
    epochs = state.Value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        if row.v is None:
            raise ValueError("no value")
        if row.v < 0:
            return "not a row"
        self.total.set(self.total.get() + row.v)
        return None

    def on_epoch_end(self, ctx: Any) -> Any:
        self.epochs.set(self.epochs.get() + 1)
        if self.total.get() == 1300:
            raise ValueError("too many")
        return (ctx.key, self.total.get())


def harness_of(function: Any = None, **options: Any) -> Harness:
    return StoredHarness(function or Totals(), SCHEMA, "k", SCHEMA, **options)


ROWS = st.tuples(st.none() | st.sampled_from(["a", "b", "é"]), st.integers(0, 3))


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@given(
    st.lists(st.tuples(st.lists(st.lists(ROWS, max_size=5), max_size=3), st.booleans()), max_size=4)
)
def test_a_key_is_emitted_once_in_an_epoch_that_has_rows_of_it(
    backend: str, epochs: list[tuple[list[list[Any]], bool]]
) -> None:
    totals: dict[Any, int] = {}
    with harness_of(backend=backend) as harness:
        for pushes, fails in epochs:
            if fails:
                for rows in pushes:
                    harness.push(rows)
                harness.rollback()
            touched: dict[Any, None] = {}
            before = len(harness.outputs)
            for rows in pushes:
                assert harness.push(rows) == []
                for key, value in rows:
                    totals[key] = totals.get(key, 0) + value
                    touched[key] = None
            harness.snapshot_and_restore()
            assert harness.outputs[before:] == [(key, totals[key]) for key in touched]


def test_rows_that_were_put_aside_touch_no_key() -> None:
    with harness_of(on_error="dead-letter") as harness:
        harness.push([("a", None), ("b", -1), ("c", 1), ("c", None), ("d", None), ("d", 2)])
        harness.commit()
        assert harness.outputs == [("c", 1), ("d", 2)]
        assert harness.state("epochs", "a") == 0
        harness.push(("c", 1299))
        harness.commit()
        assert harness.outputs == [("c", 1), ("d", 2)]
        assert harness.state("epochs", "c") == 1, "undone with the call that failed"
        letter = harness.side("errors")[-1]
        assert (letter.key, letter.row) == ("c", '{"call":"on_epoch_end"}')
        assert letter.error == "ValueError: too many"


def test_an_error_names_the_method_and_the_key() -> None:
    with harness_of() as harness:
        harness.push(("a", 1300))
        with pytest.raises(
            FunctionError, match=r"on_epoch_end\(\) of operator 'harness'"
        ) as raised:
            harness.commit()
        assert raised.value.facts["key"] == "'a'"
        assert "row" not in raised.value.facts
        assert harness.state("total", "a") == 0


class Reminded(Totals):
    def on_epoch_end(self, ctx: Any) -> Any:
        ctx.timers.processing(ctx.now_ms)
        ctx.timers.processing(ctx.now_ms + 10)
        yield ctx.key, -1

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return ctx.key, time_ms


def test_timers_that_it_sets_are_called_when_they_are_due() -> None:
    with harness_of(Reminded(), now_ms=5) as harness:
        harness.push([("a", 1), ("b", 1)])
        harness.commit()
        assert harness.outputs == [("a", -1), ("b", -1), ("a", 5), ("b", 5)]
        harness.clock.advance_ms(10)
        assert harness.tick() == [("a", 15), ("b", 15)], "a timer alone touches no key"


class Joined(KeyedProcess[Any]):
    seen = state.Value("long", default=0)

    def on_left(self, row: Any, ctx: Any) -> Any:
        self.seen.set(self.seen.get() + 1)

    def on_right(self, row: Any, ctx: Any) -> Any:
        self.seen.set(self.seen.get() + 10)

    def on_epoch_end(self, ctx: Any) -> Any:
        return ctx.key, self.seen.get()


def test_rows_of_all_connected_streams_count() -> None:
    schemas = {"left": SCHEMA, "right": SCHEMA}
    with Harness(Joined(), schemas, {"left": "k", "right": "k"}, SCHEMA) as harness:
        harness.push(left=[("a", 1), ("a", 1)], right=[("b", 1), ("a", 1)])
        harness.commit()
        assert sorted(harness.outputs) == [("a", 12), ("b", 10)]


def test_a_function_without_it_is_called_directly() -> None:
    class Plain(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> Any:
            return row

    with harness_of(Plain()) as harness:
        runner = harness._operator.runner
        assert isinstance(runner, RecordRunner)
        assert runner._process_row == harness.function.process


def test_its_arguments_are_checked_when_the_job_is_made() -> None:
    class Wrong(Totals):
        def on_epoch_end(self) -> Any:  # type: ignore[override]
            return None

    with pytest.raises(PlanError, match=r"Wrong\.on_epoch_end"):
        harness_of(Wrong())
