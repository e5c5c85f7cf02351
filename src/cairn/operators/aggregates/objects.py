"""Parts of types that numpy has no columns for: text, decimals, first and last, sketches.

They work by the row or by sorting, so they are slower than those in `parts`.
"""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.operators.aggregates import hll
from cairn.operators.aggregates.parts import (
    Array,
    Columns,
    Ints,
    Part,
    plain,
    sum_overflow,
    validity,
)
from cairn.types import type_ddl

_WIDE = decimal.Context(prec=100, rounding=decimal.ROUND_HALF_UP)


class _Objects(Part):
    """One column of Python values, None for none."""

    def __init__(self, type_: pa.DataType) -> None:
        self.type = type_

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (self.type,)

    def zeros(self, count: int) -> Columns:
        return [np.full(count, None, object)]

    def load(self, arrays: list[pa.Array]) -> Columns:
        return [_objects(arrays[0].to_pylist())]

    def store(self, columns: Columns) -> list[pa.Array]:
        return [pa.array(columns[0].tolist(), self.type)]


class ObjectExtreme(_Objects):
    """Minimum or maximum of text, bytes or decimals."""

    def __init__(self, type_: pa.DataType, *, is_max: bool) -> None:
        super().__init__(type_)
        self.is_max = is_max
        self.names = ("max" if is_max else "min",)

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        held = into[0]
        is_max = self.is_max
        for row, value in zip(at.tolist(), columns[0].tolist(), strict=True):
            if value is None:
                continue
            old = held[row]
            if old is None or (value > old if is_max else value < old):
                held[row] = value


class DecimalSum(_Objects):
    """Exact sum; `type` is its type."""

    names = ("sum",)

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        held = into[0]
        touched = set()
        for row, value in zip(at.tolist(), columns[0].tolist(), strict=True):
            if value is not None:
                held[row] = value if held[row] is None else _WIDE.add(held[row], value)
                touched.add(row)
        limit = decimal.Decimal(10) ** (self.type.precision - self.type.scale)
        if any(abs(held[row]) >= limit for row in touched):
            raise sum_overflow(type_ddl(self.type))


class Edge(Part):
    """The first or the last value, by its time or by arrival.

    Among values of one time the least is first and the greatest last.
    """

    names = ("order", "value")

    def __init__(self, type_: pa.DataType, *, is_last: bool, is_timed: bool) -> None:
        self.type = type_
        self.is_last = is_last
        self.is_timed = is_timed

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (pa.int64(), self.type)

    def zeros(self, count: int) -> Columns:
        return [np.zeros(count, np.int64), np.zeros(count, np.bool_), pa.nulls(count, self.type)]

    def load(self, arrays: list[pa.Array]) -> Columns:
        order, values = arrays
        return [plain(order), validity(order), values]

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        count = len(into[0])
        order, seen, values = self.concat(into, columns)
        rows = np.flatnonzero(seen)
        group = np.concatenate([np.arange(count), at])[rows]
        by: dict[str, Array | pa.Array] = {"group": group}
        if self.is_timed:
            some = values.take(pa.array(rows))
            # Null comes before every value, as in Spark.
            by |= {"order": order[rows], "there": some.is_valid(), "value": some}
            if pa.types.is_nested(self.type):
                by["value"] = pa.array([repr(v) for v in some.to_pylist()], pa.string())
        # Last, so that earlier rows, and the value in state, stay in front.
        by["row"] = rows
        ranked = pc.sort_indices(pa.table(by), [(name, "ascending") for name in by]).to_numpy()
        group = group[ranked]
        is_edge = np.ones(len(group), np.bool_)
        if self.is_last:
            is_edge[:-1] = group[1:] != group[:-1]
        else:
            is_edge[1:] = group[1:] != group[:-1]
        chosen = np.arange(count)
        chosen[group[is_edge]] = rows[ranked[is_edge]]
        into[0], into[1] = order[chosen], seen[chosen]
        into[2] = values.take(pa.array(chosen))

    def store(self, columns: Columns) -> list[pa.Array]:
        order, seen, values = columns
        return [pa.array(order, mask=~seen), values]

    def take(self, columns: Columns, rows: Ints) -> Columns:
        return [columns[0][rows], columns[1][rows], columns[2].take(pa.array(rows))]

    def concat(self, first: Columns, second: Columns) -> Columns:
        both = [np.concatenate(pair) for pair in zip(first[:2], second[:2], strict=True)]
        return [*both, pa.concat_arrays([first[2], second[2].cast(first[2].type)])]


class Distinct(Part):
    """A sketch of the hashes so far; Spark sends the hashes."""

    names = ("sketch",)
    types = (pa.binary(),)
    partial_types = (pa.list_(pa.field("element", pa.int64())),)

    def zeros(self, count: int) -> Columns:
        return [_objects([hll.EMPTY] * count)]

    def load(self, arrays: list[pa.Array]) -> Columns:
        stored = arrays[0].to_pylist()
        return [_objects([hll.EMPTY if d is None else hll.from_bytes(d) for d in stored])]

    def read(self, arrays: list[pa.Array]) -> Columns:
        lists = arrays[0]
        hashes = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)
        ends = np.cumsum(pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False))
        starts = [0, *ends[:-1].tolist()]
        return [_objects([hashes[a:b] for a, b in zip(starts, ends.tolist(), strict=True)])]

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        held, sketches = into[0], columns[0]
        few = np.array([hll.is_sparse(s) for s in sketches], np.bool_)
        for row in np.flatnonzero(~few):
            held[at[row]] = hll.merge(held[at[row]], sketches[row])
        if not few.any():
            return
        lengths = [len(s) for s in sketches[few]]
        group = np.repeat(at[few], lengths)
        hashes = np.concatenate(list(sketches[few]))
        ranked = np.lexsort((hashes, group))
        group, hashes = group[ranked], hashes[ranked]
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        for row, fresh in zip(group[starts], np.split(hashes, starts[1:]), strict=False):
            held[row] = hll.merge(held[row], hll.of_hashes(fresh))

    def store(self, columns: Columns) -> list[pa.Array]:
        return [pa.array([hll.to_bytes(s) for s in columns[0]], pa.binary())]


def _objects(values: list[Any]) -> Array:
    # Element by element: numpy would make a matrix of sketches of one length.
    array = np.empty(len(values), object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def round_to(value: decimal.Decimal, type_: pa.DataType) -> decimal.Decimal:
    """Round to the type's scale, as Spark rounds."""
    return _WIDE.quantize(value, decimal.Decimal(1).scaleb(-type_.scale))


def quotient(total: decimal.Decimal, count: int) -> decimal.Decimal:
    return _WIDE.divide(total, decimal.Decimal(count))
