"""A function reads its columns from a view only where it cannot tell a view from a row."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from cairn import KeyedProcess, state
from cairn.errors import FunctionError
from cairn.slot import records
from cairn.slot.row_loop import columns_read
from cairn.testing import Harness
from cairn.types import parse_schema

SCHEMA = parse_schema("k long, v double, `a b` string, count long, asdict long, __x long")


def logged(method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(self: Any, row: Any, ctx: Any) -> Any:
        return method(self, row, ctx)

    return wrapper


class Reads:
    """Methods that only read columns, named by those."""

    def v(self, row: Any, ctx: Any) -> Any:
        return (row.v + row.v, ctx.key)

    def k_v(self, line: Any, ctx: Any, more: int = 1) -> Any:
        for _ in range(more):
            if line.v > 1 and line.k:
                yield line.k
        yield line.v

    def count(self, row: Any, ctx: Any) -> Any:
        total = row.count
        return (total,)

    def none(self, row: Any, ctx: Any) -> Any:
        return None


class Keeps:
    """Methods that do more with a row."""

    def returned(self, row: Any, ctx: Any) -> Any:
        return row

    def passed_on(self, row: Any, ctx: Any) -> Any:
        ctx.output("side", row)

    def unpacked(self, row: Any, ctx: Any) -> Any:
        k, *_ = row
        return (k,)

    def by_index(self, row: Any, ctx: Any) -> Any:
        return (row[0],)

    def by_name(self, row: Any, ctx: Any) -> Any:
        return (row["a b"],)

    def kept(self, row: Any, ctx: Any) -> Any:
        self.last = row

    def in_generator(self, row: Any, ctx: Any) -> Any:
        return ((row.k + more,) for more in [1])

    def replaced(self, row: Any, ctx: Any) -> Any:
        row = (1,)
        return row

    def called(self, row: Any, ctx: Any) -> Any:
        return row.asdict()

    def not_a_column(self, row: Any, ctx: Any) -> Any:
        return row._fields

    def mangled(self, row: Any, ctx: Any) -> Any:
        return row.__x

    def matched(self, row: Any, ctx: Any) -> Any:
        match row:
            case (k, *_):
                return (k,)

    def by_locals(self, row: Any, ctx: Any) -> Any:
        return locals()["row"], row.k

    def any_arguments(self, *args: Any) -> Any:
        return args[0].k

    @logged
    def decorated(self, row: Any, ctx: Any) -> Any:
        return (row.k,)

    @staticmethod
    def static(row: Any, ctx: Any) -> Any:
        return (row.k,)


def methods_of(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("__")]


@pytest.mark.parametrize("name", methods_of(Reads))
def test_columns_that_a_function_reads_are_found(name: str) -> None:
    expected = tuple(name.split("_")) if name != "none" else ()
    assert columns_read(getattr(Reads(), name), SCHEMA) == expected


@pytest.mark.parametrize("name", methods_of(Keeps))
def test_a_function_that_does_more_with_a_row_gets_rows(name: str) -> None:
    assert columns_read(getattr(Keeps(), name), SCHEMA) is None


class Divide(KeyedProcess[Any]):
    seen = state.Value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.seen.set(self.seen.get() + 1)
        return row.k, 12 // row.n, self.seen.get()


class DivideRow(Divide):
    def process(self, row: Any, ctx: Any) -> Any:
        return super().process(row, ctx)


class DivideText(Divide):
    name = state.Value("string")

    def process(self, row: Any, ctx: Any) -> Any:
        self.name.set(row.text)
        return super().process(row, ctx)


FUNCTIONS = [Divide, DivideRow, DivideText]
ROWS = [(1, 2, "a"), (2, 3, "b"), (1, 4, "c"), (1, 6, "d"), (3, 1, "e")]


def harness(function: KeyedProcess[Any]) -> Harness:
    return Harness(function, "k long, n long, text string", "k", "k long, r long, seen long")


@pytest.mark.parametrize("frame_rows", [1, 2, 16 * 1024])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_views_and_rows_and_frames_of_any_size_give_the_same(
    function: type[KeyedProcess[Any]], frame_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "FRAME_ROWS", frame_rows)
    with harness(function()) as running:
        emitted = running.push(ROWS)
        assert emitted == [(1, 6, 1), (2, 4, 1), (1, 3, 2), (1, 2, 3), (3, 12, 1)]
        running.snapshot_and_restore()
        assert running.push((1, 1, "f")) == [(1, 12, 4)]
        assert running.state("seen", 2) == 1


@pytest.mark.parametrize("frame_rows", [2, 16 * 1024])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_error_names_the_whole_row_and_its_epoch_leaves_no_trace(
    function: type[KeyedProcess[Any]], frame_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "FRAME_ROWS", frame_rows)
    with harness(function()) as running:
        running.push(ROWS)
        running.commit()
        with pytest.raises(FunctionError, match="ZeroDivisionError") as caught:
            running.push([*ROWS[:3], (7, 0, "seven"), *ROWS])
        assert caught.value.facts["row"] == "Row(k=7, n=0, text='seven')"
        assert caught.value.facts["key"] == "7"
        assert running.state("seen", 1) == 3
        assert running.push((1, 12, "g")) == [(1, 1, 4)]
