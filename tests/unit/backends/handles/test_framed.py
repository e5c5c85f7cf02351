"""State in arrays, read and written by frames: the same as one key after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cairn import state
from cairn.backends import HeapBackend, make_backend
from cairn.backends.columnar.table import ColumnTable
from cairn.backends.handles import make_handle
from cairn.backends.handles.framed import Frame, make_row_table
from cairn.errors import FunctionError
from cairn.slot.context import NoKey
from cairn.types.codec import codec
from tests.restored import held_contents

GROUP_COUNT = 2
KEYS = st.sampled_from([0, 1, 2, 3, None])
COMMANDS = st.sampled_from(["get", "set", "set", "clear", "set None"])
ROWS = st.lists(st.tuples(KEYS, st.lists(COMMANDS, max_size=3)), max_size=12)
EPOCHS = st.lists(ROWS, min_size=1, max_size=3)


class Mean:
    def create(self) -> Any:
        return (0, 0.0)

    def add(self, held: Any, value: float) -> Any:
        return (held[0] + 1, held[1] + value)

    def merge(self, left: Any, right: Any) -> Any:
        return (left[0] + right[0], left[1] + right[1])

    def result(self, held: Any) -> float:
        return float(held[1] / held[0])


def group_of(key: int | None) -> int:
    return 0 if key is None else key % GROUP_COUNT


class Slot:
    """A value of each key, with a handle over it."""

    def __init__(self, declaration: Any = None) -> None:
        if declaration is None:
            declaration = state.Value("long", default=-1)
        declaration.name = "s"
        self.table = make_row_table(declaration, pa.int64(), HeapBackend(), GROUP_COUNT)
        self.table.assign(range(GROUP_COUNT))
        self.scope: Any = SimpleNamespace(group=0, key=None, at=0)
        self.handle: Any = make_handle(self.table, self.scope)
        self.frame = Frame()
        self.frame.add(self.handle)

    def run(self, rows: list[Any], numbers: list[int], *, framed: bool = True) -> list[Any]:
        """Do what rows say, as one frame or one by one; give what they have read."""
        keys = [key for key, _ in rows]
        groups = [group_of(key) for key in keys]
        places = [0] * len(rows)
        if framed:
            places = self.frame.open(codec(pa.int64()).encode(keys), np.array(groups))
        seen = []
        for number, at, group, (key, commands) in zip(numbers, places, groups, rows, strict=True):
            self.scope.at, self.scope.group, self.scope.key = at, group, key
            for command in commands:
                if command == "get":
                    seen.append((self.handle.get(), self.handle.get(-2)))
                elif command == "clear":
                    self.handle.clear()
                else:
                    self.handle.set(number if command == "set" else None)
        if framed:
            self.frame.close()
        return seen


def expected(held: dict[Any, int], rows: list[Any], numbers: list[int]) -> list[Any]:
    """The same on a dict, which it changes."""
    seen = []
    for number, (key, commands) in zip(numbers, rows, strict=True):
        for command in commands:
            if command == "get":
                value = held.get(key)
                seen.append((-1 if value is None else value, -2 if value is None else value))
            elif command == "set":
                held[key] = number
            else:
                held.pop(key, None)
    return seen


SET_AND_CLEARED = [(0, ["set", "clear"]), (2, ["set"]), (0, ["set"])]
CLEARED_AND_SET = [(0, ["clear"]), (2, ["set"]), (0, ["set"])]


@example([SET_AND_CLEARED], [[3], [1]])
@example([CLEARED_AND_SET], [[3], [1]])
@given(EPOCHS, st.lists(st.lists(st.integers(1, 5), min_size=1), min_size=2, max_size=2))
def test_frames_agree_with_a_dict_and_their_borders_leave_no_trace(
    epochs: list[list[Any]], cuts: list[list[int]]
) -> None:
    held: dict[Any, int] = {}
    slots = [Slot() for _ in cuts] + [Slot()]
    number = 0
    for rows in epochs:
        numbers = list(range(number, number + len(rows)))
        number += len(rows)
        wanted = expected(held, rows, numbers)
        deltas = []
        for at, slot in enumerate(slots):
            seen, start, turn = [], 0, 0
            while start < len(rows):
                framed = at < len(cuts)
                size = cuts[at][turn % len(cuts[at])] if framed else 1
                span = slice(start, start + size)
                seen += slot.run(rows[span], numbers[span], framed=framed)
                start, turn = start + size, turn + 1
            assert seen == wanted
            deltas.append(slot.table.delta())
            slot.table.promote()
            assert held_contents(slot.table) == held
        assert deltas[0] == deltas[1], "in the same order too"
        assert deltas[0] == deltas[2]


STRUCT = "struct<n: bigint, s: struct<x: double, d: date>>"
PARTS = st.none() | st.tuples(st.floats(allow_nan=False) | st.none(), st.dates() | st.none())
STRUCTS = st.none() | st.tuples(st.integers(-5, 5) | st.none(), PARTS)


@given(st.lists(st.lists(st.tuples(KEYS, STRUCTS), max_size=6), min_size=1, max_size=4))
def test_structs_are_read_as_they_were_set_before_and_after_a_restore(
    frames: list[list[Any]],
) -> None:
    slot, held = Slot(state.Value(STRUCT)), {}
    for rows in frames:
        keys = [key for key, _ in rows]
        groups = np.array([group_of(key) for key in keys], np.int64)
        places = slot.frame.open(codec(pa.int64()).encode(keys), groups)
        for slot.scope.at, (key, value) in zip(places, rows, strict=True):
            assert slot.handle.get() == held.pop(key, None)
            slot.handle.set(value)
            if value is not None:
                held[key] = value
        slot.frame.close()
    delta = slot.table.delta()
    slot.table.promote()
    assert held_contents(slot.table) == held
    restored = Slot(state.Value(STRUCT)).table
    if delta is not None:
        restored.apply(delta)
    assert held_contents(restored) == held


BOTH = st.tuples(KEYS, st.lists(st.tuples(st.sampled_from("ab"), COMMANDS), max_size=4))


@given(st.lists(st.lists(BOTH, max_size=8), min_size=1, max_size=5))
def test_two_states_of_a_frame_agree_with_dicts_whichever_rows_write_them(
    frames: list[list[Any]],
) -> None:
    slots = {name: Slot() for name in "ab"}
    scope, frame = slots["a"].scope, Frame()
    handles: dict[str, Any] = {}
    for name, slot in slots.items():
        handles[name] = make_handle(slot.table, scope)
        frame.add(handles[name])
    held: dict[str, dict[Any, int]] = {"a": {}, "b": {}}
    for number, rows in enumerate(frames):
        keys = codec(pa.int64()).encode([key for key, _ in rows])
        groups = [group_of(key) for key, _ in rows]
        places = frame.open(keys, np.array(groups, np.int64))
        for scope.at, (key, commands) in zip(places, rows, strict=True):
            for name, command in commands:
                if command == "get":
                    assert handles[name].get(-2) == held[name].get(key, -2)
                elif command == "set":
                    handles[name].set(number)
                    held[name][key] = number
                else:
                    handles[name].clear()
                    held[name].pop(key, None)
        frame.close()
    for name, slot in slots.items():
        slot.table.promote()
        assert held_contents(slot.table) == held[name]


def test_a_frame_that_is_dropped_has_written_nothing() -> None:
    slot = Slot()
    slot.run([(1, ["set"])], [7])
    places = slot.frame.open(pa.array([1]), np.array([1]))
    slot.scope.at = places[0]
    slot.handle.set(8)
    slot.frame.drop()
    slot.scope.group = slot.scope.key = 1
    assert slot.handle.get() == 7


def test_a_function_that_never_reads_a_state_does_not_read_its_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slot = Slot()
    monkeypatch.setattr(ColumnTable, "read", None)
    slot.run([(1, ["set"]), (2, ["set"])], [7, 8])
    monkeypatch.undo()
    slot.table.promote()
    assert held_contents(slot.table) == {1: 7, 2: 8}


def test_reducing_and_aggregating_state_goes_by_frames_too() -> None:
    slot = Slot(state.Reducing("long", lambda held, more: held + more))
    places = slot.frame.open(pa.array([1, 2, 1]), np.array([1, 2, 1]))
    assert places[0] == places[2] != places[1]
    for slot.scope.at in places:
        slot.handle.add(5)
    slot.frame.close()
    slot.table.promote()
    assert held_contents(slot.table) == {1: 10, 2: 5}


def test_an_aggregate_with_a_struct_goes_by_frames_too() -> None:
    slot = Slot(state.Aggregating("struct<n: bigint, s: double>", Mean()))
    for number in (1.0, 4.0):
        places = slot.frame.open(pa.array([1, 2, 1]), np.array([1, 0, 1]))
        for slot.scope.at in places:
            slot.handle.add(number)
        slot.frame.close()
    slot.table.promote()
    assert held_contents(slot.table) == {1: (4, 10.0), 2: (2, 5.0)}


def test_state_is_refused_where_no_key_is_at_hand() -> None:
    slot = Slot()
    slot.scope.group = NoKey("process_broadcast()")
    for use in (slot.handle.get, slot.handle.clear, lambda: slot.handle.set(1)):
        with pytest.raises(FunctionError, match="where no key is at hand"):
            use()


@pytest.mark.parametrize(
    ("declaration", "in_arrays"),
    [
        (state.Value("long"), True),
        (state.Value("timestamp"), True),
        (state.Reducing("double", max), True),
        (state.Value("struct<n: bigint, s: struct<at: timestamp, d: decimal(9,2)>>"), True),
        (state.Aggregating("struct<n: bigint, s: double>", Mean()), True),
        (state.Value("struct<n: bigint, t: string>"), False),
        (state.Value("struct<>"), False),
        (state.Value("string"), False),
        (state.Value(object), False),
        (state.Value("long", ttl="1 hour"), False),
        (state.List("long"), False),
        (state.Map("long", "long"), False),
    ],
)
def test_numbers_times_and_structs_of_them_without_ttl_lie_in_arrays(
    declaration: Any, in_arrays: bool, tmp_path: Any
) -> None:
    declaration.name = "s"
    heap, rocksdb = HeapBackend(), make_backend("rocksdb", str(tmp_path / "db"), 1 << 26)
    made = [make_row_table(declaration, pa.int64(), each, 2) for each in (heap, rocksdb)]
    assert [isinstance(table, ColumnTable) for table in made] == [in_arrays, False]
    rocksdb.close()
