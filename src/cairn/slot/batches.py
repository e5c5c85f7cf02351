"""A function called by the batch, with Arrow in and Arrow out.

Spark hands over rows in small batches. A call costs some numpy calls whatever its size,
so rows are gathered until there are enough of them.

Always true here:
- how rows are cut into calls depends on the rows alone;
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
from cairn.slot.context import SlotContext
from cairn.slot.outlet import Outlet
from cairn.types import type_ddl

if TYPE_CHECKING:
    from cairn.slot.operator import Operator

CALL_ROWS_MAX = 256 * 1024
CALL_BYTES_TARGET = 64 << 20
EMIT_ROWS_MAX = 64 * 1024
EMIT_BYTES_TARGET = 16 << 20


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
        self._gathered: list[tuple[pa.Array | None, pa.StructArray]] = []
        self._rows = 0
        self._rows_max = CALL_ROWS_MAX

    def reset(self) -> None:
        self._gathered.clear()
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
            self._gathered.append((None if times is None else times.slice(0, room), part))
            self._rows += len(part)
            rows = rows.slice(room)
            times = None if times is None else times.slice(room)
            if self._rows >= self._rows_max:
                self.flush()

    def flush(self) -> None:
        """Call the function with what is gathered."""
        if not self._gathered:
            return
        gathered, self._gathered, self._rows = self._gathered, [], 0
        times = [times for times, _ in gathered if times is not None]
        self._process(_concat(times) if times else None, _concat([rows for _, rows in gathered]))

    def _process(self, times: pa.Array | None, rows: pa.StructArray) -> None:
        context, batch = self._batch(times, rows)
        self._call("process()", partial(self._function.process, batch, context))

    def _batch(
        self, times: pa.Array | None, rows: pa.StructArray
    ) -> tuple[SlotContext, pa.RecordBatch]:
        """Return the arguments of the function for some rows."""
        context = self._operator.context
        context.keys = self._keys(rows)
        context.times_us = times
        return context, pa.RecordBatch.from_struct_array(rows)

    def end_rows(self) -> None:
        self.flush()
        context = self._operator.context
        context.keys = context.times_us = None
        self._call("end_epoch()", partial(self._function.end_epoch, context))

    def _keys(self, rows: pa.StructArray) -> pa.Array:
        spec = self._operator.spec
        columns = [rows.field(name) for name in spec.keys]
        if len(columns) == 1:
            return columns[0]
        return pa.StructArray.from_arrays(columns, fields=list(spec.key_type))

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
