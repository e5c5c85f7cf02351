"""Pages against one array of all rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.backends.columnar import pages
from cairn.backends.columnar.pages import Pages, join_pages

TYPE = pa.struct([("n", pa.int64()), ("text", pa.string())])
SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def rows_from(start: int, count: int) -> pa.StructArray:
    return pa.array(
        [(n, None if n % 3 == 0 else f"t{n}") for n in range(start, start + count)], TYPE
    )


def pages_of(sizes: list[int]) -> Pages:
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return Pages([rows_from(*each) for each in zip(starts, sizes, strict=True)])


@given(sizes=SIZES, data=st.data())
def test_rows_are_read_in_any_order_whatever_their_pages(sizes: list[int], data: Any) -> None:
    places = st.lists(st.integers(0, sum(sizes) - 1), max_size=12)
    at = np.array(data.draw(places), np.int64)
    is_null = np.array(data.draw(st.lists(st.booleans(), min_size=len(at), max_size=len(at))), bool)
    held, whole = pages_of(sizes), rows_from(0, sum(sizes))
    assert held.take(at).equals(whole.take(pa.array(at)))
    assert held.take(at, is_null).equals(whole.take(pa.array(at, mask=is_null)))
    assert held.take_field("text", at).equals(whole.field("text").take(pa.array(at)))


@given(sizes=st.lists(SIZES, min_size=1, max_size=4), rows_max=st.integers(1, 9))
def test_joined_pages_keep_the_places_and_stay_small(sizes: list[list[int]], rows_max: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "PAGE_ROWS", rows_max)
        joined = join_pages(pages_of(each) for each in sizes)
    count = sum(map(sum, sizes))
    found = joined.take(np.arange(count))
    assert found.equals(pa.concat_arrays([rows_from(0, sum(each)) for each in sizes]))
    lengths = [len(array) for array in joined.arrays]
    largest = max(map(max, sizes))
    assert max(lengths) <= max(rows_max, largest)
    assert all(sum(pair) > rows_max for pair in pairwise(lengths))


@given(sizes=SIZES, data=st.data())
def test_packed_pages_hold_the_same_rows_in_less_room(sizes: list[int], data: Any) -> None:
    every = list(range(sum(sizes)))
    at = np.array(data.draw(st.lists(st.sampled_from(every), unique=True, min_size=1)), np.int64)
    held = pages_of(sizes)
    packed, places = held.pack(at)
    assert packed.take(places).equals(held.take(at))
    assert 4 * len(at) > 3 * len(held) or 3 * len(packed) <= 4 * len(at)
