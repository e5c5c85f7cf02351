"""The order of values of any type, against Python's order of what they are."""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.operators.aggregates.ordering import choose_extremes, rank_values, sortable

FLOATS = st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 5e-324, 2.0, math.inf, math.nan])
TEXT = st.text(max_size=3)
STRUCT = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "bigint": (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    "boolean": (pa.bool_(), st.booleans()),
    "double": (pa.float64(), FLOATS),
    "float": (pa.float32(), FLOATS),
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us"), st.datetimes()),
    "string": (pa.string(), TEXT),
    "binary": (pa.binary(), st.binary(max_size=3)),
    "decimal": (pa.decimal128(38, 2), st.decimals(-(10**35), 10**35, places=2)),
    "list": (pa.list_(pa.float64()), st.lists(st.none() | FLOATS, max_size=3)),
    "map": (pa.map_(pa.string(), pa.int64()), st.lists(st.tuples(TEXT, st.integers(0, 2)))),
    "struct": (
        STRUCT,
        st.fixed_dictionaries(
            {
                "a": st.none() | st.integers(0, 2),
                "b": st.none() | st.lists(st.none() | TEXT, max_size=2),
            }
        ),
    ),
}


def place(value: Any) -> Any:
    """A value as something that Python orders as Spark orders the value."""
    if value is None:
        return (0,)
    if isinstance(value, dict):
        return (1, tuple(place(part) for part in value.values()))
    if isinstance(value, list | tuple):
        return (1, tuple(place(part) for part in value))
    if isinstance(value, str):
        return (1, value.encode())
    if isinstance(value, float):
        return (1, math.isnan(value), 0.0 if math.isnan(value) else value)
    return (1, value)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_ranks_are_those_of_the_sorted_values(kind: str, data: st.DataObject) -> None:
    type_, values = KINDS[kind]
    rows = data.draw(st.lists(st.none() | values, max_size=12))
    array = pa.array([None, *rows], type_).slice(data.draw(st.integers(0, 1)))
    places = [place(value) for value in array.to_pylist()]
    distinct = sorted(set(places))
    assert rank_values(array).tolist() == [distinct.index(each) for each in places]


@pytest.mark.parametrize("kind", ["bigint", "boolean", "double", "float", "date", "timestamp"])
@given(data=st.data())
def test_values_of_a_word_become_integers_of_the_same_order(kind: str, data: st.DataObject) -> None:
    type_, values = KINDS[kind]
    array = pa.array(data.draw(st.lists(values, max_size=12)), type_)
    found = sortable(array)
    assert found is not None
    _, ranks = np.unique(found, return_inverse=True)
    assert ranks.tolist() == rank_values(array).tolist()


@pytest.mark.parametrize("kind", ["string", "binary", "decimal"])
@given(data=st.data(), is_max=st.booleans())
def test_the_extreme_of_each_number_is_found(kind: str, data: st.DataObject, is_max: bool) -> None:
    type_, values = KINDS[kind]
    rows = data.draw(st.lists(st.tuples(st.integers(0, 3), st.none() | values), max_size=20))
    array = pa.array([value for _, value in rows], type_)
    at = np.array([number for number, _ in rows], np.int64)
    found = choose_extremes(array, at, 4, is_max=is_max)
    for number, row in enumerate(found.tolist()):
        held = [(place(v), i) for i, (n, v) in enumerate(rows) if n == number and v is not None]
        if not held:
            assert row == -1
            continue
        best = (max if is_max else min)(place for place, _ in held)
        assert row == min(i for each, i in held if each == best)


def test_decimals_have_no_word() -> None:
    assert sortable(pa.array([decimal.Decimal(1)], pa.decimal128(5, 0))) is None
