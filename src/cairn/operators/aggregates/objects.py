"""Parts that are not plain numbers: text, bytes and decimals in Arrow arrays, and sketches."""

from __future__ import annotations

import decimal

import numpy as np
import pyarrow as pa

from cairn.operators.aggregates import hll
from cairn.operators.aggregates.ordering import choose_extremes
from cairn.operators.aggregates.parts import Columns, Ints, Part, join_rows, sum_overflow, validity
from cairn.types import type_ddl

_WIDE = decimal.Context(prec=100, rounding=decimal.ROUND_HALF_UP)
_WORD_MAX = (1 << 63) - 1


class _OneArray(Part):
    """One column, an Arrow array; null for none."""

    def __init__(self, type_: pa.DataType) -> None:
        self.type = type_

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (self.type,)

    def zeros(self, count: int) -> Columns:
        return [pa.nulls(count, self.type)]

    def load(self, arrays: list[pa.Array]) -> Columns:
        return [arrays[0].cast(self.type)]

    def store(self, columns: Columns) -> list[pa.Array]:
        return columns


class ArrowExtreme(_OneArray):
    """Minimum or maximum of text, bytes or decimals."""

    def __init__(self, type_: pa.DataType, *, is_max: bool) -> None:
        super().__init__(type_)
        self.is_max = is_max
        self.names = ("max" if is_max else "min",)

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        held, values = into[0], columns[0]
        count = len(held)
        fresh = choose_extremes(values, at, count, is_max=self.is_max)
        some = np.flatnonzero(fresh >= 0)
        if not len(some):
            return
        both = join_rows(held, values.take(pa.array(fresh[some])))
        numbers = np.concatenate([np.arange(count), some])
        found = choose_extremes(both, numbers, count, is_max=self.is_max)
        into[0] = both.take(pa.array(found, mask=found < 0))


class DecimalSum(_OneArray):
    """Exact sum; `type` is its type."""

    names = ("sum",)

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        held = into[0]
        # Wide enough for the sum of any number of rows.
        wide = pa.decimal256(76, self.type.scale)
        numbers = pa.array(np.concatenate([np.arange(len(held)), at]))
        table = pa.table({"at": numbers, "v": join_rows(held.cast(wide), columns[0])})
        # Groups come in the order of their first rows, which are those in state.
        sums = table.group_by("at", use_threads=False).aggregate([("v", "sum")])["v_sum"]
        try:
            into[0] = sums.cast(self.type).combine_chunks()
        except pa.ArrowInvalid:
            raise sum_overflow(type_ddl(self.type)) from None


class Sketch(Part):
    """A sketch of the hashes so far; Spark sends the hashes."""

    names = ("sketch",)
    types = (pa.binary(),)
    partial_types = (pa.list_(pa.field("element", pa.int64())),)

    def zeros(self, count: int) -> Columns:
        return [hll.no_values(count)]

    def load(self, arrays: list[pa.Array]) -> Columns:
        return [hll.from_binary(arrays[0])]

    def read(self, arrays: list[pa.Array]) -> Columns:
        return [hll.from_lists(arrays[0])]

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        into[0] = hll.merge(into[0], at, columns[0])

    def store(self, columns: Columns) -> list[pa.Array]:
        return [hll.to_binary(columns[0])]

    def take(self, columns: Columns, rows: Ints) -> Columns:
        return [hll.take(columns[0], rows)]

    def concat(self, first: Columns, second: Columns) -> Columns:
        return [hll.concat(first[0], second[0])]


def divide_decimals(totals: pa.Array, counts: Ints, type_: pa.DataType) -> pa.Array:
    """Return totals over counts, rounded half up to the type's scale as Spark rounds."""
    if not len(totals):
        return pa.array([], type_)
    up = type_.scale - totals.type.scale
    words = np.frombuffer(totals.buffers()[1], np.int64).reshape(-1, 2)
    low, high = words[totals.offset : totals.offset + len(totals)].T
    seen = validity(totals)
    low, high = np.where(seen, low, 0), np.where(seen, high, 0)
    limit = _WORD_MAX // (2 * 10 ** max(up, 0)) - int(counts.max(initial=0)) - 1
    if up < 0 or (high != low >> 63).any() or (np.abs(low) > limit).any():
        values = [
            None if total is None else _round_to(_quotient(total, count), type_)
            for total, count in zip(totals.to_pylist(), counts.tolist(), strict=True)
        ]
        return pa.array(values, type_)
    n = np.maximum(counts, 1)
    quotients = (2 * np.abs(low) * 10**up + n) // (2 * n) * np.sign(low)
    found = np.column_stack([quotients, quotients >> 63])
    mask = None if seen.all() else pa.py_buffer(np.packbits(seen, bitorder="little"))
    return pa.Array.from_buffers(type_, len(totals), [mask, pa.py_buffer(found)])


def _round_to(value: decimal.Decimal, type_: pa.DataType) -> decimal.Decimal:
    return _WIDE.quantize(value, decimal.Decimal(1).scaleb(-type_.scale))


def _quotient(total: decimal.Decimal, count: int) -> decimal.Decimal:
    return _WIDE.divide(total, decimal.Decimal(count))
