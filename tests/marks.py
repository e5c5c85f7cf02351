"""Which cases of a large table `make test` runs; `make soak` runs them all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def for_soak(*values: Any) -> Any:
    """Return a case that only `make soak` runs."""
    return pytest.param(*values, marks=pytest.mark.soak)


def one_in(count: int, cases: Sequence[Any], first: int = 0) -> list[Any]:
    """Return all cases: of `count` that would be tested one is, the rest is for `make soak`."""
    number = itertools.count()
    found = []
    for case in cases:
        made = case if hasattr(case, "marks") else pytest.param(case)
        is_tested = bool(made.marks) or next(number) % count == first
        found.append(made if is_tested else for_soak(*made.values))
    return found


def in_turn(each: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """Return every combination; of each first value one, with the other values in turn, is tested.

    The rest is for `make soak`.
    """
    cases = []
    for number, first in enumerate(each):
        for index, rest in enumerate(combinations := list(itertools.product(*others))):
            case = pytest.param if index == number % len(combinations) else for_soak
            cases.append(case(first, *rest))
    return cases
