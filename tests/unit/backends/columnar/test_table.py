"""State in arrays: what the model does not look at. Sizes, orders, and what the bytes depend on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cairn import state
from cairn.backends import make_backend
from cairn.backends.columnar import chains, key_count, spread
from cairn.backends.columnar import table as columns
from cairn.backends.columnar.key_index import NameIndex
from cairn.backends.columnar.table import ColumnTable
from cairn.backends.columnar.texts import Texts
from cairn.backends.handles import make_batch_handle, make_batch_table
from cairn.key_groups import key_groups
from cairn.storage.manifest import Held

GROUP_COUNT = 16


def made(declaration: state.Declaration, key_type: pa.DataType) -> tuple[ColumnTable, Any]:
    declaration.name = "s"
    table = make_batch_table(declaration, key_type, make_backend("heap", ""), GROUP_COUNT)
    assert isinstance(table, ColumnTable)
    table.assign(range(GROUP_COUNT))
    return table, make_batch_handle(table)


def keys_of(count: int, seed: int, type_: pa.DataType) -> pa.Array:
    numbers = np.random.default_rng(seed).permutation(count * 3)[:count]
    return pa.array(numbers).cast(type_)


@pytest.mark.parametrize("type_", [pa.int64(), pa.string(), pa.int32()])
def test_thousands_of_keys_are_stored_in_their_key_groups(type_: pa.DataType) -> None:
    table, handle = made(state.Value("long"), type_)
    expected: dict[Any, int] = {}
    for seed in range(3):
        keys = keys_of(4_000, seed, type_)
        handle.put_many(keys, pa.array(np.full(4_000, seed)))
        expected |= dict.fromkeys(keys.to_pylist(), seed)
        delta = table.delta()
        assert delta is not None and delta.num_rows == 4_000
        groups = delta["group"].to_numpy()
        assert (np.diff(groups) >= 0).all()
        assert (groups == key_groups(delta["key"], type_, GROUP_COUNT)).all()
        table.promote()
    (whole,) = [pa.Table.from_batches(list(table.dump())).combine_chunks()]
    assert dict(zip(whole["key"].to_pylist(), whole["value"].to_pylist(), strict=True)) == expected
    assert (np.diff(whole["group"].to_numpy()) >= 0).all()


def test_a_delta_does_not_depend_on_how_the_state_came_to_be() -> None:
    """Two slots, one of which has restored: their acknowledgements must agree."""
    table, handle = made(state.Map("long", "struct<a: double, b: string>"), pa.int64())
    keys, entries = keys_of(3_000, 1, pa.int64()), keys_of(3_000, 2, pa.int64())
    value = pa.StructArray.from_arrays(
        [pa.array([None, 1.5, 2.5] * 1_000), pa.array(["x", None, "z"] * 1_000)], ["a", "b"]
    )
    handle.put_many(keys, entries, value)
    first = table.delta()
    table.promote()
    handle.put_many(keys[:500], entries[:500], pa.nulls(500, value.type))
    second = table.delta()
    table.promote()
    restored, other = made(state.Map("long", "struct<a: double, b: string>"), pa.int64())
    restored.apply(restored.merge([first, second]))
    order = pa.array(np.random.default_rng(3).permutation(3_000))
    for one in (handle, other):
        one.put_many(keys.take(order), entries.take(order), value)
        one.put_many(keys[600:700], entries[600:700], pa.nulls(100, value.type))
    mine, theirs = table.delta(), restored.delta()
    assert mine is not None and mine.equals(theirs)
    for left, right in zip(handle.between(100, 5_000), other.between(100, 5_000), strict=True):
        assert left.equals(right)
    for left, right in zip(handle.of_keys(keys), other.of_keys(keys), strict=True):
        assert left.equals(right)


def test_names_of_which_nothing_is_held_do_not_change_the_order_of_a_delta() -> None:
    def run(handle: Any) -> None:
        handle.put_many(longs(5, 1), longs(None, 1))
        handle.put_many(longs(2, 3, 3, 5), longs(2, 3, None, 5))

    def longs(*values: Any) -> pa.Array:
        return pa.array(values, pa.int64())

    deltas = []
    for has_past in (False, True):
        table, handle = made(state.Value("long"), pa.int64())
        table._group_count = 1
        if has_past:
            handle.put_many(longs(3, 5), longs(1, 1))
            table.rollback()
        run(handle)
        deltas.append(table.delta())
    assert deltas[0].equals(deltas[1])
    assert deltas[0]["key"].to_pylist() == [1, 2, 5]


def test_what_came_and_went_within_an_epoch_is_no_change() -> None:
    table, handle = made(state.Value("long"), pa.int64())
    handle.put_many(pa.array([1, 2]), pa.array([1, 2]))
    handle.put_many(pa.array([1, 2, 3]), pa.array([None, None, None], pa.int64()))
    assert table.delta() is None and table.keys_changed() == 0 and table.count_held().entries == 0
    assert handle.get_many(pa.array([1, 3])).null_count == 2


def test_of_a_key_given_twice_the_last_word_counts() -> None:
    table, handle = made(state.Value("long"), pa.int64())
    handle.put_many(pa.array([7, 8, 7, 8]), pa.array([1, 2, 3, None]))
    assert handle.get_many(pa.array([7, 8])).to_pylist() == [3, None]
    handle.put_many(pa.array([8, 7, 8]), pa.array([None, None, 5], pa.int64()))
    assert handle.get_many(pa.array([7, 8])).to_pylist() == [None, 5]
    delta = table.delta()
    assert delta is not None and delta["key"].to_pylist() == [8]


def test_dead_positions_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "DEAD_MIN", 100)
    table, handle = made(state.Map("long", "long"), pa.int64())
    for epoch in range(50):
        keys = pa.array(np.arange(200))
        entries = pa.array(np.full(200, epoch))
        handle.put_many(keys, entries, entries)
        old, at, _ = handle.between(None, epoch - 2)
        handle.put_many(old, at, pa.nulls(len(old), pa.int64()))
        assert handle.of_keys(pa.array([5]))[1].to_pylist() == [
            *range(max(0, epoch - 1), epoch + 1)
        ]
        table.promote()
    assert table.count_held().entries == 400
    assert len(table._index) <= 1_200


def test_a_base_begun_in_an_epoch_has_none_of_it() -> None:
    table, handle = made(state.Value("long"), pa.int64())
    handle.put_many(pa.array([1, 2]), pa.array([1, 2]))
    table.promote()
    handle.put_many(pa.array([2, 3]), pa.array([None, 3], pa.int64()))
    base = table.freeze()
    table.promote()
    (rows,) = base
    found = dict(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))
    assert found == {1: 1, 2: 2}


@pytest.mark.parametrize("few", [0, 3, 1000])
def test_a_key_with_many_entries_does_not_hide_those_with_few(
    monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(chains, "FEW", few)
    table, handle = made(state.Map("long", "long"), pa.int64())
    lengths = {1: 500, 2: 1, 3: 40, 4: 39, 5: 2, 6: 40}
    names = [(key, entry) for entry in range(500) for key, n in lengths.items() if entry < n]
    for start in range(0, len(names), 100):
        keys, entries = zip(*names[start : start + 100], strict=True)
        handle.put_many(pa.array(keys), pa.array(entries), pa.array(entries))
        table.promote()
        handle.of_keys(pa.array([1]))
    handle.put_many(pa.array([1, 3]), pa.array([7, 39]), pa.nulls(2, pa.int64()))
    asked = [6, 1, 9, 2, 3, 4, 5]
    rows, entries, values = handle.of_keys(pa.array(asked))
    expected = sorted(
        (asked.index(key), entry) for key, entry in names if (key, entry) not in ((1, 7), (3, 39))
    )
    assert list(zip(rows.to_pylist(), entries.to_pylist(), strict=True)) == expected
    assert values.equals(entries)


def test_keys_of_a_large_map_are_counted_again_when_much_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_count, "COUNTED_MAX", 10)
    counts = 0
    count_distinct = NameIndex.count_distinct

    def counting(index: NameIndex, positions: Any) -> int:
        nonlocal counts
        counts += 1
        return count_distinct(index, positions)

    monkeypatch.setattr(NameIndex, "count_distinct", counting)
    table, handle = made(state.Map("long", "long"), pa.int64())

    def write(keys: list[int], entries: list[int]) -> Held:
        handle.put_many(pa.array(keys), pa.array(entries), pa.array(entries))
        found = table.count_held()
        table.promote()
        return found

    assert write(list(range(100)) * 2, [*[1] * 100, *[2] * 100]) == (100, 200)
    assert counts == 1
    assert write(list(range(10)), [3] * 10) == (105, 210)
    assert counts == 1
    assert write(list(range(20)), [4] * 20) == (100, 230)
    assert counts == 2


def test_texts_are_moved_in_pieces_because_an_array_holds_2_gb(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows_max = 100
    take = Texts.take

    def take_few(texts: Texts, places: Any, valid: Any) -> pa.Array:
        assert len(places) <= rows_max, "more than one array holds"
        return take(texts, places, valid)

    monkeypatch.setattr(columns, "MOVED_ROWS", rows_max)
    monkeypatch.setattr(spread, "MOVED_ROWS", rows_max)
    monkeypatch.setattr(columns, "CHAINED_AT_ONCE", rows_max)
    table, handle = made(state.Map("string", "string"), pa.string())
    names = [f"a key of more than fifteen bytes {at}" for at in range(1_000)]
    for start in range(0, 1_000, rows_max):
        some = pa.array(names[start : start + rows_max])
        handle.put_many(some, some, some)
    table.promote()
    monkeypatch.setattr(Texts, "take", take_few)
    table._lay_out()
    rows, entries, values = handle.of_keys(pa.array([names[7], names[999]]))
    assert rows.to_pylist() == [0, 1]
    assert entries.to_pylist() == values.to_pylist() == [names[7], names[999]]
    assert len(table._index) == table.count_held().entries == 1_000
