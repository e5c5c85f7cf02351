"""The index of names: against a dict, with enough names that they collide, and its corners."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.backends.columnar import int_index
from cairn.backends.columnar.int_index import IntIndex, Names
from cairn.backends.columnar.key_index import NameIndex
from cairn.types import parse_type
from cairn.types.codec import codec

LONGS = st.integers(-(2**63), 2**63 - 1)


def names_of(*columns: list[int]) -> Names:
    return Names([np.asarray(column, np.int64) for column in columns], None)


def agree(index: NameIndex, known: dict[Any, int], arrays: list[pa.Array], add: bool) -> None:
    """Place or find names, and compare with a dict from name to position."""
    rows = list(zip(*(codec(a.type).decode_keys(a) for a in arrays), strict=True))
    if not add:
        assert index.find(arrays).tolist() == [known.get(row, -1) for row in rows]
        return
    before = len(index)
    positions, firsts = index.place(arrays)
    new = [rows[at] for at in firsts.tolist()]
    assert len(set(map(repr, new))) == len(new) == len(index) - before
    for at, row in enumerate(new):
        assert row not in known
        known[row] = before + at
    assert positions.tolist() == [known[row] for row in rows]


@given(st.lists(st.tuples(st.booleans(), st.lists(LONGS | st.integers(0, 50))), max_size=8))
def test_longs_have_the_positions_a_dict_would_give_them(steps: Any) -> None:
    index, known = NameIndex([pa.int64()]), {}
    for add, keys in steps:
        agree(index, known, [pa.array(keys, pa.int64())], add)
    assert len(index) == len(known)


NAMES = st.integers(0, 9) | st.none()


@given(st.lists(NAMES), st.lists(st.tuples(NAMES, st.integers(-2, 12))))
def test_names_are_found_whatever_positions_are_likely(held: Any, asked: Any) -> None:
    index = NameIndex([pa.int64()])
    index.place([pa.array(held, pa.int64())])
    keys = [pa.array([key for key, _ in asked], pa.int64())]
    likely = np.array([position for _, position in asked], np.int64)
    guesses = likely.copy()
    assert index.find(keys, likely).tolist() == index.find(keys).tolist()
    assert likely.tolist() == guesses.tolist(), "they belong to another table"


@pytest.mark.parametrize("stride", [1, 7, 1 << 20, 1 << 32, 1 << 45, -(1 << 53)])
def test_keys_in_any_pattern_are_found_in_a_few_steps(stride: int) -> None:
    index, known = NameIndex([pa.int64()]), {}
    keys = np.arange(5_000, dtype=np.int64) * stride
    for part in np.array_split(keys, 4):
        agree(index, known, [pa.array(part)], add=True)
        agree(index, known, [pa.array(keys)], add=False)
    home, _ = index._index._homes(Names([np.unique(keys)], None))
    assert np.bincount(home).max() <= 10


@pytest.mark.parametrize(
    "types",
    [
        ["bigint", "bigint"], ["string", "bigint"], ["int", "string"],
        ["struct<a:string,b:bigint,c:date>"], ["decimal(22,2)", "timestamp"],
    ],
)  # fmt: skip
def test_thousands_of_names_in_several_parts_are_kept_apart(types: list[str]) -> None:
    rng = np.random.default_rng(1)
    index, known = NameIndex([parse_type(t) for t in types]), {}
    for _ in range(4):
        arrays = [_random_column(parse_type(t), 3_000, rng) for t in types]
        agree(index, known, arrays, add=False)
        agree(index, known, arrays, add=True)
        agree(index, known, [a.slice(7, 100) for a in arrays], add=False)
        every = np.arange(len(index))
        for part, found in zip(arrays, index.arrays(index.find(arrays)), strict=True):
            assert found.equals(part)
        assert [a.type for a in index.arrays(every)] == [parse_type(t) for t in types]


def _random_column(type: pa.DataType, count: int, rng: Any) -> pa.Array:
    if pa.types.is_struct(type):
        columns = [_random_column(field.type, count, rng) for field in type]
        return pa.StructArray.from_arrays(columns, fields=list(type))
    numbers = pa.array(rng.integers(0, 90, count), mask=rng.random(count) < 0.1)
    if pa.types.is_date(type):
        numbers = numbers.cast(pa.int32())
    if pa.types.is_string(type):
        text = [None if n is None else "é" * (n % 30) + str(n) for n in numbers.to_pylist()]
        return pa.array(text, type)
    return numbers.cast(type)


def test_names_that_spark_groups_together_are_one() -> None:
    index = NameIndex([pa.float64()])
    odd_nan = np.array([0xFFF8000000000001], np.uint64).view(np.float64)[0]
    keys = pa.array([0.0, -0.0, math.nan, odd_nan, None, 1.0], pa.float64(), from_pandas=False)
    positions, firsts = index.place([keys])
    assert positions[0] == positions[1] and positions[2] == positions[3]
    assert len(set(positions.tolist())) == len(firsts) == 4


def test_null_is_a_name_of_its_own_wherever_it_stands() -> None:
    index = NameIndex([pa.int64(), pa.int32()])
    keys = pa.array([0, None, 0, None, 0], pa.int64())
    entries = pa.array([0, 0, None, None, 0], pa.int32())
    positions, _ = index.place([keys, entries])
    assert len(set(positions.tolist())) == 4 and positions[0] == positions[4]
    assert index.find([keys.slice(1), entries.slice(1)]).tolist() == positions[1:].tolist()
    # Names without nulls that come later, and before, are not taken for them.
    assert index.find([pa.array([0], pa.int64()), pa.array([0], pa.int32())])[0] == positions[0]
    days = NameIndex([pa.date32()])
    assert days.place([pa.array([dt.date(1970, 1, 1)])])[0].tolist() == [0]
    assert days.find([pa.array([None], pa.date32())]).tolist() == [-1]
    assert days.place([pa.array([None], pa.date32())])[0].tolist() == [1]


def test_names_with_one_hash_find_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int_index, "mix", lambda values: values * np.uint64(0))
    index = IntIndex(1)
    positions, firsts = index.place(names_of([5, 6, 5, 7, 6]))
    assert positions[0] == positions[2] and positions[1] == positions[4]
    assert sorted(set(positions.tolist())) == [0, 1, 2] and len(firsts) == 3
    again, more = index.place(names_of([8, 7, 6, 5]))
    assert again[1:].tolist() == [positions[3], positions[1], positions[0]]
    assert more.tolist() == [0] and again[0] == 3
    assert index.find(names_of([9])).tolist() == [-1]
