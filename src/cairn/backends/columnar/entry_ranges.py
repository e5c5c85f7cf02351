"""The entries of a map between two bounds, over all its keys.

Always true here:
- entries whose integers have their order are compared as integers, others by Arrow;
- a null entry is in no range.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.columnar.key_index import NameIndex
from cairn.backends.columnar.name_order import is_ordered_as_integers, name_order
from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.spread import form_of, is_fixed
from cairn.types.codec import Datum

Bools = npt.NDArray[np.bool_]


def find_between(
    index: NameIndex, live: Bools, entry_type: pa.DataType, low: Datum, high: Datum
) -> tuple[pa.Array, pa.Array, Ints]:
    """Return live entries in (low, high]: keys, entries, positions; by entry, then key."""
    positions = np.flatnonzero(live)
    if is_fixed(entry_type) and is_ordered_as_integers(entry_type):
        ints, bit = index.column(1)
        ints = ints[positions]
        within = np.ones(len(positions), np.bool_)
        for bound, compare in ((low, np.greater), (high, np.less_equal)):
            if bound is not None:
                within &= compare(ints, _as_integer(bound, entry_type))
        nulls = index.nulls()
        if nulls is not None:
            within &= (nulls[positions] >> bit) & 1 == 0
        positions = positions[within]
        keys, entries = index.arrays(positions)
    else:
        keys, entries = index.arrays(positions)
        inside = entries.is_valid()
        if low is not None:
            inside = pc.and_(inside, pc.greater(entries, pa.scalar(low, entry_type)))
        if high is not None:
            inside = pc.and_(inside, pc.less_equal(entries, pa.scalar(high, entry_type)))
        inside = inside.fill_null(False)
        keys, entries = keys.filter(inside), entries.filter(inside)
        positions = positions[inside.to_numpy(zero_copy_only=False)]
    order = name_order([entries, keys])
    at = pa.array(order)
    return keys.take(at), entries.take(at), positions[order]


def find_above(
    index: NameIndex, live: Bools, entry_type: pa.DataType, low: int | None
) -> int | None:
    """Return the least live entry above `low`, for entries that are integers."""
    assert is_fixed(entry_type) and is_ordered_as_integers(entry_type)
    ints, _ = index.column(1)
    ints = ints[live]
    if low is not None:
        ints = ints[ints > low]
    return int(ints.min()) if len(ints) else None


def _as_integer(bound: Datum, type: pa.DataType) -> int:
    """Return a bound as the index holds entries. A plain number is the stored one."""
    if isinstance(bound, int):
        return bound
    _, numbers = form_of(type).split(pa.array([bound], type))
    assert numbers is not None
    return int(numbers[0])


__all__ = ["find_above", "find_between"]
