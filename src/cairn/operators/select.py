"""Columns and filters of a `.transform`, computed in the slot that has the rows.

Spark plans the transform. Where its plan only picks columns, renames them, and keeps rows by
comparing columns with each other or with constants, Arrow gives the same rows. They stay in
the process of the operator that emits them, where Spark would need two shuffles and one more
Python process per subtask.

Always true here:
- conditions have Spark's three values: a row is kept where they are true, not where they are null;
- nothing can fail on a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from cairn.functions import BatchContext, Hooks, PartialProcess

Values: TypeAlias = pa.Array | pa.Scalar


def _is_same(left: Values, right: Values) -> Values:
    """Return Spark's `<=>`: nulls are equal, and the result is never null."""
    nothing = pc.and_(pc.is_null(left), pc.is_null(right))
    return pc.or_(nothing, pc.fill_null(pc.equal(left, right), False))


CALLS: dict[str, Callable[..., Values]] = {
    "EqualTo": pc.equal,
    "EqualNullSafe": _is_same,
    "LessThan": pc.less,
    "LessThanOrEqual": pc.less_equal,
    "GreaterThan": pc.greater,
    "GreaterThanOrEqual": pc.greater_equal,
    "And": pc.and_kleene,
    "Or": pc.or_kleene,
    "Not": pc.invert,
    "IsNull": pc.is_null,
    "IsNotNull": pc.is_valid,
}
"""By the names that Spark has for them."""


@dataclass(frozen=True)
class Column:
    """A column of the rows, or a field within its structs, found by index."""

    path: tuple[int, ...]
    type: pa.DataType

    def read(self, batch: pa.RecordBatch) -> Values:
        first, *others = self.path
        found = batch.column(first)
        return pc.struct_field(found, others) if others else found


@dataclass(frozen=True)
class Constant:
    value: Any
    """As Arrow stores it: days, microseconds."""
    type: pa.DataType

    def read(self, batch: pa.RecordBatch) -> Values:
        if pa.types.is_timestamp(self.type):
            return pa.scalar(self.value, pa.int64()).cast(self.type)
        if pa.types.is_date(self.type):
            return pa.scalar(self.value, pa.int32()).cast(self.type)
        return pa.scalar(self.value, self.type)


@dataclass(frozen=True)
class Wider:
    """An integer in a type that has all values of its own."""

    of: Expression
    type: pa.DataType

    def read(self, batch: pa.RecordBatch) -> Values:
        return self.of.read(batch).cast(self.type)


@dataclass(frozen=True)
class Condition:
    name: str
    arguments: tuple[Expression, ...]

    @property
    def type(self) -> pa.DataType:
        return pa.bool_()

    def read(self, batch: pa.RecordBatch) -> Values:
        return CALLS[self.name](*(each.read(batch) for each in self.arguments))


Expression = Column | Constant | Wider | Condition


@dataclass(frozen=True)
class Selection:
    """Rows that meet all conditions, with these columns."""

    columns: tuple[Expression, ...]
    conditions: tuple[Expression, ...]

    @property
    def types(self) -> list[pa.DataType]:
        return [column.type for column in self.columns]

    def of(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        if self.conditions:
            masks = [condition.read(batch) for condition in self.conditions]
            mask = functools.reduce(pc.and_kleene, masks)
            if isinstance(mask, pa.Scalar):
                batch = batch if mask.as_py() else batch.slice(0, 0)
            else:
                batch = batch.filter(mask)
        arrays = []
        for column in self.columns:
            values = column.read(batch)
            if isinstance(values, pa.Scalar):
                values = pa.repeat(values, batch.num_rows)
            arrays.append(values)
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


class Select(Hooks, PartialProcess):
    """Emits the selected columns of the selected rows."""

    ignores_time: bool = True
    wants_order: bool = False

    def __init__(self, selection: Selection, schema: pa.Schema, time: str, shift_us: int) -> None:
        """`time` is the event time column of the result; "": none."""
        self.selection = selection
        self.schema = schema
        self.result_time = time
        self.result_shift_us = shift_us

    def with_selection(self, selection: Selection) -> Select:
        return Select(selection, self.schema, self.result_time or "", self.result_shift_us)

    def row_count(self, rows: pa.StructArray) -> int:
        return len(rows)

    def process(self, batch: pa.RecordBatch, ctx: BatchContext) -> pa.RecordBatch:
        return self.selection.of(batch, self.schema)
