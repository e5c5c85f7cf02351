"""Arrow rows as the text that COPY reads.

CSV is written column by column by Arrow itself: a null is nothing at all, a string is
always in quotes, so the empty string and null stay two things. What CSV has no form for
is turned into text first: binary into hex, durations into microseconds, nested values into JSON.

Always true here:
- the text depends on the rows and their order, not on how they were cut into batches;
- a value arrives as it was, NaN and infinities included, or the batch is refused;
- inside JSON, as with Spark's to_json: NaN and infinities are strings, binary is base64,
  keys of maps are strings.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from cairn.errors import EpochError

_OPTIONS = pa.csv.WriteOptions(include_header=False, quoting_style="needed")
_MICROSECOND = dt.timedelta(microseconds=1)


def csv_rows(batch: pa.RecordBatch) -> bytes:
    """The rows as CSV in the order of the schema, for COPY … (FORMAT csv)."""
    columns = [_writable(batch.column(i), batch.schema.names[i]) for i in range(batch.num_columns)]
    names = [str(i) for i in range(len(columns))]
    out = pa.BufferOutputStream()
    pa.csv.write_csv(pa.RecordBatch.from_arrays(columns, names), out, _OPTIONS)
    text: bytes = out.getvalue().to_pybytes()
    if b"\x00" in text:
        raise _nul_in(batch)
    return text


def is_nested(type: pa.DataType) -> bool:
    return bool(pa.types.is_nested(type))


def _writable(column: pa.Array, name: str) -> pa.Array:
    type = column.type
    if pa.types.is_binary(type) or pa.types.is_large_binary(type):
        return _hex(column)
    if pa.types.is_timestamp(type) and type.tz is not None:
        # Much faster than by the rules of a zone, which for UTC are none.
        text = column.cast(pa.timestamp("us", "UTC")).view(pa.timestamp("us")).cast(pa.string())
        return pc.binary_join_element_wise(text, pa.scalar("Z"), "")
    if pa.types.is_duration(type):
        microseconds = column.cast(pa.duration("us")).cast(pa.int64()).cast(pa.string())
        return pc.binary_join_element_wise(microseconds, pa.scalar(" microseconds"), "")
    if pa.types.is_decimal(type):
        return column.cast(pa.string())
    if is_nested(type):
        write = _json_writer(type, name)
        found = [None if value is None else write(value) for value in column.to_pylist()]
        return pa.array(found, pa.string())
    return column


def _hex(column: pa.Array) -> pa.Array:
    """bytea as PostgreSQL reads it: \\x and two digits for each byte."""
    column = column.cast(pa.large_binary())
    if column.offset:
        column = pa.concat_arrays([column])  # A copy that begins where its buffers do.
    valid, offsets, data = column.buffers()
    starts = np.frombuffer(offsets, np.int64, len(column) + 1)
    digits = b"" if data is None else memoryview(data)[starts[0] : starts[-1]].hex().encode()
    doubled = pa.py_buffer((starts - starts[0]) * 2)
    text = pa.Array.from_buffers(
        pa.large_string(), len(column), [valid, doubled, pa.py_buffer(digits)]
    )
    prefix = pa.scalar("\\x", pa.large_string())
    return pc.binary_join_element_wise(prefix, text, pa.scalar("", pa.large_string()))


def _nul_in(batch: pa.RecordBatch) -> EpochError:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
            continue
        if any(value is not None and "\x00" in value for value in column.to_pylist()):
            return _nul(name)
    raise AssertionError("only strings can hold NUL in CSV")


def _nul(name: str) -> EpochError:
    return EpochError(
        f"column {name!r}: a string holds the character NUL (\\x00), which PostgreSQL does not "
        "store\n  next: remove it before the sink, or make the column binary",
        column=name,
    )


# --- nested values as JSON --------------------------------------------------------------------


def _json_writer(type: pa.DataType, name: str) -> Callable[[Any], str]:
    """From a value of this type, as to_pylist gives it, to JSON; nulls are left to the caller."""

    def of_string(value: str) -> str:
        if "\x00" in value:
            raise _nul(name)
        return json.dumps(value, ensure_ascii=False)

    if pa.types.is_struct(type):
        fields = [(f.name, of_string(f.name) + ":", _json_writer(f.type, name)) for f in type]
        return lambda value: (
            "{" + ",".join(label + _or_null(w, value[n]) for n, label, w in fields) + "}"
        )
    if pa.types.is_map(type):
        key, item = _json_writer(type.key_type, name), _json_writer(type.item_type, name)

        def of_map(pairs: list[tuple[Any, Any]]) -> str:
            found = ((key(k), _or_null(item, v)) for k, v in pairs)
            return (
                "{"
                + ",".join(f"{k if k.startswith(chr(34)) else of_string(k)}:{v}" for k, v in found)
                + "}"
            )

        return of_map
    if pa.types.is_nested(type):
        element = _json_writer(type.value_type, name)
        return lambda values: "[" + ",".join(_or_null(element, v) for v in values) + "]"
    if pa.types.is_string(type) or pa.types.is_large_string(type):
        return of_string
    return _leaf


def _or_null(write: Callable[[Any], str], value: Any) -> str:
    return "null" if value is None else write(value)


def _leaf(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if math.isfinite(value):
            return repr(value)
        return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return '"' + base64.b64encode(value).decode() + '"'
    if isinstance(value, dt.timedelta):
        return f'"{value // _MICROSECOND} microseconds"'
    if isinstance(value, (dt.datetime, dt.date)):
        return '"' + value.isoformat() + '"'
    return str(value)
