"""Operator lists handed out again and again, at any parallelism, against a plain model."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cairn.backends.handles.operator_list import OperatorListHandle
from cairn.backends.heap.backend import HeapBackend
from cairn.backends.overlay import MapTable
from cairn.slot.redistribution import Item, share_of
from cairn.state import OperatorList
from cairn.types import parse_type

Lists = list[list[Item]]

parallelisms = st.lists(st.integers(1, 7), min_size=1, max_size=6)


def rescaled(lists: Lists, parallelism: int, how: str) -> Lists:
    return [share_of(lists, subtask, parallelism, how) for subtask in range(parallelism)]


@given(st.lists(st.lists(st.integers(), max_size=9), min_size=1, max_size=5), parallelisms)
def test_split_loses_no_item_and_doubles_none(values: list[list[int]], steps: list[int]) -> None:
    lists: Lists = [[(-1, value) for value in each] for each in values]
    for parallelism in steps:
        lists = rescaled(lists, parallelism, "split")
        assert [v for each in lists for _, v in each] == [v for each in values for v in each]
        sizes = [len(each) for each in lists]
        assert max(sizes) - min(sizes) <= 1


@given(parallelisms, st.data())
def test_union_gives_every_item_to_all_once(steps: list[int], data: st.DataObject) -> None:
    lists: Lists = [[]]
    expected: list[int] = []
    fresh = itertools.count()
    for parallelism in steps:
        for each in lists:
            added = [next(fresh) for _ in range(data.draw(st.integers(0, 3)))]
            each += [(-1, value) for value in added]
            expected += added
        lists = rescaled(lists, parallelism, "union")
        assert [[v for _, v in each] for each in lists] == [expected] * parallelism


def handle() -> tuple[OperatorListHandle, MapTable]:
    declaration: OperatorList[Any] = OperatorList("long")
    declaration.name = "items"
    table = MapTable(declaration, parse_type("int"), HeapBackend(), 4)
    table.assign(range(1, 3))
    made = OperatorListHandle(declaration, table)
    made.begin(3)
    made.is_writable = True
    return made, table


commands = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 5)),
    st.tuples(st.just("extend"), st.lists(st.integers(0, 5), max_size=3)),
    st.tuples(st.just("set"), st.lists(st.integers(0, 5), max_size=5)),
    st.tuples(st.just("clear")),
    st.tuples(st.just("commit")),
    st.tuples(st.just("rollback")),
)


@given(st.lists(commands, max_size=30))
def test_a_list_agrees_with_a_list(steps: list[tuple[Any, ...]]) -> None:
    items, table = handle()
    model: list[int] = []
    committed: list[int] = []
    for step in steps:
        name, *arguments = step
        if name == "commit":
            stored = table.delta()
            assert stored is None or stored.num_rows
            table.promote()
            committed = list(model)
        elif name == "rollback":
            table.rollback()
            model = list(committed)
        if name in ("commit", "rollback"):
            items.begin(3)
            items.is_writable = True
        else:
            getattr(items, name)(*arguments)
            if name == "set":
                model = list(*arguments)
            else:
                getattr(model, name)(*arguments)
        assert list(items) == model and len(items) == len(model)
        assert [items[at] for at in range(len(model))] == model
        assert items[-2:] == model[-2:]
