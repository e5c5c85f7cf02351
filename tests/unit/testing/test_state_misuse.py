"""State that is assigned, or used as if it were its value, says which call was meant."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from cairn import BatchProcess, KeyedProcess, Process, state, windows
from cairn.errors import FunctionError, PlanError
from cairn.functions import Function
from cairn.plan.check import check_function
from cairn.testing import Harness
from tests.unit.operators.windowed import listed, row

SCHEMA, OUT = "k long, v long", "k long"


class Mean:
    def create(self) -> list[int]:
        return [0, 0]

    def add(self, acc: list[int], value: int) -> list[int]:
        return [acc[0] + value, acc[1] + 1]

    def merge(self, a: list[int], b: list[int]) -> list[int]:
        return [a[0] + b[0], a[1] + b[1]]

    def result(self, acc: list[int]) -> float:
        return acc[0] / acc[1]


class Keyed(KeyedProcess):
    """Does with its state what it is given to do."""

    value = state.Value("long")
    pickled = state.Value(object)
    expiring = state.Value("long", ttl="1 hour")
    reducing = state.Reducing("long", operator.add)
    expiring_sum = state.Reducing("long", operator.add, ttl="1 hour")
    aggregating = state.Aggregating("array<long>", Mean())
    items = state.List("long")
    expiring_items = state.List("long", ttl="1 hour")
    entries = state.Map("long", "long")
    expiring_entries = state.Map("long", "long", ttl="1 hour")

    def __init__(self, does: Callable[[Any], Any]) -> None:
        self.does = does
        self.rows = 0

    def process(self, row: Any, ctx: Any) -> Any:
        self.rows += 1
        self.does(self)


SINGLE = ["value", "pickled", "expiring", "reducing", "expiring_sum", "aggregating"]
CONTAINERS = ["items", "expiring_items", "entries", "expiring_entries"]
CALLS = {
    "value": "self.value.set(value)",
    "expiring": "self.expiring.set(value)",
    "reducing": "self.reducing.add(value)",
    "aggregating": "self.aggregating.add(value)",
    "items": "self.items.append(value), or self.items.set(values)",
    "entries": "self.entries[key] = value",
}


def cause_of(function: Function, key_by: str | None = "k", **options: Any) -> FunctionError:
    with (
        Harness(function, SCHEMA, key_by, OUT, **options) as harness,
        pytest.raises(FunctionError) as raised,
    ):
        harness.push((1, 2))
    return raised.value


def letter_of(does: Callable[[Any], Any]) -> str:
    with Harness(Keyed(does), SCHEMA, "k", OUT, on_error="dead-letter") as harness:
        harness.push((1, 2))
        (letter,) = harness.side("errors")
    return str(letter)


@pytest.mark.parametrize("name", CALLS)
def test_assigned_state_names_the_call_that_was_meant(name: str) -> None:
    error = cause_of(Keyed(lambda self: setattr(self, name, 5)))
    assert f"state {name!r} cannot be assigned" in error.message
    assert CALLS[name] in error.message
    assert isinstance(error.__cause__, AttributeError)


@pytest.mark.parametrize("name", [*SINGLE, *CONTAINERS])
def test_state_of_every_kind_refuses_assignment_and_deletion(name: str) -> None:
    for does in (lambda self: setattr(self, name, 5), lambda self: delattr(self, name)):
        assert f"state {name!r} cannot be" in cause_of(Keyed(does)).message
        assert "cannot be" in letter_of(does)


def test_deleted_state_is_told_to_clear() -> None:
    def does(self: Any) -> None:
        del self.value

    assert "use self.value.clear()" in cause_of(Keyed(does)).message


def test_state_assigned_to_other_state_is_refused() -> None:
    def does(self: Any) -> None:
        self.value = self.expiring

    assert "self.value.set(value)" in cause_of(Keyed(does)).message


def misused(name: str, misuse: Callable[[Any], Any]) -> str:
    return cause_of(Keyed(lambda self: misuse(getattr(self, name)))).message


MISUSES: list[Callable[[Any], Any]] = [
    bool,
    lambda state: state == 5,
    lambda state: state != 5,
    lambda state: state is not None and state > 5,
    lambda state: state + 1,
    lambda state: 1 + state,
    lambda state: -state,
    int,
    float,
    str,
    lambda state: f"{state}",
    len,
    list,
    lambda state: 5 in state,
    lambda state: state[0],
]


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_value_used_without_get_says_so(name: str) -> None:
    for misuse in MISUSES:
        assert f"use self.{name}.get()" in misused(name, misuse)
    assert f"self.{name}.get()" in letter_of(lambda self: bool(getattr(self, name)))


@pytest.mark.parametrize("name", CONTAINERS)
def test_lists_and_maps_are_containers_but_no_values(name: str) -> None:
    def reads(self: Any) -> None:
        held = getattr(self, name)
        assert not held and len(held) == 0 and list(held) == []

    with Harness(Keyed(reads), SCHEMA, "k", OUT) as harness:
        harness.push((1, 2))
    for misuse in (lambda s: s == [], lambda s: s + s, lambda s: s | {}, lambda s: f"{s}"):
        assert f"(self.{name})" in misused(name, misuse)


@pytest.mark.parametrize("name", ["value", "items"])
def test_added_in_place_state_names_the_call_that_writes(name: str) -> None:
    def does(self: Any) -> None:
        setattr(self, name, operator.iadd(getattr(self, name), [1]))

    assert CALLS[name] in cause_of(Keyed(does)).message


def test_emitted_state_is_named_in_the_misfit() -> None:
    class Emits(KeyedProcess):
        total = state.Value("long")

        def process(self, row: Any, ctx: Any) -> Any:
            yield {"k": self.total}

    message = cause_of(Emits()).message
    assert "use self.total.get()" in message


def test_other_attributes_are_assigned_and_deleted_freely() -> None:
    def does(self: Any) -> None:
        self.seen = self.rows
        del self.seen

    with Harness(Keyed(does), SCHEMA, "k", OUT) as harness:
        harness.push([(1, 2), (1, 3)])
        assert harness.function.rows == 2


def test_state_assigned_in_init_is_refused_where_the_function_is_made() -> None:
    class Early(KeyedProcess):
        total = state.Value("long")

        def __init__(self) -> None:
            self.total = 0

    with pytest.raises(AttributeError, match=r"use self\.total\.set\(value\)"):
        Early()


def test_state_declared_in_init_is_a_plan_error_as_before() -> None:
    class Late(KeyedProcess):
        def __init__(self) -> None:
            self.total = state.Value("long")

        def process(self, row: Any, ctx: Any) -> Any: ...

    with pytest.raises(PlanError, match="declare it as a class attribute"):
        check_function(Late(), "late")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_dataclass_has_state_and_cannot_assign_it(frozen: bool) -> None:
    @dataclasses.dataclass(frozen=frozen)
    class Limited(KeyedProcess):
        limit: int
        total: state.Value[int] = state.Value(int, default=0)  # noqa: RUF009

        def process(self, row: Any, ctx: Any) -> Any:
            self.total.set(self.total.get() + self.limit)
            if row.v:
                self.total = 1

    with Harness(Limited(3), SCHEMA, "k", OUT) as harness:
        harness.push((1, 0))
        assert harness.state("total", 1) == 3
        with pytest.raises(FunctionError, match="assign"):
            harness.push((1, 1))


def test_a_function_that_was_pickled_refuses_as_well() -> None:
    copied = cloudpickle.loads(cloudpickle.dumps(Keyed(lambda self: setattr(self, "value", 1))))
    with pytest.raises(AttributeError, match="value"):
        copied.value = 5
    assert "self.value.set(value)" in cause_of(copied).message


def test_subclasses_refuse_for_state_of_their_bases() -> None:
    class Sub(Keyed):
        more = state.Value("long")

    assert "cannot be assigned" in cause_of(Sub(lambda self: setattr(self, "value", 5))).message
    assert "cannot be assigned" in cause_of(Sub(lambda self: setattr(self, "more", 5))).message


def test_operator_lists_and_broadcast_state_refuse_assignment() -> None:
    class Own(Process):
        offsets = state.OperatorList("long")
        rules = state.Broadcast("string", "long")

        def __init__(self, does: Callable[[Any], Any]) -> None:
            self.does = does

        def process(self, row: Any, ctx: Any) -> Any:
            self.does(self)

        def process_broadcast(self, row: Any, ctx: Any) -> Any: ...

    def message(does: Callable[[Any], Any]) -> str:
        return cause_of(Own(does), None, broadcast="name string").message

    assert "self.offsets.append(value)" in message(lambda self: setattr(self, "offsets", []))
    assert "self.rules[key] = value" in message(lambda self: setattr(self, "rules", {}))
    assert "list(self.offsets)" in message(lambda self: self.offsets == [])
    assert "dict(self.rules)" in message(lambda self: self.rules == {})


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("name", ["total", "entries"])
def test_state_of_a_batch_function_names_the_calls_for_many_keys(backend: str, name: str) -> None:
    class Batch(BatchProcess):
        total = state.Value("long")
        entries = state.Map("long", "long")

        def __init__(self, does: Callable[[Any], Any]) -> None:
            self.does = does

        def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
            self.does(self)

    def message(does: Callable[[Any], Any]) -> str:
        return cause_of(Batch(does), backend=backend).message

    assert f"self.{name}.put_many(" in message(lambda self: setattr(self, name, 5))
    assert f"self.{name}.get_many(keys" in message(lambda self: getattr(self, name) == 5)
    assert "self.total.get_many(keys)" in message(lambda self: bool(self.total))


def test_state_that_windows_are_kept_in_refuses_assignment() -> None:
    with listed(windows.tumbling("10 seconds")) as harness:
        harness.push([row(1, 5)])
        for name in ("windows", "rows", "panes"):
            with pytest.raises(AttributeError, match="cannot be assigned"):
                setattr(harness.function, name, {})
