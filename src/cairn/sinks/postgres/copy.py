"""Arrow rows as the text that COPY reads, for tables that cannot take them in binary form.

Arrow writes the CSV, column by column: a null is an empty field and a string is always in
quotes, so null and the empty string differ. Types without a CSV form become text first: binary
as hex, durations as microseconds, nested values as JSON (see `json_lines`).

Always true here:
- the text depends on the rows and their order, not on how they were cut into batches;
- a value arrives as it was, NaN and infinities included, or the batch is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from cairn.errors import EpochError
from cairn.sinks.json_lines import as_text, json_values

_OPTIONS: Final = pa.csv.WriteOptions(include_header=False, quoting_style="needed")
# The escape itself, not a backslash in the text followed by u0000.
_NUL_IN_JSON: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def csv_rows(batch: pa.RecordBatch) -> bytes:
    """Return the rows as CSV in the order of the schema, for COPY … (FORMAT csv)."""
    columns = [
        _make_writable(column, name)
        for column, name in zip(batch.columns, batch.schema.names, strict=True)
    ]
    names = [str(i) for i in range(len(columns))]
    out = pa.BufferOutputStream()
    pa.csv.write_csv(pa.RecordBatch.from_arrays(columns, names), out, _OPTIONS)
    text: bytes = out.getvalue().to_pybytes()
    if b"\x00" in text:
        raise _find_nul(batch)
    return text


def _make_writable(column: pa.Array, name: str) -> pa.Array:
    type = column.type
    if pa.types.is_binary(type) or pa.types.is_large_binary(type):
        return _hex(column)
    if pa.types.is_timestamp(type) and type.tz is not None:
        # PostgreSQL reads both forms, and Arrow writes this one in half the time.
        return as_text(column, separator=" ")
    if pa.types.is_duration(type):
        microseconds = column.cast(pa.duration("us")).cast(pa.int64()).cast(pa.string())
        return pc.binary_join_element_wise(microseconds, pa.scalar(" microseconds"), "")
    if pa.types.is_decimal(type):
        return column.cast(pa.string())
    if pa.types.is_nested(type):
        values = json_values(column)
        check_json_nul(values, name)
        return pa.array(values, pa.binary()).cast(pa.string())
    return column


def _hex(column: pa.Array) -> pa.Array:
    """Return binary as PostgreSQL reads it: \\x and two hex digits for each byte."""
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


def check_json_nul(values: Sequence[bytes | None], name: str) -> None:
    if any(value is not None and _NUL_IN_JSON.search(value) for value in values):
        raise nul_error(name)


def _find_nul(batch: pa.RecordBatch) -> EpochError:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
            continue
        if any(value is not None and "\x00" in value for value in column.to_pylist()):
            return nul_error(name)
    raise AssertionError("only strings can hold NUL in CSV")


def nul_error(name: str) -> EpochError:
    return EpochError(
        f"column {name!r}: a string holds the character NUL (\\x00), which PostgreSQL does not "
        "store\n  next: remove it before the sink, or make the column binary",
        column=name,
    )
