"""Types of the public API, as a type checker sees them: `make check` runs mypy over this file."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple, assert_type

from cairn import KeyedProcess, state
from cairn.testing import Harness


class Payment(NamedTuple):
    account: int
    amount: float


class Typed(KeyedProcess[Payment]):
    count = state.Value(int, default=0)
    last = state.Value(float)
    owner = state.Value("string")
    total = state.Reducing(float, operator.add)
    amounts: state.List[float] = state.List(float)

    def process(self, row: Payment, ctx: Any) -> Iterator[tuple[int, float]]:
        assert_type(self.count.get(), int)
        assert_type(self.count.get(5), int)
        assert_type(self.last.get(), float | None)
        assert_type(self.last.get(0.5), float)
        assert_type(self.owner.get(), Any)
        self.count.set(self.count.get() + 1)
        self.last.set(row.amount)
        self.amounts.append(row.amount)
        assert_type(self.amounts[-1], float)
        assert_type(self.amounts[1:], list[float])
        yield self.count.get(), self.last.get(0.0) + self.amounts[0]


def test_typed_state_needs_no_casts() -> None:
    with Harness(Typed(), Payment, "account", "n long, amount double") as harness:
        assert harness.push([(1, 2.0), (1, 3.0)]) == [(1, 4.0), (2, 5.0)]
