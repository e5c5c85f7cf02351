"""Arrow rows in the binary form that COPY reads, which takes the server half the time of text.

    a row      number of columns (int16), then for each column its length (int32) and its bytes
    null       the length -1, no bytes

Numbers are big-endian; times count from the year 2000. Columns of fixed width that hold no null
and stand side by side become one array of numpy records; Arrow joins those and the strings by row.

Always true here:
- the bytes depend on the rows and their order, not on how they were cut into batches;
- a value arrives as it was, or the batch is refused: by the server if a time is out of its range;
- the server reads binary values only in their own type, so a table with a column of another type
  gets text (see `copy`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.errors import EpochError
from cairn.sinks.json_lines import json_values
from cairn.sinks.postgres.copy import check_json_nul, nul_error

HEADER: Final = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
TRAILER: Final = b"\xff\xff"
"""A row that says it has -1 columns."""

_DAYS_TO_2000: Final = 10_957
_MICROSECONDS_TO_2000: Final = _DAYS_TO_2000 * 86_400_000_000


def _scalar(value: bytes) -> pa.Scalar:
    # `pa.scalar` imports pandas.
    starts = pa.py_buffer(np.array([0, len(value)], np.int64))
    array = pa.Array.from_buffers(pa.large_binary(), 1, [None, starts, pa.py_buffer(value)])
    return array[0]


_NULL: Final = _scalar(b"\xff\xff\xff\xff")
_EMPTY: Final = _scalar(b"")
_JSONB_VERSION: Final = _scalar(b"\x01")

Parts = list[tuple[str, Any]]
"""Fields of a record: the numpy type and the values, or one value for all rows."""

_NUMBERS: Final[dict[str, tuple[pa.DataType, str]]] = {
    "smallint": (pa.int16(), ">i2"),
    "integer": (pa.int32(), ">i4"),
    "bigint": (pa.int64(), ">i8"),
    "real": (pa.float32(), ">f4"),
    "double precision": (pa.float64(), ">f8"),
}
_TEXTS: Final = ("text", "character varying", "citext", "json")


@dataclass(frozen=True)
class Form:
    """A column is sent as parts of fixed width, or as binary values."""

    fixed: Callable[[pa.Array], Parts] | None = None
    values: Callable[[pa.Array, str], pa.Array] | None = None


def find_forms(schema: pa.Schema, types: Mapping[str, tuple[str, bool]]) -> list[Form] | None:
    """Return how each column is sent, or None if one of them has no binary form here.

    `types` has the type of each column in the table, and whether it is an enum. The columns fit.
    """
    forms = [_find_form(field.type, *types[field.name]) for field in schema]
    return None if None in forms else [form for form in forms if form is not None]


def _find_form(type: pa.DataType, in_table: str, is_enum: bool) -> Form | None:
    base = in_table.partition("(")[0]
    if pa.types.is_nested(type):
        return Form(values=_jsonb if base == "jsonb" else _json)
    if pa.types.is_string(type):
        return Form(values=_text) if is_enum or base in _TEXTS else None
    if pa.types.is_binary(type):
        return Form(values=lambda column, name: column.cast(pa.large_binary()))
    if pa.types.is_boolean(type):
        return Form(fixed=lambda column: [(">i4", 1), ("u1", _numbers(column, pa.uint8()))])
    if pa.types.is_date32(type):
        return Form(fixed=lambda column: [(">i4", 4), (">i4", _days(column))])
    if pa.types.is_timestamp(type):
        return Form(fixed=lambda column: [(">i4", 8), (">i8", _microseconds(column))])
    if pa.types.is_duration(type):
        # The fields of an interval are microseconds, days and months.
        return Form(fixed=lambda c: [(">i4", 16), (">i8", _numbers(c, pa.int64())), (">i8", 0)])
    if (pa.types.is_integer(type) or pa.types.is_floating(type)) and base in _NUMBERS:
        arrow, wire = _NUMBERS[base]
        width = np.dtype(wire).itemsize
        return Form(fixed=lambda column: [(">i4", width), (wire, _numbers(column, arrow))])
    return None


NUMBER_FORM: Final = Form(fixed=lambda c: [(">i4", 8), (">i8", _numbers(c, pa.int64()))])
"""The form of a bigint."""


def binary_rows(batch: pa.RecordBatch, forms: Sequence[Form]) -> bytes:
    """Return the rows in the order of the schema, for COPY … (FORMAT binary)."""
    rows = batch.num_rows
    joined: list[pa.Array] = []
    parts: Parts = [(">i2", batch.num_columns)]
    for form, column, name in zip(forms, batch.columns, batch.schema.names, strict=True):
        if form.fixed is not None and not column.null_count:
            parts += form.fixed(column)
        elif form.fixed is not None:
            joined += [_records(parts, rows)] if parts else []
            values = _records(form.fixed(column), rows)
            joined.append(pc.if_else(column.is_valid(), values, _NULL))
            parts = []
        else:
            assert form.values is not None
            values = form.values(column, name)
            lengths = pc.fill_null(pc.binary_length(values), -1)
            joined.append(_records([*parts, (">i4", lengths.to_numpy())], rows))
            joined.append(values)
            parts = []
    joined += [_records(parts, rows)] if parts else []
    if len(joined) == 1:
        text = joined[0]
    else:
        text = pc.binary_join_element_wise(
            *joined, _EMPTY, null_handling="replace", null_replacement=b""
        )
    return bytes(_bytes_of(text))


def _records(parts: Parts, rows: int) -> pa.Array:
    """Return an array that has for each row the bytes of these fields."""
    type = np.dtype([(f"f{i}", wire) for i, (wire, _) in enumerate(parts)])
    records = np.empty(rows, type)
    for i, (_, values) in enumerate(parts):
        records[f"f{i}"] = values
    starts = np.arange(rows + 1, dtype=np.int64) * type.itemsize
    buffers = [None, pa.py_buffer(starts), pa.py_buffer(records)]
    return pa.Array.from_buffers(pa.large_binary(), rows, buffers)


def _numbers(column: pa.Array, type: pa.DataType) -> Any:
    """Return the numbers, with 0 for null."""
    column = column.cast(type)
    return (pc.fill_null(column, 0) if column.null_count else column).to_numpy()


def _days(column: pa.Array) -> Any:
    return _since_2000(_numbers(column.cast(pa.int32()), pa.int64()), _DAYS_TO_2000, 32)


def _microseconds(column: pa.Array) -> Any:
    return _since_2000(_numbers(column, pa.int64()), _MICROSECONDS_TO_2000, 64)


def _since_2000(numbers: Any, start: int, bits: int) -> Any:
    # The lowest number stands for minus infinity.
    if len(numbers) and int(numbers.min()) - start <= -(1 << (bits - 1)):
        raise EpochError(
            "a time is too early for PostgreSQL\n"
            "  expected: from the year 4713 BC\n"
            "  next: filter such rows before the sink"
        )
    return numbers - start


def _text(column: pa.Array, name: str) -> pa.Array:
    values = column.cast(pa.large_string()).cast(pa.large_binary())
    if not _bytes_of(values).all():
        raise nul_error(name)
    return values


def _json(column: pa.Array, name: str) -> pa.Array:
    values = json_values(column)
    check_json_nul(values, name)
    return pa.array(values, pa.large_binary())


def _jsonb(column: pa.Array, name: str) -> pa.Array:
    return pc.binary_join_element_wise(_JSONB_VERSION, _json(column, name), _EMPTY)


def _bytes_of(column: pa.Array) -> Any:
    """Return the bytes of all values."""
    _, starts, data = column.buffers()
    if data is None:
        return np.empty(0, np.uint8)
    starts = np.frombuffer(starts, np.int64)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, np.uint8)[starts[0] : starts[-1]]
