"""Aggregate ahead in the slot: partials of the rows that an operator of the same slot emits.

Such rows are in columns already. Grouped here, they leave the slot as few partials, where they
would all go to Spark and through a shuffle to be grouped there.

Only arguments that are columns are computed here; Spark computes all other expressions.

Always true here:
- the columns are those of the grouped plan of `partial`, and merge to the same results;
- which rows are grouped together depends on the rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.functions import BatchContext, Hooks, PartialProcess
from cairn.operators.aggregates.accumulate import Aggregate
from cairn.operators.aggregates.edges import ValueBy
from cairn.operators.aggregates.grouping import first_rows, number_pairs, number_values
from cairn.operators.aggregates.objects import ArrowExtreme, DecimalSum
from cairn.operators.aggregates.parse import Call, find_column
from cairn.operators.aggregates.partial import Layout, Partials
from cairn.operators.aggregates.parts import (
    Count,
    Extreme,
    Part,
    Sum,
    plain,
    sum_overflow,
    validity,
)
from cairn.operators.aggregates.sets import SetPart
from cairn.operators.aggregates.signed import FloatSum
from cairn.types import type_ddl

_TIME = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class PaneTime:
    """The time of a partial: the start of its pane, or the event time of its rows."""

    column: str
    shift_us: int
    pane_us: int | None = None
    offset_us: int = 0

    def read(self, batch: pa.RecordBatch) -> pa.Array:
        times = batch[self.column]
        at = plain(times.cast(pa.int64())) + self.shift_us
        if self.pane_us is not None:
            at -= (at - self.offset_us) % self.pane_us
        mask = ~validity(times) if times.null_count else None
        return pa.array(at, mask=mask).cast(_TIME)


@dataclass(frozen=True)
class _PartColumns:
    """A part, the columns of its arguments, and the columns of its partials."""

    part: Part
    value: str | None
    """None: count(*)."""
    by: str | None
    names: tuple[str, ...]


class AggregateAhead(Hooks, PartialProcess):
    """Emits the partials of each batch."""

    ignores_time: bool = True
    wants_order: bool = False
    result_shift_us: int = 0

    def __init__(
        self,
        layout: Layout,
        schema: pa.Schema,
        parts: Sequence[_PartColumns],
        time: PaneTime | None,
        change: str | None,
    ) -> None:
        """`change` is the column with -1 in rows that are taken back."""
        self.schema = schema
        self.result_time = layout.time or ""
        self._layout = layout
        self._parts = parts
        self._time = time
        self._change = change

    def row_count(self, rows: pa.StructArray) -> int:
        return len(rows)

    def process(self, batch: pa.RecordBatch, ctx: BatchContext) -> pa.RecordBatch:
        layout = self._layout
        columns: dict[str, pa.Array] = {}
        if not layout.is_keyless:
            columns = {name: batch[name] for name in layout.keys}
        if self._time is not None:
            assert layout.time is not None, "partials have the time that is computed"
            columns[layout.time] = self._time.read(batch)
        for each in self._parts:
            if isinstance(each.part, SetPart):
                columns[each.names[0]] = _values(batch, each)
        at, count = np.zeros(batch.num_rows, np.int64), 1
        for column in columns.values():
            at, count = number_pairs(at, count, *number_values(column))
        first = pa.array(first_rows(at, count))
        made = {name: column.take(first) for name, column in columns.items()}
        if layout.is_keyless:
            (name,) = layout.keys
            made[name] = pa.array(np.ones(count, np.bool_))
        made[layout.count] = pa.array(np.bincount(at, minlength=count))
        weights = np.ones(batch.num_rows, np.int64)
        if self._change is not None:
            weights = plain(batch[self._change]).astype(np.int64)
        for each in self._parts:
            if each.names[0] in made:
                continue
            part = each.part
            merged = part.zeros(count)
            part.merge(merged, at, part.read(self._partials_of_rows(batch, each, weights)))
            for name, column, type_ in zip(
                each.names, part.store(merged), part.partial_types, strict=True
            ):
                made[name] = column.cast(type_)
        return pa.RecordBatch.from_arrays(
            [made[name] for name in self.schema.names], schema=self.schema
        )

    def _partials_of_rows(
        self, batch: pa.RecordBatch, each: _PartColumns, weights: np.typing.NDArray[np.int64]
    ) -> list[pa.Array]:
        """Return the columns of a part, of each row alone."""
        part = each.part
        if isinstance(part, Count):
            return [
                pa.array(weights if each.value is None else weights * validity(batch[each.value]))
            ]
        values = _values(batch, each)
        if isinstance(part, FloatSum):
            return _float_partials(values, weights)
        if isinstance(part, ValueBy):
            assert each.by is not None, "max_by compares values"
            return [batch[each.by], values]
        if self._change is not None and (weights < 0).any():
            back = pa.array(weights < 0)
            some = pc.if_else(back, values, pa.scalar(None, values.type))
            try:
                values = pc.if_else(back, pc.negate_checked(some), values)
            except pa.ArrowInvalid:
                raise sum_overflow(type_ddl(part.types[0])) from None
        return [values]


def _values(batch: pa.RecordBatch, each: _PartColumns) -> pa.Array:
    """Return the argument, in the type that the part merges."""
    assert each.value is not None, "only count(*) has no argument"
    (*_, type_) = each.part.partial_types
    if isinstance(each.part, FloatSum):
        type_ = pa.float64()
    # As Spark does: the nearest double of a large bigint.
    return batch[each.value].cast(type_, safe=False)


def _float_partials(values: pa.Array, weights: np.typing.NDArray[np.int64]) -> list[pa.Array]:
    numbers = plain(values)
    weights = np.where(validity(values), weights, 0)
    counted = [np.isnan(numbers), numbers == np.inf, numbers == -np.inf]
    finite = np.where(np.isfinite(numbers), numbers, 0.0) * weights
    return [pa.array(finite), *(pa.array(np.where(mask, weights, 0)) for mask in counted)]


def make_ahead(
    schema: pa.Schema,
    aggregates: Sequence[Aggregate],
    partials: Partials,
    time: PaneTime | None,
    change: str | None,
) -> AggregateAhead | None:
    """Return the function that makes these partials in a slot; None if only Spark can."""
    layout = partials.layout
    has_time = time is not None and pa.types.is_timestamp(schema.field(time.column).type)
    if layout.row is not None or (layout.time is not None and not has_time):
        return None
    names = iter(layout.parts)
    parts = []
    for aggregate in aggregates:
        for part in aggregate.parts:
            taken = tuple(next(names) for _ in part.names)
            made = _part_columns(schema, aggregate.call, part, taken)
            if made is None:
                return None
            parts.append(made)
    return AggregateAhead(
        layout, partials.schema, parts, time if layout.time is not None else None, change
    )


def _part_columns(
    schema: pa.Schema, call: Call, part: Part, names: tuple[str, ...]
) -> _PartColumns | None:
    if call.where is not None:
        return None
    value, by = find_column(schema, call.argument), find_column(schema, call.by)
    if isinstance(part, Count) and not isinstance(part, SetPart) and call.argument is None:
        return _PartColumns(part, None, None, names)
    if value is None or (call.by is not None and by is None):
        return None
    type_ = schema.field(value).type
    if isinstance(part, Sum | DecimalSum | FloatSum):
        is_number = pa.types.is_integer(type_) or pa.types.is_floating(type_)
        if not is_number and not pa.types.is_decimal(type_):
            return None
    elif not isinstance(part, Count | Extreme | ArrowExtreme | ValueBy | SetPart):
        return None
    return _PartColumns(part, value, by, names)
