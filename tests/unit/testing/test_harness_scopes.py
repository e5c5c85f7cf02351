"""Functions with operator lists and with broadcast state, without Spark."""

from __future__ import annotations

from typing import Any

import pytest

from cairn import FunctionError, KeyedProcess, PlanError, Process, state
from cairn.testing import Harness

ROW = "k long, v long"
OUT = "v long, n long"


class Recent(Process[Any]):
    items = state.OperatorList("long")

    def process(self, row: Any, ctx: Any) -> Any:
        assert ctx.key is None
        self.items.append(row.v)
        if row.v < 0:
            raise ValueError("negative")
        return row.v, len(self.items)


class Levels(KeyedProcess[Any]):
    levels = state.Broadcast("string", "long")
    n = state.Value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.n.set(self.n.get() + 1)
        return row.v, self.levels.get("low", 0)

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        ctx.broadcast[row.name] = row.v
        if row.v < 0:
            raise ValueError("negative")


@pytest.mark.parametrize("base", [False, True], ids=["deltas", "a base"])
def test_a_list_lives_on_in_another_slot(base: bool) -> None:
    with Harness(Recent(), ROW, None, OUT) as harness:
        assert harness.push([(0, 7), (0, 8)]) == [(7, 1), (8, 2)]
        harness.rollback()
        assert harness.state("items") == []
        harness.push([(0, 1), (0, 2)])
        harness.snapshot_and_restore(base=base)
        assert harness.push((0, 3)) == [(3, 3)]
        assert harness.state("items") == [1, 2, 3]


@pytest.mark.parametrize("base", [False, True], ids=["deltas", "a base"])
def test_broadcast_state_lives_on_in_another_slot(base: bool) -> None:
    with Harness(Levels(), ROW, "k", OUT, broadcast="name string, v long") as harness:
        harness.push_broadcast(("low", 3))
        assert harness.push((1, 1)) == [(1, 3)]
        harness.snapshot_and_restore(base=base)
        harness.push_broadcast([("low", 4), ("high", 9)])
        harness.rollback()
        assert harness.push((1, 1)) == [(1, 3)]
        assert harness.state("levels") == {"low": 3}
        assert harness.state("n", 1) == 2


def test_a_row_put_aside_leaves_the_list_as_it_was() -> None:
    with Harness(Recent(), ROW, None, OUT, on_error="dead-letter") as harness:
        harness.push([(0, 1), (0, -1), (0, 2)])
        assert harness.state("items") == [1, 2]
        harness.snapshot_and_restore()
        harness.push((0, -1))
        assert harness.state("items") == [1, 2]
        assert len(harness.side("errors")) == 2


class Rewrites(Recent):
    def process(self, row: Any, ctx: Any) -> Any:
        self.items.set([*self.items, row.v][-2:])
        super().process(row, ctx)


def test_a_row_put_aside_takes_back_all_it_set() -> None:
    with Harness(Rewrites(), ROW, None, OUT, on_error="dead-letter") as harness:
        harness.push([(0, 1), (0, 2), (0, -5)])
        before = harness.state("items")
        assert before == [1, 2, 2]
        harness.commit()
        harness.push([(0, -5), (0, 3)])
        assert harness.state("items") == [2, 3, 3]


def test_a_broadcast_row_put_aside_changes_no_rule() -> None:
    with Harness(
        Levels(), ROW, "k", OUT, broadcast="name string, v long", on_error="dead-letter"
    ) as harness:
        harness.push_broadcast([("low", 3), ("low", -1), ("high", -2)])
        assert harness.state("levels") == {"low": 3}


def test_an_anonymous_declaration_is_given_beside_the_rows() -> None:
    class Plain(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> Any:
            return row.v, ctx.broadcast["low"]

        def process_broadcast(self, row: Any, ctx: Any) -> Any:
            ctx.broadcast[row.name] = row.v

    given = {"broadcast": "name string, v long", "broadcast_state": state.Broadcast("string", int)}
    with Harness(Plain(), ROW, "k", OUT, **given) as harness:
        harness.push_broadcast(("low", 3))
        assert harness.push((1, 1)) == [(1, 3)]
        assert harness.state("broadcast") == {"low": 3}


def test_without_a_broadcast_there_is_no_state_of_one() -> None:
    class Plain(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> Any:
            return row.v, ctx.broadcast["low"]

    match = r"no broadcast state(.|\n)*next: declare it"
    with Harness(Plain(), ROW, "k", OUT) as harness, pytest.raises(FunctionError, match=match):
        harness.push((1, 1))


def declaring(base: type[Any], declaration: state.Declaration) -> Any:
    names = {"x": declaration, "process": lambda self, row, ctx: None}
    return type("Fn", (base,), names)()


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (declaring(KeyedProcess, state.OperatorList("long")), "next: use state.List"),
        (declaring(Process, state.Value("long")), r"no key that state\.Value could belong to"),
        (declaring(Process, state.Broadcast("array<map<int,int>>", "long")), "cannot be a map key"),
    ],
    ids=["a list of a subtask by key", "a value without a key", "a map as a key"],
)
def test_state_of_another_scope_is_refused(function: Any, match: str) -> None:
    key_by = "k" if isinstance(function, KeyedProcess) else None
    with pytest.raises(PlanError, match=match):
        Harness(function, ROW, key_by, OUT)


@pytest.mark.parametrize(
    "kind", [state.OperatorList, lambda t, ttl: state.Broadcast(t, t, ttl=ttl)]
)
def test_state_without_keys_does_not_expire(kind: Any) -> None:
    with pytest.raises(PlanError, match="has no ttl: only state of keys expires"):
        kind("long", ttl="1 hour")


def test_lists_are_handed_out_in_one_of_two_ways() -> None:
    with pytest.raises(PlanError, match="expected: one of split, union"):
        state.OperatorList("long", redistribute="even")  # type: ignore[arg-type]


class Both(Process[Any]):
    """A list of its own and rules for all."""

    items = state.OperatorList("string")
    rules = state.Broadcast("string", object)

    def open(self, ctx: Any) -> None:
        self.opened_with = list(self.items)

    def process(self, row: Any, ctx: Any) -> Any:
        self.items.append(f"{row.v}:{self.rules['scale']['by'] * row.v}")
        return row.v, len(self.items)

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        self.rules[row.name] = {"by": row.v}
        self.items.append(row.name)


def test_a_function_without_keys_has_both_and_finds_its_list_in_open() -> None:
    with Harness(Both(), ROW, None, OUT, broadcast="name string, v long") as harness:
        harness.push_broadcast(("scale", 3))
        harness.push([(0, 1), (0, 2)])
        assert harness.function.opened_with == []
        harness.snapshot_and_restore()
        assert harness.function.opened_with == ["scale", "1:3", "2:6"]
        assert harness.push((0, 5)) == [(5, 4)]
        assert harness.state("rules") == {"scale": {"by": 3}}
