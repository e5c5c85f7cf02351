"""Rows as JSON has them. Their types travel beside them: {"columns": [...], "rows": [...]}.

Always true here:
- a row is an object by column name, its values as `codec.json_values` writes them;
- types are told as Spark DDL.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from cairn.types import format_type
from cairn.types.codec.json_values import json_value


def json_rows(batch: pa.RecordBatch | pa.Table) -> list[dict[str, Any]]:
    names = batch.schema.names
    columns = [json_column(batch.column(at)) for at in range(len(names))]
    if not columns:
        return [{} for _ in range(batch.num_rows)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def json_columns(schema: pa.Schema) -> list[dict[str, str]]:
    """Return names and types of the columns."""
    return [{"name": field.name, "type": format_type(field.type)} for field in schema]


def json_column(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    try:
        return [json_value(value, column.type) for value in column.to_pylist()]
    except (ValueError, OverflowError):
        # Python has no year 0 and none after 9999; Arrow has, and timers may be set there.
        return [_far_value(value, column.type) for value in column]


def _far_value(value: pa.Scalar, type: pa.DataType) -> Any:
    try:
        return json_value(value.as_py(), type)
    except (ValueError, OverflowError):
        pass  # Some of it is: the rest is shown as ever.
    if pa.types.is_struct(type):
        return {f.name: _far_value(value[at], f.type) for at, f in enumerate(type)}
    if pa.types.is_map(type):
        parts = [json_column(value.values.field(at)) for at in (0, 1)]
        return [list(pair) for pair in zip(*parts, strict=True)]
    if pa.types.is_nested(type):
        return json_column(value.values)
    return str(value.cast(pa.string()))
