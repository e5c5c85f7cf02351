"""The order of rows: by some columns, and by all for rows that are equal in those.

Always true here:
- the order by all columns does not depend on the order in which rows came, unless rows are equal;
- null comes first and NaN last; -0.0 comes before 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.columnar.name_order import name_order
from cairn.operators.aggregates.grouping import Ints, normal_floats, number_values
from cairn.operators.aggregates.ordering import rank_values
from cairn.operators.aggregates.parts import Bools


def row_order(rows: pa.StructArray) -> Ints:
    """Return the indices that sort rows by their columns, from left to right; stable."""
    return name_order(_leaves(rows.flatten()))


def is_greater(left: pa.StructArray, right: pa.StructArray) -> Bools:
    """Mark the rows of `left` that come after the row of `right` at the same place."""
    both = pa.concat_arrays([right, left])
    place = np.empty(len(both), np.int64)
    place[row_order(both)] = np.arange(len(both))
    leaves = _leaves(both.flatten())
    numbers, _ = number_values(
        pa.StructArray.from_arrays(leaves, list(map(str, range(len(leaves)))))
    )
    half = len(right)
    found: Bools = (place[half:] > place[:half]) & (numbers[half:] != numbers[:half])
    return found


def _leaves(columns: Sequence[pa.Array]) -> list[pa.Array]:
    leaves: list[pa.Array] = []
    for column in columns:
        if pa.types.is_struct(column.type):
            leaves += [column.is_valid(), *_leaves(column.flatten())]
            continue
        if pa.types.is_nested(column.type):
            leaves += _list_leaves(column)
            continue
        leaves.append(column)
        if pa.types.is_floating(column.type):
            # Both zeros are equal as numbers, but not as values of a row.
            bits = pa.int64() if column.type.bit_width == 64 else pa.int32()
            leaves.append(column.view(bits))
    return leaves


def _list_leaves(column: pa.Array) -> list[pa.Array]:
    """Return numbers, and texts where these are not enough, in the order of lists or maps."""
    leaves = [pa.array(rank_values(column))]
    if _has_floats(column.type):
        leaves.append(pa.array(map(repr, column.to_pylist()), pa.string()))
    return leaves


def _has_floats(type_: pa.DataType) -> bool:
    if pa.types.is_nested(type_):
        return any(_has_floats(type_.field(at).type) for at in range(type_.num_fields))
    return bool(pa.types.is_floating(type_))


def pack_codes(at: Ints, codes: Sequence[Ints]) -> Ints:
    """Return one integer per row, in the order of key and codes: one sort in place of several."""
    packed, packed_count = at, len(at) + 1
    for code in codes:
        code, count = _from_zero(code)
        if packed_count * count >= 1 << 63:
            (packed, packed_count), (code, count) = _dense(packed), _dense(code)
        packed = packed * count + code
        packed_count *= count
    return packed


def _from_zero(code: Ints) -> tuple[Ints, int]:
    """Return codes from zero on in the same order, and a bound of them."""
    if not len(code):
        return code, 1
    least, greatest = int(code.min()), int(code.max())
    if greatest - least >= 1 << 62:
        return _dense(code)
    return code - least, greatest - least + 1


def _dense(code: Ints) -> tuple[Ints, int]:
    values, numbers = np.unique(code, return_inverse=True)
    return numbers, len(values) + 1


def order_codes(column: pa.Array, *, is_descending: bool) -> list[Ints]:
    """Return integers that are in the order of the values; null is the least, NaN the greatest."""
    codes: list[Ints] = []
    if column.null_count:
        codes.append(column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64))
    type_ = column.type
    if pa.types.is_floating(type_):
        plain = normal_floats(column).fill_null(0.0).cast(pa.float64()).to_numpy()
        bits = plain.view(np.int64)
        # The bits of negative numbers are in the opposite order.
        codes.append(bits ^ ((bits >> 63) & np.int64(2**63 - 1)))
    elif pa.types.is_boolean(type_) or pa.types.is_integer(type_):
        codes.append(column.cast(pa.int64()).fill_null(0).to_numpy())
    elif pa.types.is_temporal(type_):
        width = pa.int32() if type_.bit_width == 32 else pa.int64()
        codes.append(column.view(width).cast(pa.int64()).fill_null(0).to_numpy())
    else:
        encoded = pc.dictionary_encode(column)
        places = np.empty(len(encoded.dictionary), np.int64)
        places[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(places))
        indices = encoded.indices.fill_null(0).to_numpy()
        codes.append(places[indices] if len(places) else np.zeros(len(column), np.int64))
    return [~code for code in codes] if is_descending else codes


def count_before(key_at: Ints, counted: Bools) -> Ints:
    """Return how many counted rows of its key come before each row; rows of a key adjoin."""
    before: Ints = np.cumsum(counted) - counted
    starts = np.flatnonzero(np.diff(key_at, prepend=-1)) if len(key_at) else key_at
    lengths = np.diff(np.append(starts, len(key_at)))
    result: Ints = before - np.repeat(before[starts], lengths)
    return result
