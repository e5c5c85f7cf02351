"""The order of rows by their values, for rows that are equal in every other way.

Always true here:
- it does not depend on the order in which rows came, unless they are equal in all columns;
- null comes first and NaN last; -0.0 comes before 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cairn.backends.columnar.name_order import name_order
from cairn.operators.aggregates.grouping import Ints, number_values
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
        leaves.append(column)
        if pa.types.is_floating(column.type):
            # Both zeros are equal as numbers, but not as values of a row.
            bits = pa.int64() if column.type.bit_width == 64 else pa.int32()
            leaves.append(column.view(bits))
    return leaves
