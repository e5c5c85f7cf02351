"""Equal keys by the batch: the number of each row's key.

Always true here:
- keys are numbered in the order of their first row, so the same rows give the same numbers;
- null is a key; NaN is one key, and -0.0 the same as 0.0, as Spark groups them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cairn.operators.aggregates.ordering import rank_values

Ints = npt.NDArray[np.int64]


def number_values(values: pa.Array) -> tuple[Ints, int]:
    """Return the number of each row's value, and the count of distinct values."""
    type_ = values.type
    if pa.types.is_struct(type_):
        # A null struct is not a struct of nulls: its validity counts as a field.
        fields = values.flatten()
        numbers, count = number_values(values.is_valid())
        for field in fields:
            numbers, count = number_pairs(numbers, count, *number_values(field))
        return numbers, count
    if pa.types.is_nested(type_):
        # Equal here are those that are equal as keys of state.
        ranks = rank_values(values)
        count = int(ranks.max(initial=-1)) + 1
        numbers = np.empty(count, np.int64)
        numbers[np.argsort(first_rows(ranks, count))] = np.arange(count)
        return numbers[ranks], count
    if pa.types.is_floating(type_):
        values = normal_floats(values)
    encoded = pc.dictionary_encode(values, null_encoding="encode")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), len(encoded.dictionary)


def number_pairs(left: Ints, left_count: int, right: Ints, right_count: int) -> tuple[Ints, int]:
    """Return the number of each row's pair of numbers, and the count of distinct pairs."""
    if left_count <= 1:
        return right, right_count
    if right_count <= 1:
        return left, left_count
    pairs = left * right_count + right
    if left_count * right_count > 4 * len(pairs):
        return number_values(pa.array(pairs))
    # Few enough for a table of all pairs, without hashing.
    rows = np.arange(len(pairs))
    first = np.empty(left_count * right_count, np.int64)
    first[pairs[::-1]] = rows[::-1]
    first_of_row = first[pairs]
    is_first = first_of_row == rows
    numbers: Ints = (np.cumsum(is_first) - 1)[first_of_row]
    return numbers, int(np.count_nonzero(is_first))


def first_rows(numbers: Ints, count: int) -> Ints:
    first = np.empty(count, np.int64)
    # The last of several assignments to one place wins, so they are made backwards.
    first[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)
    return first


def normal_floats(values: pa.Array) -> pa.Array:
    """Return floats with equal bits for equal values."""
    plain = values.fill_null(0.0).to_numpy(zero_copy_only=False) + 0.0
    plain[np.isnan(plain)] = np.nan
    return pa.array(plain, values.type, mask=_nulls(values))


def _nulls(values: pa.Array) -> npt.NDArray[np.bool_] | None:
    return None if not values.null_count else values.is_null().to_numpy(zero_copy_only=False)
