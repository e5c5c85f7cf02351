"""Columns as text, for targets that hold only text.

    boolean          true, false
    numbers          the shortest text that reads back equal; nan, inf, -inf; decimals with scale
    string, binary   as they are
    date             2026-01-31
    timestamp        2026-01-31T12:00:00.000000Z, in UTC; timestamp_ntz without the Z
    interval         microseconds
    nested, rows     JSON as Spark writes it (see `json_lines`)

Always true here:
- null stays null;
- equal values have equal text, in every batch.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from cairn.sinks.json_lines import as_text, json_values


def text_of(column: pa.Array) -> pa.BinaryArray:
    """Return the text of each value, in UTF-8."""
    return _text(column).cast(pa.binary())


def json_of(batch: pa.RecordBatch) -> pa.BinaryArray:
    """Return each row as a JSON object."""
    return pa.array(json_values(batch.to_struct_array()), pa.binary())


def _text(column: pa.Array) -> Any:
    type = column.type
    if pt.is_nested(type):
        return pa.array(json_values(column), pa.binary())
    if pt.is_decimal(type):
        # Arrow writes small ones as 1E-7.
        return pa.array([None if v is None else f"{v:f}" for v in column.to_pylist()], pa.string())
    if pt.is_timestamp(type):
        return as_text(column)
    if pt.is_duration(type):
        return column.cast(pa.int64()).cast(pa.string())
    return column if pt.is_binary(type) else column.cast(pa.string())
