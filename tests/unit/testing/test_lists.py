"""List state is indexed as a Python list is, whatever holds it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cairn import KeyedProcess, state
from cairn.testing import Harness
from tests.backends import MORE_IN_SOAK
from tests.stored_harness import StoredHarness

INDEXES = [0, 1, 5, 6, 7, -1, -7, -8, 100]
SLICES = [slice(None), slice(2), slice(-2, None), slice(1, 5, 2), slice(None, None, -1), slice(9)]


class Lists(KeyedProcess[Any]):
    """Does with its lists what it is given to do."""

    plain = state.List("long")
    expiring = state.List("long", ttl="1 hour")
    pickled = state.List(object)

    def process(self, row: Any, ctx: Any) -> None:
        items: state.List[Any] = getattr(self, row.name)
        items.append(row.v)
        if row.v % 3 == 0:
            expected = list(items)
            for index in INDEXES:
                assert found(items, index) == found(expected, index), index
            for part in SLICES:
                assert items[part] == expected[part], part


def found(items: Any, index: int) -> Any:
    try:
        return items[index]
    except IndexError:
        return IndexError


@pytest.fixture(params=MORE_IN_SOAK)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    made = StoredHarness(
        Lists(), "k long, name string, v long", "k", "k long", backend=request.param
    )
    with made as harness:
        yield harness


@pytest.mark.parametrize("name", ["plain", "expiring", "pickled"])
def test_a_list_is_indexed_like_a_python_list(harness: Harness, name: str) -> None:
    for v in range(4):
        harness.push((1, name, v))
    harness.snapshot_and_restore()
    for v in range(4, 7):
        harness.push((1, name, v))
    harness.commit()
    harness.push((1, name, 7))
    assert harness.state(name, 1) == list(range(8))


def test_an_index_beyond_the_list_names_the_state(harness: Harness) -> None:
    harness.push((1, "plain", 1))
    with pytest.raises(IndexError, match="state 'plain' has 1 items: no index -2"):
        harness.function.plain[-2]


def test_an_index_is_any_whole_number_and_nothing_else(harness: Harness) -> None:
    harness.push([(1, "plain", 1), (1, "plain", 2)])
    harness.commit()
    items: Any = harness.function.plain
    assert (items[np.int64(-1)], items[True]) == (2, 2)
    for index in (1.0, "1", None):
        with pytest.raises(TypeError):
            items[index]
