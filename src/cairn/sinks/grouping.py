"""Rows sorted by the values of their partition columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa


def sort_by(columns: Sequence[pa.Array]) -> tuple[pa.Array, list[int]]:
    """Return the order that groups rows by their values, and where each group starts in it.

    Rows of a group keep their order; nulls are equal to each other.
    """
    codes = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        encoded = column.dictionary_encode(null_encoding="encode")
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy()
        # At most as many codes as rows, so the next product does not overflow.
        codes = np.unique(codes, return_inverse=True)[1].reshape(-1)
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1)).tolist()
    return pa.array(order), starts
