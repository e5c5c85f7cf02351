"""Functions of connected streams, without Spark."""

from __future__ import annotations

from typing import Any

import pytest

from cairn import KeyedProcess, state
from cairn.errors import FunctionError, PlanError
from cairn.testing import Harness

SCHEMAS = {"orders": "id int, at long, item string", "payments": "at long, order_id long"}
KEYS = {"orders": "id", "payments": "order_id"}


class Paid(KeyedProcess[Any]):
    """Tells which items were paid, and after a second which were not."""

    item = state.Value("string")

    def on_orders(self, row: Any, ctx: Any) -> None:
        self.item.set(row.item)
        ctx.timers.event(after="1 second")

    def on_payments(self, row: Any, ctx: Any) -> Any:
        if row.order_id is None:
            raise ValueError("a payment for nothing")
        item = self.item.get()
        self.item.clear()
        return (ctx.key, item, True)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        if self.item.get() is not None:
            return (ctx.key, self.item.get(), False)
        return None


def paid(**options: Any) -> Harness:
    given = {"event_time": "at", "watermark": "0 seconds"} | options
    return Harness(Paid(), SCHEMAS, KEYS, "id long, item string, paid boolean", **given)


def test_rows_of_several_inputs_share_state_and_timers() -> None:
    with paid() as harness:
        assert harness.push(orders=[(1, 0, "tea"), (2, 10, "jam")]) == []
        assert harness.push(payments=(20, 1)) == [(1, "tea", True)]
        assert harness.state("item", 2) == "jam"
        assert harness.timers(2) == {"event": [1010], "processing": []}
        harness.snapshot_and_restore(base=True)
        harness.push(orders={"id": 3, "at": 5000, "item": "egg"})
        harness.commit()
        assert harness.tick() == [(2, "jam", False)]


def test_rows_of_one_call_come_in_the_order_of_time_across_inputs() -> None:
    with paid() as harness:
        rows = harness.push(payments=[(5, 1), (15, 1)], orders=[(1, 10, "jam"), (1, 0, "tea")])
        assert rows == [(1, "tea", True), (1, "jam", True)]


def test_of_rows_of_one_time_the_first_input_comes_first() -> None:
    with paid() as harness:
        assert harness.push(payments=(7, 1), orders=(1, 7, "tea")) == [(1, "tea", True)]


def test_late_rows_go_to_the_side_of_their_input() -> None:
    with paid() as harness:
        harness.advance_watermark(100)
        harness.push(orders=[(1, 99, "late"), (1, 100, "tea")], payments=[(50, 1), (None, 2)])
        assert harness.side("late.orders") == [(1, 99, "late")]
        assert harness.side("late.payments") == [(None, 2), (50, 1)]


def test_without_event_time_rows_come_as_they_are_pushed() -> None:
    class Names(KeyedProcess[Any]):
        def on_orders(self, row: Any, ctx: Any) -> Any:
            return ("order", ctx.event_time_ms)

        def on_payments(self, row: Any, ctx: Any) -> Any:
            return ("payment", ctx.event_time_ms)

    with Harness(Names(), SCHEMAS, KEYS, "what string, at long") as harness:
        rows = harness.push(payments=[(9, 1), (8, 1)], orders=(1, 1, "tea"))
        assert rows == [("payment", None), ("payment", None), ("order", None)]


def test_an_error_names_the_handler_it_came_from() -> None:
    with paid() as harness, pytest.raises(FunctionError, match=r"on_payments\(\)"):
        harness.push(payments=(1, None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_by": {"orders": "item", "payments": "order_id"}}, "never meet"),
        ({"key_by": {"orders": "id", "refunds": "id"}}, "no input is called 'refunds'"),
        ({"event_time": {"orders": "at"}}, "all of them tell their time, or none"),
        ({"schema": SCHEMAS | {"refunds": "id long"}}, "key_by needs at least one column"),
        ({"schema": SCHEMAS | {"refunds": "id long"}, "key_by": KEYS | {"refunds": "id"}},
         r"Paid has no on_refunds\(row, ctx\)"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    setup = {"schema": SCHEMAS, "key_by": KEYS, "out": "id long"}
    with pytest.raises(PlanError, match=message):
        Harness(Paid(), **(setup | options))


def test_rows_must_say_which_input_they_are_of() -> None:
    with paid() as harness:
        with pytest.raises(PlanError, match="pushed by name"):
            harness.push((1, 0, "tea"))
        with pytest.raises(PlanError, match="found: refunds"):
            harness.push(refunds=(1,))
