"""The harness behaves as production does, without Spark."""

from __future__ import annotations

import datetime as dt
import math
import operator
from typing import Any, NamedTuple

import pytest

from cairn import KeyedProcess, state
from cairn.errors import FunctionError, PlanError, StateNotFoundError
from cairn.testing import Harness

PAYMENT = "account long, amount double"


class Fraud(KeyedProcess[Any]):
    """Flags a large payment that follows a tiny one."""

    armed = state.Value("boolean", default=False)
    spent = state.Reducing("double", operator.add)
    recent = state.List("double")
    seen = state.Map("string", "long")

    def open(self, ctx: Any) -> None:
        self.rows = 0

    def process(self, row: Any, ctx: Any) -> Any:
        self.rows += 1
        if row.amount is None:
            raise ValueError("no amount")
        if row.amount < 0:
            ctx.output("odd", (row.account,))
        if self.armed.get() and row.amount > 500:
            yield {"account": row.account, "amount": row.amount}
        self.spent.add(row.amount)
        self.recent.append(row.amount)
        self.seen[f"{row.amount:.0f}"] = ctx.now_ms
        if row.amount < 1:
            self.armed.set(True)


@pytest.fixture
def harness() -> Any:
    with Harness(
        Fraud(), PAYMENT, "account", "account long, amount double", sides={"odd": "account long"}
    ) as harness:
        yield harness


class Payment(NamedTuple):
    amount: float
    account: int


def test_rows_of_any_form_go_in_and_rows_come_out(harness: Harness) -> None:
    assert harness.push({"account": 1, "amount": 0.5}) == []
    assert harness.push((1, 700.0)) == [(1, 700.0)]
    assert harness.push(Payment(account=1, amount=800.0)) == [(1, 800.0)]
    assert harness.push([(2, 0.5), {"account": 2, "amount": 900}])[0].amount == 900.0
    assert [row.account for row in harness.outputs] == [1, 1, 2]


def test_side_outputs_are_kept_apart(harness: Harness) -> None:
    harness.push((1, -5.0))
    assert harness.side("odd") == [(1,)]
    assert harness.outputs == []
    with pytest.raises(PlanError, match="no side output 'late'"):
        harness.side("late")


def test_state_of_a_key_is_read_as_the_function_sees_it(harness: Harness) -> None:
    harness.push([(1, 0.5), (1, 2.0)])
    assert harness.state("armed", 1) is True
    assert harness.state("spent", 1) == 2.5
    assert harness.state("recent", 1) == [0.5, 2.0]
    assert harness.state("seen", 1) == {"0": 0, "2": 0}
    assert harness.state("armed", 2) is False
    assert harness.state("spent", 2) is None
    assert (harness.state("recent", 2), harness.state("seen", 2)) == ([], {})
    with pytest.raises(StateNotFoundError, match="no state 'rows'"):
        harness.state("rows", 1)


def test_rollback_abandons_state_and_output_of_the_epoch(harness: Harness) -> None:
    harness.push((1, 0.5))
    harness.commit()
    assert harness.push((1, 700.0)) == [(1, 700.0)]
    harness.push((1, -1.0))
    harness.rollback()
    assert harness.outputs == [] and harness.side("odd") == []
    assert harness.state("recent", 1) == [0.5]
    assert harness.push((1, 600.0)) == [(1, 600.0)]


def test_attributes_that_are_no_state_survive_a_rollback_as_in_a_slot(harness: Harness) -> None:
    harness.push((1, 0.5))
    harness.rollback()
    assert harness.function.rows == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("base", [False, True])
def test_state_survives_storage_and_a_new_slot(harness: Harness, base: bool) -> None:
    harness.push([(1, 0.5), (2, 5.0)])
    harness.commit()
    harness.push((1, 2.0))
    before = harness.function
    harness.snapshot_and_restore(base=base)
    assert harness.function is not before
    assert harness.state("recent", 1) == [0.5, 2.0]
    assert harness.state("spent", 2) == 5.0
    assert harness.push((1, 700.0)) == [(1, 700.0)]
    harness.snapshot_and_restore(base=base)
    assert harness.state("recent", 1) == [0.5, 2.0, 700.0]
    assert harness.outputs == [(1, 700.0)]


@pytest.mark.parametrize("base", [False, True])
def test_nothing_is_stored_and_restored_when_nothing_was_pushed(
    harness: Harness, base: bool
) -> None:
    harness.snapshot_and_restore(base=base)
    assert harness.state("recent", 1) == []


def test_now_stands_still_inside_an_epoch_and_never_goes_back(harness: Harness) -> None:
    harness.clock.advance_ms(1000)
    assert harness.now_ms == 1000
    harness.push((1, 5.0))
    harness.clock.advance_ms(1000)
    harness.push((1, 6.0))
    assert harness.now_ms == 1000
    harness.commit()
    assert harness.now_ms == 2000
    harness.push((1, 7.0))
    assert harness.state("seen", 1) == {"5": 1000, "6": 1000, "7": 2000}


def test_the_epoch_number_grows_with_each_commit(harness: Harness) -> None:
    first = harness.epoch
    harness.push((1, 5.0))
    assert harness.epoch == first
    harness.commit()
    harness.commit()
    assert harness.epoch == first + 2


def test_what_the_function_raises_is_a_function_error_and_fails_the_epoch(
    harness: Harness,
) -> None:
    harness.push((1, 0.5))
    harness.commit()
    with pytest.raises(FunctionError, match="ValueError: no amount") as caught:
        harness.push([(1, 700.0), (3, None)])
    assert caught.value.key == "3"
    assert harness.outputs == []
    assert harness.state("recent", 1) == [0.5]
    assert harness.push((1, 700.0)) == [(1, 700.0)]


def test_rows_that_do_not_fit_are_refused_before_the_function_sees_them(
    harness: Harness,
) -> None:
    for row in ({"account": "1"}, (1,), {"account": 1, "sum": 2}, "x", 5):
        with pytest.raises(TypeError, match="does not fit the schema"):
            harness.push([(1, 1.0), row])
    assert harness.function.rows == 0  # type: ignore[attr-defined]


def test_output_that_does_not_fit_is_refused() -> None:
    class Wrong(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> Any:
            return (1.5,)

    harness = Harness(Wrong(), "k long", "k", "x long")
    with pytest.raises(FunctionError, match="field 'x': expected bigint, found float"):
        harness.push((1,))


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_state_that_cannot_be_stored_fails_the_epoch(backend: str) -> None:
    class Grows(KeyedProcess[Any]):
        n = state.Value("long", default=1)

        def process(self, row: Any, ctx: Any) -> Any:
            self.n.set(self.n.get() * 2**40)

    with Harness(Grows(), "k long", "k", "x long", backend=backend) as harness:
        harness.push((1,))
        harness.commit()
        with pytest.raises(FunctionError, match="state 'n' of key 1"):
            harness.push((1,))
            harness.commit()
        assert harness.state("n", 1) == 2**40


def test_keys_of_several_columns_and_odd_values() -> None:
    class Count(KeyedProcess[Any]):
        n = state.Value("long", default=0)

        def process(self, row: Any, ctx: Any) -> Any:
            self.n.set(self.n.get() + 1)
            return ctx.key.a, ctx.key.b, self.n.get()

    with Harness(Count(), "a string, b double", ("a", "b"), "a string, b double, n long") as h:
        h.push([("x", -0.0), ("x", 0.0), ("x", math.nan), ("x", -math.nan), (None, None)])
        assert [row.n for row in h.outputs] == [1, 2, 1, 2, 1]
        h.snapshot_and_restore()
        assert h.state("n", ("x", 0.0)) == h.state("n", ("x", math.nan)) == 2
        assert h.state("n", (None, None)) == 1
        with pytest.raises(TypeError, match="the key has 2 columns"):
            h.state("n", ("x",))


def test_rows_of_a_push_are_processed_by_event_time() -> None:
    class Times(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> Any:
            return row.n, ctx.event_time_ms

    def at(second: int) -> dt.datetime:
        return dt.datetime(1970, 1, 1, second=second, tzinfo=dt.UTC)

    schema = "k long, t timestamp, n long"
    with Harness(Times(), schema, "k", "n long, t long", event_time="t") as harness:
        rows = [(1, at(3), 0), (1, at(1), 1), (1, None, 2), (1, at(2), 3)]
        assert harness.push(rows) == [(1, 1000), (3, 2000), (0, 3000)]
        ties = [(1, at(5), n) for n in range(6)]
        assert harness.push(ties) == harness.push(ties[::-1]), "ties depend on the order given"


def test_the_function_given_is_copied_as_it_is_for_a_slot() -> None:
    given = Fraud()
    with Harness(given, PAYMENT, "account", PAYMENT) as harness:
        harness.push((1, 1.0))
        assert harness.function is not given
    assert not hasattr(given, "rows")


def test_leaving_the_block_closes_the_function() -> None:
    class Closes(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> Any: ...

        def close(self) -> None:
            self.closed = True

    with Harness(Closes(), "k long", "k", "x long") as harness:
        function = harness.function
    assert function.closed  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"function": Fraud}, "give an object"),
        ({"key_by": "nobody"}, "no column 'nobody'"),
        ({"key_by": ()}, "at least one column"),
        ({"event_time": "amount"}, "expected: a timestamp"),
        ({"out": "account"}, "is not a type"),
    ],
)
def test_a_wrong_setup_is_refused_as_a_wrong_job_is(change: dict[str, Any], message: str) -> None:
    setup = {"function": Fraud(), "schema": PAYMENT, "key_by": "account", "out": PAYMENT}
    with pytest.raises(PlanError, match=message):
        Harness(**{**setup, **change})
