"""Deltas, rollback, merging and bases: what is stored gives back what was there."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn import state
from cairn.backends import BACKENDS, Backend, HeapBackend, make_backend
from cairn.backends import overlay as overlay_module
from cairn.backends.overlay import in_order, make_table
from cairn.errors import FunctionError
from cairn.types import parse_type
from tests.unit.backends.state_of_a_key import GROUP_COUNT, Bound

KINDS: dict[str, Callable[[], state.Declaration]] = {
    "value": lambda: state.Value("long"),
    "list": lambda: state.List("long"),
    "map": lambda: state.Map("string", "long"),
    "reducing": lambda: state.Reducing("long", operator.add),
}


def fill(handle: Any, number: int) -> None:
    if isinstance(handle, state.Value):
        handle.set(number)
    elif isinstance(handle, state.Map):
        handle[f"e{number % 3}"] = number
    elif isinstance(handle, state.List):
        handle.append(number)
    else:
        handle.add(number)


def read(handle: Any) -> Any:
    if isinstance(handle, state.Map):
        return dict(handle)
    return list(handle) if isinstance(handle, state.List) else handle.get()


@pytest.fixture(params=itertools.product(BACKENDS, KINDS), ids="-".join)
def bound(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bound]:
    backend, kind = request.param
    made: list[Backend] = []

    def make() -> Backend:
        made.append(make_backend(backend, str(tmp_path / f"state{len(made)}"), 64 << 20))
        return made[-1]

    yield Bound(KINDS[kind](), make=make)
    for each in made:
        each.close()


def test_an_epoch_without_change_has_no_delta(bound: Bound) -> None:
    assert bound.commit() is None
    fill(bound.handle, 1)
    assert bound.commit() is not None
    read(bound.handle)
    read(bound.at(99))
    assert bound.commit() is None


def test_clearing_what_is_not_there_is_no_change(bound: Bound) -> None:
    bound.handle.clear()
    assert bound.commit() is None


def test_set_and_cleared_within_an_epoch_leaves_nothing(bound: Bound) -> None:
    fill(bound.handle, 1)
    bound.handle.clear()
    delta = bound.commit()
    assert not read(bound.handle)
    assert bound.table.count_held().entries == 0
    assert bound.loaded(delta).table.count_held().entries == 0


def test_rollback_leaves_exactly_the_last_epoch(bound: Bound) -> None:
    fill(bound.at(1), 1)
    fill(bound.at(2), 2)
    bound.commit()
    before = read(bound.at(1)), read(bound.at(2))
    fill(bound.at(1), 5)
    bound.at(2).clear()
    fill(bound.at(2), 7)
    fill(bound.at(3), 3)
    bound.at(1).clear()
    bound.rollback()
    assert (read(bound.at(1)), read(bound.at(2))) == before
    assert not read(bound.at(3))
    assert bound.commit() is None
    assert bound.table.count_held().entries == 2


def test_the_same_changes_after_a_rollback_give_the_same_delta(bound: Bound) -> None:
    for key in (3, 1, 2):
        fill(bound.at(key), key)
    bound.commit()

    def change() -> pa.RecordBatch | None:
        bound.at(1).clear()
        fill(bound.at(1), 8)
        bound.at(2).clear()
        fill(bound.at(9), 9)
        return bound.table.delta()

    first = change()
    bound.rollback()
    assert change() == first


def test_the_same_changes_in_a_restored_slot_give_the_same_delta(bound: Bound) -> None:
    deltas = []
    for epoch in range(4):
        for key in (3, 1, 2):
            fill(bound.at(key), epoch)
        bound.at(epoch).clear()
        fill(bound.at(epoch), 7 - epoch)
        deltas.append(bound.commit())
    others = [bound, bound.loaded(*deltas), bound.loaded(*bound.table.dump())]
    made = []
    for other in others:
        for key in (1, 2, 3):
            other.at(key).clear()
        made.append(other.table.delta())
    assert made[0] is not None
    assert made[0] == made[1] == made[2]


def test_deltas_in_order_give_the_state_they_were_taken_from(bound: Bound) -> None:
    deltas = []
    for epoch in range(6):
        for key in range(epoch, epoch + 3):
            fill(bound.at(key, group=key % GROUP_COUNT), epoch)
        bound.at(epoch - 1, group=(epoch - 1) % GROUP_COUNT).clear()
        deltas.append(bound.commit())
    again = bound.loaded(*deltas)
    for key in range(-1, 10):
        group = key % GROUP_COUNT
        assert read(again.at(key, group)) == read(bound.at(key, group))


@pytest.mark.parametrize("seed", range(5))
def test_merged_deltas_equal_deltas_applied_in_order(bound: Bound, seed: int) -> None:
    chance = random.Random(seed)
    deltas: list[pa.RecordBatch] = []
    for epoch in range(12):
        for _ in range(chance.randrange(1, 5)):
            key = chance.randrange(4)
            handle = bound.at(key, group=key)
            if chance.random() < 0.35:
                handle.clear()
            if chance.random() < 0.7:
                fill(handle, epoch)
        delta = bound.commit()
        if delta is not None:
            deltas.append(delta)
    for start, stop in itertools.combinations(range(len(deltas) + 1), 2):
        merged = bound.table.merge(deltas[start:stop])
        again = bound.loaded(*deltas[:start], merged, *deltas[stop:])
        for key in range(4):
            assert read(again.at(key, group=key)) == read(bound.at(key, group=key))


def test_a_base_is_the_same_whatever_files_the_state_was_restored_from(bound: Bound) -> None:
    deltas = []
    for epoch, key in enumerate([3, 1, 2, 1, 3]):
        bound.at(key).clear()
        fill(bound.at(key), epoch)
        deltas.append(bound.commit())
        bound.at(3).clear()
        deltas.append(bound.commit())
        fill(bound.at(3), 9)
        deltas.append(bound.commit())
    kept = [delta for delta in deltas if delta is not None]
    others = (bound, bound.loaded(*kept), bound.loaded(bound.table.merge(kept)))
    bases = [list(other.table.dump()) for other in others]
    assert bases[0] == bases[1] == bases[2], "a base depends on the slot that wrote it"
    again = bound.loaded(*bases[0])
    for key in range(5):
        assert read(again.at(key)) == read(bound.at(key))


def test_a_base_is_cut_into_batches_of_whole_key_groups(
    bound: Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in range(GROUP_COUNT):
        for key in range(group * 10, group * 10 + 4):
            fill(bound.at(key, group), key)
    bound.commit()
    monkeypatch.setattr(overlay_module, "BASE_BATCH_ROWS", 6)
    batches = list(bound.table.dump())
    assert [batch["group"].unique().to_pylist() for batch in batches] == [[0], [1], [2], [3]]
    assert read(bound.loaded(*batches).at(33, 3)) == read(bound.at(33, 3))


def test_key_groups_given_away_are_forgotten_and_come_back_empty(bound: Bound) -> None:
    for group in range(GROUP_COUNT):
        fill(bound.at(group, group), group)
    bound.commit()
    fill(bound.at(7, 1), 7)
    bound.table.assign(range(1, 3))
    assert bound.table.count_held().entries == 3
    bound.table.rollback()
    bound.table.assign(range(0, 4))
    assert bound.table.count_held().entries == 2
    assert read(bound.at(1, 1)) and not read(bound.at(0, 0))


def test_counts_include_what_the_running_epoch_changes(bound: Bound) -> None:
    fill(bound.at(1), 1)
    fill(bound.at(2), 2)
    bound.commit()
    assert (bound.table.keys_changed(), bound.table.count_held().entries) == (0, 2)
    fill(bound.at(1), 1)
    bound.at(2).clear()
    fill(bound.at(3), 3)
    fill(bound.at(4), 3)
    bound.at(4).clear()
    assert bound.table.count_held().entries == 2
    assert bound.commit() is not None
    assert (bound.table.keys_changed(), bound.table.count_held().entries) == (0, 2)


# Lists


def test_a_delta_of_a_list_holds_only_what_was_appended() -> None:
    bound = Bound(state.List("string"))
    bound.handle.extend(["x" * 1000] * 1000)
    whole = bound.commit()
    bound.handle.append("y")
    delta = bound.commit()
    assert whole is not None and delta is not None
    assert delta["start"].to_pylist() == [1000]
    assert delta["value"].to_pylist() == [["y"]]
    assert delta.nbytes < 100 < whole.nbytes


def test_a_list_cleared_then_appended_then_rolled_back_is_whole_again() -> None:
    bound = Bound(state.List("long"))
    bound.handle.extend([1, 2, 3])
    bound.commit()
    bound.handle.append(4)
    bound.handle.clear()
    bound.handle.extend([5, 6, 7, 8])
    assert list(bound.handle) == [5, 6, 7, 8]
    bound.rollback()
    assert list(bound.handle) == [1, 2, 3]
    bound.handle.append(9)
    delta = bound.commit()
    assert delta is not None and delta["start"].to_pylist() == [3]
    assert list(bound.handle) == [1, 2, 3, 9]


def test_a_list_set_anew_replaces_the_stored_one() -> None:
    bound = Bound(state.List("long"))
    bound.handle.extend([1, 2, 3])
    first = bound.commit()
    bound.handle.set([7])
    second = bound.commit()
    bound.handle.append(8)
    third = bound.commit()
    assert list(bound.loaded(first, second, third).handle) == [7, 8]
    merged = bound.table.merge([first, second, third])
    assert merged["start"].to_pylist() == [0]
    assert list(bound.loaded(merged).handle) == [7, 8]


# Maps


def test_map_entries_deleted_and_added_again_are_there_after_restore_and_merge() -> None:
    bound = Bound(state.Map("string", "long"))
    bound.handle.update({"a": 1, "b": 2})
    first = bound.commit()
    del bound.handle["a"]
    bound.handle["a"] = 3
    del bound.handle["b"]
    second = bound.commit()
    bound.handle["b"] = 4
    third = bound.commit()
    for files in ([first, second, third], [bound.table.merge([first, second, third])]):
        assert dict(bound.loaded(*files).handle) == {"a": 3, "b": 4}


def test_a_map_delta_holds_only_the_entries_that_changed() -> None:
    bound = Bound(state.Map("long", "string"))
    bound.handle.update(dict.fromkeys(range(100), "x"))
    bound.commit()
    bound.handle[5] = "y"
    del bound.handle[7]
    delta = bound.commit()
    assert delta is not None
    assert delta["entry"].to_pylist() == [5, 7]
    assert delta["live"].to_pylist() == [True, False]


def test_a_map_emptied_entry_by_entry_is_gone() -> None:
    bound = Bound(state.Map("string", "long"))
    bound.handle.update({"a": 1, "b": 2})
    first = bound.commit()
    for entry in bound.handle:
        del bound.handle[entry]
    second = bound.commit()
    assert bound.table.count_held().entries == 0
    assert list(bound.table.dump()) == []
    assert bound.loaded(first, second).table.count_held().entries == 0


# Keys


@pytest.mark.parametrize(
    ("key_type", "keys"),
    [
        ("string", [None, "", "a", "\0", "𐍈"]),
        ("double", [None, math.nan, 0.0, -1.5, math.inf]),
        ("binary", [b"", b"\0", None]),
        ("struct<a:string,b:long>", [(None, None), ("x", None), ("x", 1), None]),
        ("array<double>", [(), (None,), (math.nan,), (1.0, 2.0)]),
        ("boolean", [True, False, None]),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_any_type_and_null_survive_storage(
    kind: str, key_type: str, keys: list[Any]
) -> None:
    bound = Bound(KINDS[kind](), parse_type(key_type))
    for number, key in enumerate(keys):
        fill(bound.at(key), number)
    first = bound.commit()
    bound.at(keys[0]).clear()
    second = bound.commit()
    for files in ([first, second], [bound.table.merge([first, second])], bound.table.dump()):
        again = bound.loaded(*files)
        assert again.table.count_held().entries == len(keys) - 1
        for key in keys:
            # The key as a row would bring it: decoded from a column.
            (found,) = bound.table.keys.decode_keys(bound.table.keys.encode([key]))
            assert read(again.at(found)) == read(bound.at(found))


def test_every_nan_is_one_key() -> None:
    bound = Bound(state.Value("long"), pa.float64())
    keys = bound.table.keys.decode_keys(pa.array([math.nan, -math.nan, -0.0, 0.0]))
    for number, key in enumerate(keys):
        bound.at(key).set(number)
    assert bound.table.count_held().entries == 2


def test_in_order_puts_none_first_and_nan_last_at_any_depth() -> None:
    assert in_order([2, None, 1]) == [None, 1, 2]
    assert repr(in_order([math.nan, 1.0, None, -math.inf])) == "[None, -inf, 1.0, nan]"
    assert in_order([("b", None), ("a", 2), (None, 9), ("a", None)]) == [
        (None, 9), ("a", None), ("a", 2), ("b", None),
    ]  # fmt: skip


# What does not fit


@pytest.mark.parametrize("kind", ["value", "list", "map"])
def test_a_number_beyond_64_bits_is_named_with_its_key(kind: str) -> None:
    bound = Bound(KINDS[kind]())
    fill(bound.at(5), 1)
    fill(bound.at(6), 2**63)
    with pytest.raises(
        FunctionError, match=r"state 's' of key 6: .* does not fit bigint"
    ) as raised:
        bound.table.delta()
    assert (raised.value.state, raised.value.key) == ("s", "6")
    bound.rollback()
    assert bound.commit() is None


def test_a_map_key_that_cannot_be_stored_is_named_with_its_key() -> None:
    bound = Bound(state.Map("string", "long"))
    bound.at(3)["\ud800"] = 1
    with pytest.raises(FunctionError, match=r"state 's' of key 3: '\\ud800' does not fit string"):
        bound.table.delta()


def test_a_huge_value_survives_storage() -> None:
    bound = Bound(state.Value("binary"))
    bound.handle.set(b"x" * (32 << 20))
    delta = bound.commit()
    assert len(bound.loaded(delta).handle.get()) == 32 << 20


def test_a_table_without_key_groups_holds_nothing() -> None:
    declaration = state.Value("long")
    declaration.name = "s"
    table = make_table(declaration, pa.int64(), HeapBackend(), GROUP_COUNT)
    table.assign(range(2, 2))
    assert table.delta() is None
    assert list(table.dump()) == []
    assert table.count_held().entries == 0
    table.promote()
    table.rollback()
    table.forget(table.groups)
