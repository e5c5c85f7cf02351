"""Queries while functions are replaced: answers are those of the function that was committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn import KeyedProcess, state
from cairn.errors import QueryError
from tests.unit.query.queried import BACKENDS, KEYS, Mean, Queried, during

# Other functions


class Last(KeyedProcess[Any]):
    n: state.Value[Any]

    def process(self, row: Any, ctx: Any) -> Any:
        self.n.set(row.v)
        for ask in during:
            ask()


class Narrow(Last):
    n = state.Value("int")


class Same(Narrow):
    """Another function with the same state."""


class Wide(Last):
    n = state.Value("long")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_upgrade_changes_no_answer_before_it_is_committed(backend: str, tmp_path: Path) -> None:
    led = Queried(Narrow(), tmp_path, backend=backend)
    led.run(rows=[(k, k) for k in KEYS])
    number, expected = led.epochs[-1].number, {k: k for k in KEYS}
    sources: list[str] = []

    def ask() -> None:
        answers = led.live.query_many("op", "n", KEYS)
        assert (answers.values, answers.epoch) == (expected, number)
        sources.append(answers.source)

    during.append(ask)
    for function, rewrite, while_it_runs in ((Same(), (), "slot"), (Wide(), ("op",), "checkpoint")):
        led.upgrade("op", function, rewrite)
        ask()
        sources.clear()
        led.run(rows=[(0, number)])
        assert set(sources) == {while_it_runs}
        number, expected = led.epochs[-1].number, expected | {0: number}
        ask()
        assert sources[-1] == "slot"


# Aggregates


class Doubled:
    def create(self) -> Any:
        return 0.0

    def add(self, held: Any, value: float) -> Any:
        return held + value

    def merge(self, one: Any, other: Any) -> Any:
        return one + other

    def result(self, held: Any) -> float:
        return float(held * 2)


class ByMean(KeyedProcess[Any]):
    a = state.Aggregating("struct<n:long,s:double>", Mean())
    b = state.Value("double")

    def process(self, row: Any, ctx: Any) -> Any:
        self.a.add(float(row.v))
        self.b.set(float(row.v))


class ByDoubled(KeyedProcess[Any]):
    a = state.Aggregating("double", Doubled(), migrate=lambda held: held[1])
    b = state.Aggregating("double", Doubled())

    def process(self, row: Any, ctx: Any) -> Any:
        self.a.add(float(row.v))
        self.b.add(float(row.v))


def test_an_upgrade_changes_no_aggregate_before_it_is_committed(tmp_path: Path) -> None:
    led = Queried(ByMean(), tmp_path)
    led.run(rows=[(1, 10), (1, 30)])
    led.upgrade("op", ByDoubled(), ("op",))
    for led.slots.are_silent in (False, True):
        assert led.live.query("op", "a", 1).value == 20.0
        assert led.live.query("op", "b", 1).value == 30.0
    led.run(rows=[(1, 5)])
    assert led.live.query("op", "a", 1).value == 90.0
    assert led.live.query("op", "b", 1).value == 70.0


def test_a_start_with_another_aggregate_makes_up_no_answer(tmp_path: Path) -> None:
    led = Queried(ByMean(), tmp_path)
    led.run(rows=[(1, 10), (1, 30)])
    led.coordinator.committed_by = None  # As after a restart: who made the epoch is not known.
    assert led.live.query("op", "a", 1).value == 20.0
    led.upgrade("op", ByDoubled(), ("op",))
    led.live._lookups.clear()
    with pytest.raises(QueryError, match="made by another version"):
        led.live.query("op", "a", 1)
    assert led.live.query("op", "b", 1).value == 30.0


class Ratio(Mean):
    def result(self, held: Any) -> float:
        return float(held[1] / (held[0] - 1))


class Failing(KeyedProcess[Any]):
    a = state.Aggregating("struct<n:long,s:double>", Ratio())

    def process(self, row: Any, ctx: Any) -> Any:
        self.a.add(float(row.v))


def test_a_result_that_raises_says_whose_it_is(tmp_path: Path) -> None:
    led = Queried(Failing(), tmp_path)
    led.run(rows=[(7, 10)])
    with pytest.raises(QueryError, match=r"'op'.*'a'.*key 7 failed: ZeroDivisionError"):
        led.live.query("op", "a", 7)
