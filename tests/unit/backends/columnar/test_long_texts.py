"""Numbers of long texts: equal for equal texts, also where hashes clash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.backends.columnar import long_texts
from cairn.backends.columnar.key_index import NameIndex
from cairn.types import parse_type

REAL_HASH = long_texts._hash_words
TEXTS = st.none() | st.sampled_from(
    ["", "short", "fifteen bytes..", "sixteen bytes...", "é" * 9, "x" * 40, "x" * 41, "y" * 40]
)


def same_hash(starts: Any, lengths: Any, words: Any) -> Any:
    return np.zeros(len(starts), np.int64)


def two_hashes(starts: Any, lengths: Any, words: Any) -> Any:
    return REAL_HASH(starts, lengths, words) & 1


@pytest.mark.parametrize("type", ["string", "binary", "struct<a:string,b:string>"])
@pytest.mark.parametrize("hashed", [REAL_HASH, same_hash, two_hashes])
@pytest.mark.parametrize("bytes_max", [30, 1024])
def test_a_name_has_one_position_and_comes_back_from_it(
    type: str, hashed: Callable[..., Any], bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_texts, "_hash_words", hashed)
    monkeypatch.setattr(long_texts, "HASHED_BYTES_MAX", bytes_max)
    arrow = parse_type(type)

    def column(values: list[Any]) -> pa.Array:
        texts = pa.array(values, pa.string())
        if not pa.types.is_struct(arrow):
            return texts.cast(arrow)
        return pa.StructArray.from_arrays([texts, texts], fields=list(arrow))

    @given(st.lists(st.lists(TEXTS, max_size=12), max_size=5))
    def check(batches: list[list[Any]]) -> None:
        index, model = NameIndex([arrow]), dict[Any, int]()
        for values in batches:
            found = index.find([column(values)]).tolist()
            assert found == [model.get(value, -1) for value in values]
            positions, _ = index.place([column(["before", *values])[1:]])
            for value, position in zip(values, positions.tolist(), strict=True):
                assert model.setdefault(value, position) == position
            assert sorted(model.values()) == list(range(len(model)))
            held = index.arrays(positions)[0]
            held.validate(full=True)
            assert held.equals(column(values))

    check()
