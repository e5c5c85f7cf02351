"""The order of names by value, which does not depend on the state's history.

Always true here:
- it is the order of `overlay.in_order`: null first, NaN last, at any depth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.spread import Array, form_of, is_fixed
from cairn.backends.overlay import in_order
from cairn.types.codec import Key, codec


def name_order(columns: Sequence[pa.Array]) -> Ints:
    """Return the indices that sort by these columns."""
    flat: list[pa.Array] = []
    for column in columns:
        flat += _flat(column)
    if any(pa.types.is_nested(column.type) for column in flat):
        rows = list(zip(*(codec(column.type).decode_keys(column) for column in flat), strict=True))
        places: dict[Key, list[int]] = {}
        for at, row in enumerate(rows):
            places.setdefault(row, []).append(at)
        ordered = [at for row in in_order(places) for at in places[row]]
        return np.asarray(ordered, np.int64)
    if all(is_fixed(column.type) and is_ordered_as_integers(column.type) for column in flat):
        if not any(column.null_count for column in flat):
            return _integer_order([form_of(column.type).split(column)[1] for column in flat])
    table = pa.table(flat, names=[str(at) for at in range(len(flat))])
    keys = [(name, "ascending") for name in table.column_names]
    order: Ints = pc.sort_indices(table, sort_keys=keys).to_numpy()
    return order.astype(np.int64)


def _integer_order(columns: Sequence[Array | None]) -> Ints:
    """Return the same order as Arrow's, several times faster."""
    order: Ints | None = None
    for column in reversed(columns):
        assert column is not None
        if order is None:
            order = np.argsort(column, kind="stable")
        elif (column != column[:1]).any():
            order = order[np.argsort(column[order], kind="stable")]
    assert order is not None
    return order


def _flat(column: pa.Array) -> list[pa.Array]:
    # Arrow puts nulls and NaN last; this moves the nulls to the front.
    before = [column.is_valid()] if column.null_count else []
    if not pa.types.is_struct(column.type):
        return [*before, column]
    return before + [leaf for field in column.flatten() for leaf in _flat(field)]


def is_ordered_as_integers(type: pa.DataType) -> bool:
    """True if values of a fixed-width type compare like the integers that hold them."""
    return not pa.types.is_floating(type) and not pa.types.is_decimal(type)
