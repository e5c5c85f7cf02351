"""An output of an operator: Python rows in, Arrow batches of the declared schema out.

Always true here:
- rows leave in the order they came, in batches of bounded size;
- a row that does not fit the schema raises, with operator, row and field.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from types import GeneratorType, NoneType
from typing import Any

import pyarrow as pa

from cairn.errors import FunctionError
from cairn.types import type_ddl
from cairn.types.codec import Codec, ValueTypeError, codec

BATCH_ROWS_FIRST = 1024
BATCH_ROWS_MAX = 16 * 1024
BATCH_BYTES_TARGET = 16 * 1024 * 1024
PACK_ROWS = 2 * 1024
"""Rows that are encoded together: few enough to still be in the processor's caches."""

Target = Callable[[pa.RecordBatch], None]


def fit(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the same rows in the form that a consumer has declared.

    United streams may differ in the order of columns, Spark's rows in their time zone.
    """
    if batch.schema == schema:
        return batch
    columns = [batch[field.name].cast(field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class Outlet:
    """Collects what a function emits and passes it on by the batch."""

    def __init__(self, operator: str, tag: str | None, schema: pa.Schema) -> None:
        self.operator = operator
        self.tag = tag
        self.schema = schema
        self.targets: list[Target] = []
        self.rows: list[Any] = []
        self.rows_out = 0
        self.rows_max = BATCH_ROWS_FIRST
        """Emitted at once; follows the size of the rows, so that wide ones do not pile up."""
        self._packed: list[pa.RecordBatch] = []
        """Encoded rows that are not passed on yet; they come before `rows`."""
        self._packed_rows = 0
        self._names = schema.names
        self._codecs = [codec(field.type) for field in schema]

    def emit(self, row: Any) -> None:
        self.rows.append(row)
        if len(self.rows) >= self.rows_max:
            self.flush()

    def emit_all(self, where: str, result: Any) -> None:
        """Emit what a function returned, if it is not a plain tuple: a row or an iterable."""
        if type(result) is GeneratorType:
            for row in result:
                self.emit(row)
        elif isinstance(result, dict | tuple) or hasattr(result, "__dataclass_fields__"):
            self.rows.append(result)
        elif isinstance(result, str | bytes) or not isinstance(result, Iterable):
            raise TypeError(
                f"{where} returned {short(result)}; expected a row (tuple, dict, row object), "
                "an iterable of rows, or None"
            )
        else:
            for row in result:
                self.emit(row)

    @property
    def pack_rows(self) -> int:
        """The number of rows to emit before `pack` is called."""
        return min(PACK_ROWS, self.rows_max)

    def pack(self) -> None:
        """Encode the emitted rows; pass them on if there are enough of them."""
        rows = self.rows
        if not rows:
            return
        self._packed.append(self._encode(rows))
        self._packed_rows += len(rows)
        # Emptied in place: the hot loop holds on to the list's append.
        rows.clear()
        if self._packed_rows >= self.rows_max:
            self.flush()

    def flush(self) -> None:
        """Pass on everything that was emitted."""
        rows, packed = self.rows, self._packed
        if rows:
            packed.append(self._encode(rows))
            rows.clear()
        if not packed:
            return
        batch = packed[0] if len(packed) == 1 else pa.concat_batches(packed)
        self._packed, self._packed_rows = [], 0
        row_bytes = batch.nbytes / batch.num_rows + 1
        self.rows_max = max(1, min(BATCH_ROWS_MAX, int(BATCH_BYTES_TARGET / row_bytes)))
        self.pass_on(batch)

    def pass_on(self, batch: pa.RecordBatch) -> None:
        """Rows that are in Arrow already."""
        self.rows_out += batch.num_rows
        for target in self.targets:
            target(batch)

    def reset(self) -> None:
        self.rows.clear()
        self._packed, self._packed_rows = [], 0
        self.rows_out = 0
        # Reset in each attempt: output must be cut alike in every slot.
        self.rows_max = BATCH_ROWS_FIRST

    def _encode(self, rows: list[Any]) -> pa.RecordBatch:
        # Counted in lists: quicker than a set of the few that there are.
        if list(map(type, rows)).count(tuple) != len(rows):
            rows = [row if type(row) is tuple else self._as_tuple(row) for row in rows]
        width = len(self._names)
        if list(map(len, rows)).count(width) != len(rows):
            bad = next(row for row in rows if len(row) != width)
            raise self._misfit(bad, None, f"it has {len(bad)} values")
        if not width:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * len(rows), pa.struct([])))
        arrays = []
        # One list of all values, by row: its slices are the columns.
        flat: list[Any] = []
        deque(map(flat.extend, rows), maxlen=0)
        for at, (column, field) in enumerate(zip(self._codecs, self.schema, strict=True)):
            try:
                array = _encode_column(column, flat[at::width])
            except (ValueTypeError, TypeError, ValueError, OverflowError, pa.ArrowException):
                raise self._find_misfit(rows) from None
            if array.null_count and not field.nullable:
                raise self._find_misfit(rows)
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _as_tuple(self, row: Any) -> tuple[Any, ...]:
        """A dict, a named tuple or a dataclass, in the order of the schema."""
        if isinstance(row, dict):
            unknown = row.keys() - set(self._names)
            if unknown:
                raise self._misfit(row, sorted(map(str, unknown))[0], "no such field is declared")
            return tuple(map(row.get, self._names))
        if isinstance(row, tuple):
            fields = getattr(row, "__fields__", None) or getattr(row, "_fields", None)
            if fields and list(fields) != self._names and set(fields) == set(self._names):
                by_name = dict(zip(fields, row, strict=True))
                return tuple(by_name[name] for name in self._names)
            return tuple(row)
        if dataclasses.is_dataclass(row) and not isinstance(row, type):
            return self._as_tuple({f.name: getattr(row, f.name) for f in dataclasses.fields(row)})
        raise self._misfit(row, None, f"a {type(row).__name__} is not a row")

    def _find_misfit(self, rows: Iterable[tuple[Any, ...]]) -> FunctionError:
        for row in rows:
            for column, value, field in zip(self._codecs, row, self.schema, strict=True):
                if value is None:
                    if not field.nullable:
                        return self._misfit(row, field.name, "it is null and declared NOT NULL")
                    continue
                try:
                    column.encode([column.normalise(value)])
                except (ValueTypeError, TypeError, ValueError, OverflowError) as error:
                    if isinstance(error, ValueTypeError) and error.index is not None:
                        error = error.inner()  # Its place in the column of one we made up here.
                    path = getattr(error, "path", "")
                    return self._misfit(row, field.name + (f".{path}" if path else ""), str(error))
        raise AssertionError("rows that could not be encoded together can be encoded one by one")

    def _misfit(self, row: Any, field: str | None, why: str) -> FunctionError:
        where = f"operator {self.operator!r}" + (f", side output {self.tag!r}" if self.tag else "")
        declared = ", ".join(f"{f.name} {type_ddl(f.type)}" for f in self.schema)
        what = f"field {field!r}: {why}" if field else why
        return FunctionError(
            f"{where} emitted a row that does not fit its schema\n"
            f"  {what}\n  row: {short(row)}\n  expected: {declared}",
            operator=self.operator,
            row=short(row),
            field=field,
        )


def _encode_column(column: Codec, values: list[Any]) -> pa.Array:
    # Only values of the very class need no look of ours: left to itself, Arrow cuts 1.5 to 1
    # for a bigint and takes text for binary.
    if column.exact is not None:
        kinds = list(map(type, values))
        if kinds.count(column.exact) + kinds.count(NoneType) == len(kinds):
            return column.encode(values)
    normalise = column.normalise
    return column.encode([None if value is None else normalise(value) for value in values])


def short(value: Any, limit: int = 500) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
