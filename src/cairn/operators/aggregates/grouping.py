"""Equal keys found by the batch: for each row the number of its key, and each key once.

Always true here:
- keys come in the order of their first row, so the same rows give the same numbers;
- null is a key; NaN is one key, and -0.0 the same as 0.0, as Spark groups them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cairn.types.codec import codec

Ints = npt.NDArray[np.int64]


def numbered(values: pa.Array) -> tuple[Ints, int]:
    """(the number of each row's value, how many values there are)."""
    type_ = values.type
    if pa.types.is_struct(type_):
        # A null struct is not one of nulls: whether it is there counts as a field.
        fields = values.flatten()
        numbers, count = numbered(values.is_valid())
        for field in fields:
            numbers, count = together(numbers, count, *numbered(field))
        return numbers, count
    if pa.types.is_nested(type_):
        # Named as state names them, so that what is one key there is one here.
        keys = codec(type_).decode_keys(values)
        places = {key: at for at, key in enumerate(dict.fromkeys(keys))}
        return np.fromiter(map(places.__getitem__, keys), np.int64, len(keys)), len(places)
    if pa.types.is_floating(type_):
        values = normal_floats(values)
    encoded = pc.dictionary_encode(values, null_encoding="encode")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), len(encoded.dictionary)


def together(left: Ints, left_count: int, right: Ints, right_count: int) -> tuple[Ints, int]:
    """Numbers for pairs of numbers, each of which occurs."""
    if left_count <= 1:
        return right, right_count
    if right_count <= 1:
        return left, left_count
    pairs = left * right_count + right
    if left_count * right_count > 4 * len(pairs):
        return numbered(pa.array(pairs))
    # Few enough for a place each: no need to hash.
    rows = np.arange(len(pairs))
    first = np.empty(left_count * right_count, np.int64)
    first[pairs[::-1]] = rows[::-1]
    first_of_row = first[pairs]
    is_first = first_of_row == rows
    numbers: Ints = (np.cumsum(is_first) - 1)[first_of_row]
    return numbers, int(np.count_nonzero(is_first))


def first_rows(numbers: Ints, count: int) -> Ints:
    """The first row of each number."""
    first = np.empty(count, np.int64)
    # Of several assignments to one place the last one stays, so they are made backwards.
    first[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)
    return first


def normal_floats(values: pa.Array) -> pa.Array:
    """Floats of which equal ones have equal bits."""
    plain: npt.NDArray[Any] = values.fill_null(0.0).to_numpy(zero_copy_only=False) + 0.0
    plain[np.isnan(plain)] = np.nan
    return pa.array(plain, values.type, mask=_nulls(values))


def _nulls(values: pa.Array) -> npt.NDArray[np.bool_] | None:
    return None if not values.null_count else values.is_null().to_numpy(zero_copy_only=False)
