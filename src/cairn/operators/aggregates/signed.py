"""Sums of doubles that rows can be taken back from.

Infinity and NaN cannot be subtracted, so they are counted apart. Finite values are added and
subtracted; the last digits may differ from a sum of the values that are left.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cairn.operators.aggregates.parts import Array, Columns, Ints, Part, plain


class FloatSum(Part):
    names = ("sum", "nan", "up", "down")
    types = (pa.float64(), pa.int64(), pa.int64(), pa.int64())

    def zeros(self, count: int) -> Columns:
        return [np.zeros(count), *(np.zeros(count, np.int64) for _ in range(3))]

    def load(self, arrays: list[pa.Array]) -> Columns:
        return [plain(array) for array in arrays]

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        into[0] += np.bincount(at, weights=columns[0], minlength=len(into[0]))
        for held, more in zip(into[1:], columns[1:], strict=True):
            np.add.at(held, at, more)

    def store(self, columns: Columns) -> list[pa.Array]:
        return [pa.array(column) for column in columns]

    def total(self, columns: Columns) -> Array:
        """Return the sums."""
        total, nan, up, down = columns
        found = np.where(up > 0, np.inf, total)
        found = np.where(down > 0, -np.inf, found)
        is_nan = (nan > 0) | ((up > 0) & (down > 0))
        return np.where(is_nan, np.nan, found)
