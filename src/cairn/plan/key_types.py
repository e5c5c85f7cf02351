"""The types of key columns, as the state of an operator has them.

Always true here:
- equal keys of all inlets are equal in their common type, so that they meet.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from cairn.plan.graph import Graph
from cairn.plan.nodes import Inlet


def key_types(graph: Graph, inlets: Sequence[Inlet]) -> tuple[pa.DataType, ...]:
    """The types of the key columns that the keys of all inlets fit into."""
    found = []
    keyed = [inlet for inlet in inlets if inlet.way == "keyed"]
    for columns in zip(*(inlet.keys for inlet in keyed), strict=True):
        types = [
            graph.input_schema(inlet).field(column).type
            for inlet, column in zip(keyed, columns, strict=True)
        ]
        found.append(common_type(types))
    if any(type_ is None for type_ in found):
        raise AssertionError("inlets whose keys have no common type are refused when connected")
    return tuple(found)


_WIDENED = (
    (pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    (pa.float32(), pa.float64()),
)


def common_type(types: Sequence[pa.DataType]) -> pa.DataType | None:
    """The widest of these types, if equal values of all of them are equal in it; else None."""
    if len(set(types)) == 1:
        return types[0]
    for widening in _WIDENED:
        if all(type_ in widening for type_ in types):
            return max(types, key=widening.index)
    return None


__all__ = ["common_type", "key_types"]
