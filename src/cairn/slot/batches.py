"""A function called by the batch, with Arrow in and Arrow out.

Spark hands over rows in small batches. A call costs some numpy calls whatever its size,
so rows are gathered until there are enough of them. Gathered rows of connected streams become one
call for each input that has rows, in the order in which the inputs are connected.

Always true here:
- how rows are cut into calls depends on the rows alone;
- a call has rows of one input, in the order in which they came;
- what leaves has the declared schema, in batches of bounded size;
- after `end_rows` nothing is held back.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cairn.errors import FunctionError
from cairn.functions import BatchProcess, hooks_of
from cairn.protocol.spec import InletSpec, OperatorSpec
from cairn.slot.context import SlotContext
from cairn.slot.outlet import Outlet
from cairn.slot.reader import split_lanes
from cairn.types import type_ddl

if TYPE_CHECKING:
    from cairn.slot.operator import Operator

CALL_ROWS_MAX = 256 * 1024
CALL_BYTES_TARGET = 64 << 20
EMIT_ROWS_MAX = 64 * 1024
EMIT_BYTES_TARGET = 16 << 20


class BatchInput:
    """An input of the operator: its gathered rows, and the method that they are passed to."""

    def __init__(self, spec: OperatorSpec, inlet: InletSpec, function: BatchProcess) -> None:
        self.inlet = inlet
        method = f"on_{inlet.name}" if inlet.name else "process"
        self.where = f"{method}()"
        self.handler = getattr(function, method)
        self._key_fields = spec.key_fields
        self._times: list[pa.Array] = []
        self._rows: list[pa.StructArray] = []

    def clear(self) -> None:
        self._times, self._rows = [], []

    def add(self, times: pa.Array | None, rows: pa.StructArray) -> None:
        self._rows.append(rows)
        if times is not None:
            self._times.append(times)

    def take(self) -> tuple[pa.Array | None, pa.StructArray] | None:
        """Return all gathered rows with their times; None without rows."""
        if not self._rows:
            return None
        taken = _concat(self._times) if self._times else None, _concat(self._rows)
        self.clear()
        return taken

    def keys(self, rows: pa.StructArray) -> pa.Array:
        """Return the key of each row, in the type in which all inputs compare their keys."""
        if not self.inlet.keys:
            return pa.nulls(len(rows))
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for name, field in zip(self.inlet.keys, self._key_fields, strict=True)
            for column in (rows.field(name),)
        ]
        if len(columns) == 1:
            return columns[0]
        return pa.StructArray.from_arrays(columns, fields=self._key_fields)


class BatchRunner:
    """Runs a BatchProcess."""

    def __init__(self, operator: Operator, function: BatchProcess) -> None:
        self._operator = operator
        self._function = function
        self.handles_late = hooks_of(function).handles_late
        operator.context.sides = {
            outlet.tag: partial(self._emit_side, outlet)
            for outlet in operator.outlets
            if outlet.tag is not None
        }
        spec = operator.spec
        self._inputs = [BatchInput(spec, inlet, function) for inlet in spec.row_inlets]
        self._is_connected = bool(spec.inlets[0].name)
        self._rows = 0
        self._rows_max = CALL_ROWS_MAX

    def reset(self) -> None:
        for each in self._inputs:
            each.clear()
        self._rows = 0
        self._rows_max = 0
        context = self._operator.context
        context.keys = context.times_us = None
        self._call("begin_epoch()", partial(self._function.begin_epoch, context))

    def begin_rows(self) -> None:
        pass

    def run(self, groups: pa.Array, times: pa.Array | None, rows: pa.StructArray) -> None:
        if not self._rows_max:
            row_bytes = rows.nbytes / len(rows) + 1
            self._rows_max = max(1, min(CALL_ROWS_MAX, int(CALL_BYTES_TARGET / row_bytes)))
        while len(rows):
            room = self._rows_max - self._rows
            part = rows.slice(0, room)
            self._gather(None if times is None else times.slice(0, room), part)
            self._rows += len(part)
            rows = rows.slice(room)
            times = None if times is None else times.slice(room)
            if self._rows >= self._rows_max:
                self.flush()

    def _gather(self, times: pa.Array | None, rows: pa.StructArray) -> None:
        if not self._is_connected:
            self._inputs[0].add(times, rows)
            return
        inlets = [each.inlet for each in self._inputs]
        for each, mine in zip(self._inputs, split_lanes(times, rows, inlets), strict=True):
            if mine is not None:
                each.add(*mine)

    def flush(self) -> None:
        """Call the function with what is gathered."""
        self._rows = 0
        for each in self._inputs:
            gathered = each.take()
            if gathered is not None:
                self._process(each, *gathered)

    def _process(self, input: BatchInput, times: pa.Array | None, rows: pa.StructArray) -> None:
        context, batch = self._batch(input, times, rows)
        self._call(input.where, partial(input.handler, batch, context))

    def _batch(
        self, input: BatchInput, times: pa.Array | None, rows: pa.StructArray
    ) -> tuple[SlotContext, pa.RecordBatch]:
        """Return the arguments of the function for some rows."""
        context = self._operator.context
        context.keys = input.keys(rows)
        context.times_us = times
        return context, pa.RecordBatch.from_struct_array(rows)

    def end_rows(self) -> None:
        self.flush()
        context = self._operator.context
        context.keys = context.times_us = None
        self._call("end_epoch()", partial(self._function.end_epoch, context))

    def _call(self, where: str, function: Any) -> None:
        operator = self._operator
        try:
            self._emit(operator.main, where, function())
        except FunctionError as error:
            raise operator.blame.place(error, where) from error
        except Exception as error:
            raise operator.blame.describe(where, error) from error

    def _emit_side(self, outlet: Outlet, batch: Any) -> None:
        self._emit(outlet, f"ctx.output({outlet.tag!r})", batch)

    def _emit(self, outlet: Outlet, where: str, result: Any) -> None:
        if result is None:
            return
        if isinstance(result, pa.RecordBatch):
            self._pass_on(outlet, _fit(outlet, result))
        elif isinstance(result, pa.Table):
            for batch in result.to_batches():
                self._pass_on(outlet, _fit(outlet, batch))
        elif isinstance(result, Iterable) and not isinstance(result, str | bytes | dict | tuple):
            for part in result:
                self._emit(outlet, where, part)
        else:
            raise TypeError(
                f"{where} gave a {type(result).__name__}; expected a pyarrow RecordBatch, a Table, "
                "an iterable of them, or None"
            )

    def _pass_on(self, outlet: Outlet, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        row_bytes = batch.nbytes / batch.num_rows + 1
        size = max(1, min(EMIT_ROWS_MAX, int(EMIT_BYTES_TARGET / row_bytes)))
        for start in range(0, batch.num_rows, size):
            outlet.pass_on(batch.slice(start, size))


def _concat(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _fit(outlet: Outlet, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch in the declared schema; its columns may come in any order."""
    schema = outlet.schema
    if batch.schema.equals(schema) and not any(
        not field.nullable and batch.column(at).null_count for at, field in enumerate(schema)
    ):
        return batch
    for name in batch.schema.names:
        if name not in schema.names or batch.schema.names.count(name) > 1:
            why = "no such field is declared" if name not in schema.names else "it is there twice"
            raise _misfit(outlet, name, why)
    columns = []
    for field in schema:
        if field.name not in batch.schema.names:
            raise _misfit(outlet, field.name, f"missing; found {', '.join(batch.schema.names)}")
        column = batch[field.name]
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except (pa.ArrowException, ValueError) as error:
                raise _misfit(outlet, field.name, f"{column.type} does not fit: {error}") from None
        if column.null_count and not field.nullable:
            raise _misfit(outlet, field.name, "it is null and declared NOT NULL")
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _misfit(outlet: Outlet, field: str, why: str) -> FunctionError:
    where = f"operator {outlet.operator!r}"
    if outlet.tag:
        where += f", side output {outlet.tag!r}"
    declared = ", ".join(f"{f.name} {type_ddl(f.type)}" for f in outlet.schema)
    return FunctionError(
        f"{where} emitted a batch that does not fit its schema\n"
        f"  field {field!r}: {why}\n  expected: {declared}",
        operator=outlet.operator,
        field=field,
    )
