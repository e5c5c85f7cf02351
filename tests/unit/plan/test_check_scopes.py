"""State of subtasks and of broadcasts is checked before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from cairn import BatchProcess, KeyedProcess, PlanError, state
from cairn.plan.check import (
    check_broadcast,
    check_broadcast_state,
    check_function,
    check_same_broadcast,
)


class Alerts(KeyedProcess[Any]):
    rules = state.Broadcast("string", "long")

    def process(self, row: Any, ctx: Any) -> Any: ...

    def process_broadcast(self, row: Any, ctx: Any) -> Any: ...


def test_declared_broadcast_state_must_be_that_of_the_stream() -> None:
    check_broadcast_state(Alerts(), "alerts", Alerts.rules)
    for given in (None, state.Broadcast("string", "long")):
        with pytest.raises(PlanError, match=r"next: .*\.broadcast\(rows, Alerts\.rules\)"):
            check_broadcast_state(Alerts(), "alerts", given)


def test_a_stream_is_broadcast_to_broadcast_state_only() -> None:
    check_broadcast(None)
    with pytest.raises(PlanError, match=r"next: declare it, for example state\.Broadcast"):
        check_broadcast(state.Map("string", "long"))


def test_a_key_of_broadcast_state_can_be_looked_up() -> None:
    with pytest.raises(PlanError, match="map<int,int> cannot be a map key"):
        check_broadcast_state(Plain(), "x", state.Broadcast("map<int,int>", "long"))


class Plain(KeyedProcess[Any]):
    def process(self, row: Any, ctx: Any) -> Any: ...


class Batches(BatchProcess):
    rules = state.Broadcast("string", "long")

    def process(self, batch: Any, ctx: Any) -> Any: ...


def test_functions_by_the_batch_have_no_broadcast_state() -> None:
    with pytest.raises(PlanError, match="a BatchProcess has"):
        check_function(Batches(), "x")


class Renamed(Alerts):
    """Would need a broadcast that the stream does not have."""

    other = state.Broadcast("string", "long")


class Retyped(KeyedProcess[Any]):
    rules = state.Broadcast("string", "string")

    def process(self, row: Any, ctx: Any) -> Any: ...


def test_a_function_that_replaces_another_leaves_the_broadcast_as_it_is() -> None:
    check_same_broadcast(Alerts(), "alerts", Alerts.rules)
    check_same_broadcast(Plain(), "alerts", Alerts.rules)
    for function in (Renamed(), Retyped()):
        with pytest.raises(PlanError, match="stop the run and start the job"):
            check_same_broadcast(function, "alerts", Alerts.rules)
    with pytest.raises(PlanError, match="its broadcast state is None"):
        check_same_broadcast(Alerts(), "alerts", None)
