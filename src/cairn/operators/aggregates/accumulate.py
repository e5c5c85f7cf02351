"""The accumulators of an aggregation: a struct of columns per key.

Types and nulls are Spark's: a count is never null, every other aggregate is null without values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.errors import PlanError
from cairn.operators.aggregates import hll
from cairn.operators.aggregates.edges import Edge, ValueBy
from cairn.operators.aggregates.objects import (
    ArrowExtreme,
    DecimalSum,
    Sketch,
    divide_decimals,
)
from cairn.operators.aggregates.parse import COUNT_DISTINCT, Call
from cairn.operators.aggregates.parts import (
    Array,
    Columns,
    Count,
    Extreme,
    Ints,
    Moments,
    Part,
    Sum,
)
from cairn.operators.aggregates.sets import DistinctCount, HeldExtreme
from cairn.operators.aggregates.signed import FloatSum
from cairn.types import type_ddl

NET_ROWS = "_rows"
"""Name of the aggregate with the rows that a key has left, where rows are taken back."""
SIGNED = ("count", "count(distinct ...)", "sum", "avg", "min", "max")
"""Functions that rows can be taken back from."""


@dataclass(frozen=True)
class Aggregate:
    """A call, its type in Spark, and its parts."""

    call: Call
    type: pa.DataType
    """Type of the result."""
    parts: tuple[Part, ...]

    @property
    def field(self) -> pa.Field:
        counts = self.call.function in ("count", COUNT_DISTINCT, "approx_count_distinct")
        return pa.field(self.call.name, self.type, nullable=not counts)


def make_aggregate(
    call: Call,
    argument_type: pa.DataType,
    type_: pa.DataType,
    *,
    is_timed: bool,
    by_type: pa.DataType | None = None,
    takes_back: bool = False,
) -> Aggregate:
    """Make an aggregate; `is_timed` if first and last go by event time.

    `by_type` is the type of the second argument of max_by and min_by. `takes_back`: rows may be
    taken back.
    """
    function = call.function
    parts: tuple[Part, ...]
    if takes_back:
        parts = _parts_with_sign(call, argument_type, type_)
    elif function == "count":
        parts = (Count(),)
    elif function == "sum":
        parts = (_sum(call, type_),)
    elif function == "avg":
        parts = (_sum(call, _average_sum(argument_type, type_)), Count())
    elif function in ("min", "max"):
        parts = (_extreme(call, type_, is_max=function == "max"),)
    elif function in ("first", "last"):
        parts = (Edge(type_, is_last=function == "last", is_timed=is_timed),)
    elif function in ("max_by", "min_by"):
        assert by_type is not None, f"{function} compares values"
        parts = (ValueBy(type_, by_type, is_max=function == "max_by"),)
    elif function == COUNT_DISTINCT:
        parts = (DistinctCount(argument_type),)
    elif function == "approx_count_distinct":
        parts = (Sketch(),)
    else:
        assert function.startswith(("stddev_", "var_")), f"{function} has no parts"
        parts = (Moments(),)
    return Aggregate(call, type_, parts)


def net_rows() -> Aggregate:
    """Return the count of rows less those taken back, which a key with changes keeps."""
    return Aggregate(Call(NET_ROWS, "count", None), pa.int64(), (Count(),))


def _parts_with_sign(call: Call, argument: pa.DataType, type_: pa.DataType) -> tuple[Part, ...]:
    """Return parts that rows can be taken back from."""
    function = call.function
    if function == "count":
        return (Count(),)
    if function == COUNT_DISTINCT:
        return (DistinctCount(argument),)
    if function in ("min", "max"):
        _extreme(call, type_, is_max=function == "max")
        return (HeldExtreme(type_, is_max=function == "max"),)
    if function in ("sum", "avg"):
        total = type_ if function == "sum" else _average_sum(argument, type_)
        part = FloatSum() if total == pa.float64() else _sum(call, total)
        # The sum of no values is null, so they are counted.
        return (part, Count())
    raise PlanError(
        f"aggregate {call.name!r}: {call.sql} of changes: rows cannot be taken back from it\n"
        f"  expected: {', '.join(SIGNED)}, because the stream has the column `_change`\n"
        "  next: use one of these, or keep the rows with `_change` = 1 and drop the column",
        column=call.name,
    )


def _sum(call: Call, type_: pa.DataType) -> Part:
    if pa.types.is_decimal(type_):
        return DecimalSum(type_)
    if type_ in (pa.int64(), pa.float64()):
        return Sum(type_)
    raise _unfit(call, type_, "a number")


def _average_sum(argument: pa.DataType, result: pa.DataType) -> pa.DataType:
    if not pa.types.is_decimal(result):
        return result
    return pa.decimal128(min(38, argument.precision + 10), argument.scale)


def _extreme(call: Call, type_: pa.DataType, *, is_max: bool) -> Part:
    is_ = pa.types
    if is_.is_string(type_) or is_.is_binary(type_) or is_.is_decimal(type_):
        return ArrowExtreme(type_, is_max=is_max)
    if is_.is_nested(type_) or is_.is_null(type_):
        raise _unfit(call, type_, "a number, a boolean, a time, text or bytes")
    return Extreme(type_, is_max=is_max)


def _unfit(call: Call, type_: pa.DataType, expected: str) -> PlanError:
    return PlanError(
        f"aggregate {call.name!r}: {call.sql} is {type_ddl(type_)}\n  expected: {expected}",
        column=call.name,
    )


class Accumulators:
    """The parts of several aggregates side by side."""

    def __init__(self, aggregates: Sequence[Aggregate]) -> None:
        self.aggregates = tuple(aggregates)
        self.parts = [part for aggregate in aggregates for part in aggregate.parts]
        self.fields = [
            pa.field(f"{aggregate.call.name}__{name}", type_)
            for aggregate in aggregates
            for part in aggregate.parts
            for name, type_ in zip(part.names, part.types, strict=True)
        ]
        self.named_parts = [(a.call.name, part) for a in aggregates for part in a.parts]
        names = [field.name for field in self.fields]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise PlanError(
                f"two aggregates keep state under the name {min(twice)!r}\n"
                "  next: give one of them another name"
            )

    def zeros(self, count: int) -> list[Columns]:
        return [part.zeros(count) for part in self.parts]

    def read(self, arrays: Sequence[pa.Array]) -> list[Columns]:
        """Return the columns of the partials that Spark sends."""
        rest = iter(arrays)
        return [part.read([next(rest) for _ in part.names]) for part in self.parts]

    def load(self, arrays: Sequence[pa.Array]) -> list[Columns]:
        """Return the columns of the fields in state; null for new keys."""
        rest = iter(arrays)
        return [part.load([next(rest) for _ in part.names]) for part in self.parts]

    def merge(self, into: list[Columns], at: Ints, columns: list[Columns]) -> None:
        """Merge row i of `columns` into row at[i]."""
        for part, held, fresh in zip(self.parts, into, columns, strict=True):
            part.merge(held, at, fresh)

    def merge_rows(self, at: Ints, count: int, columns: list[Columns]) -> list[Columns]:
        """Merge the rows of each number into one."""
        into = self.zeros(count)
        self.merge(into, at, columns)
        return into

    def take(self, columns: list[Columns], rows: Ints) -> list[Columns]:
        return [p.take(held, rows) for p, held in zip(self.parts, columns, strict=True)]

    def concat(self, first: list[Columns], second: list[Columns]) -> list[Columns]:
        return [p.concat(a, b) for p, a, b in zip(self.parts, first, second, strict=True)]

    def store(self, columns: list[Columns]) -> list[pa.Array]:
        return [
            array.cast(type_)
            for part, held in zip(self.parts, columns, strict=True)
            for array, type_ in zip(part.store(held), part.types, strict=True)
        ]

    def results(self, columns: list[Columns]) -> list[pa.Array]:
        """Return the result column of each aggregate."""
        rest = iter(zip(self.parts, columns, strict=True))
        return [
            _result(aggregate, [next(rest) for _ in aggregate.parts])
            for aggregate in self.aggregates
        ]


def _result(aggregate: Aggregate, held: list[tuple[Part, Columns]]) -> pa.Array:
    function, type_ = aggregate.call.function, aggregate.type
    part, columns = held[0]
    if isinstance(part, FloatSum):
        totals, n = part.total(columns), held[1][1][0]
        return pa.array(totals if function == "sum" else totals / np.maximum(n, 1), mask=n <= 0)
    if function == "sum" and len(held) == 2:
        n = held[1][1][0]
        return pc.if_else(pa.array(n > 0), part.store(columns)[0].cast(type_), None)
    if function == "avg":
        return _average(part, columns, held[1][1][0], type_)
    if function in ("first", "last"):
        return columns[2].cast(type_)
    if function in ("max_by", "min_by"):
        return columns[1].cast(type_)
    if function == "approx_count_distinct":
        return pa.array(hll.estimate(columns[0]))
    if isinstance(part, Moments):
        return _spread(function, *columns)
    return part.store(columns)[0].cast(type_)


def _average(part: Part, columns: Columns, n: Ints, type_: pa.DataType) -> pa.Array:
    if isinstance(part, DecimalSum):
        some = pc.if_else(pa.array(n > 0), columns[0], None)
        return divide_decimals(some, np.maximum(n, 1), type_)
    return pa.array(columns[0] / np.maximum(n, 1), mask=n <= 0)


def _spread(function: str, n: Array, mean: Array, m2: Array) -> pa.Array:
    degrees = n - 1 if function.endswith("_samp") else n
    values = m2 / np.maximum(degrees, 1)
    if function.startswith("stddev"):
        with np.errstate(invalid="ignore"):
            values = np.sqrt(values)
    return pa.array(values, mask=degrees <= 0)
