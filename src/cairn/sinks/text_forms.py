"""Columns as text, for targets that know nothing else.

    boolean          true, false
    numbers          as short as reads back equal; nan, inf, -inf; decimals with their scale
    string, binary   as they are
    date             2026-01-31
    timestamp        2026-01-31T12:00:00.000000Z, in UTC; timestamp_ntz without the Z
    interval         microseconds
    nested           JSON: maps as objects, binary in base64, decimals as strings

Always true here:
- null stays null: it has no text;
- equal values have equal text, whatever batch they come in.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

_json = msgspec.json.Encoder()


def text_of(column: pa.Array) -> pa.BinaryArray:
    """The text of each value, in UTF-8."""
    return _text(column).cast(pa.binary())


def json_of(batch: pa.RecordBatch) -> pa.BinaryArray:
    """Each row as a JSON object."""
    return pa.array(map(_json.encode, batch.to_pylist(maps_as_pydicts="strict")), pa.binary())


def _text(column: pa.Array) -> Any:
    type = column.type
    if pt.is_nested(type):
        values = column.to_pylist(maps_as_pydicts="strict")
        return pa.array([None if v is None else _json.encode(v) for v in values], pa.binary())
    if pt.is_decimal(type):
        # Arrow writes small ones as 1E-7.
        return pa.array([None if v is None else f"{v:f}" for v in column.to_pylist()], pa.string())
    if pt.is_timestamp(type):
        return pc.strftime(column, "%Y-%m-%dT%H:%M:%SZ" if type.tz else "%Y-%m-%dT%H:%M:%S")
    if pt.is_duration(type):
        return column.cast(pa.int64()).cast(pa.string())
    return column if pt.is_binary(type) else column.cast(pa.string())
