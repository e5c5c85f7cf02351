"""Rows as JSON has them. Their types travel beside them: {"columns": [...], "rows": [...]}.

Always true here:
- a row is an object by column name, its values as `codec.json_values` writes them;
- types are told as Spark DDL.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa

from cairn.codec.json_values import json_value, python_value, text_value
from cairn.errors import PlanError
from cairn.types import type_ddl

__all__ = ["json_columns", "json_rows", "json_table", "json_value", "python_value", "text_value"]

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def json_rows(batch: pa.RecordBatch | pa.Table) -> list[dict[str, Any]]:
    """The rows of a batch, as objects."""
    names = batch.schema.names
    columns = [_json_column(batch.column(at)) for at in range(len(names))]
    if not columns:
        return [{} for _ in range(batch.num_rows)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def json_columns(schema: pa.Schema) -> list[dict[str, str]]:
    """What the columns are called, and their types."""
    return [{"name": field.name, "type": _ddl(field.type)} for field in schema]


def json_table(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> dict[str, Any]:
    """{"columns": [{"name", "type"}], "rows": [...]}."""
    rows = [row for batch in batches for row in json_rows(batch)]
    return {"columns": json_columns(schema), "rows": rows}


def _json_column(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    type = column.type
    try:
        values = column.to_pylist()
    except (ValueError, OverflowError):
        if not pa.types.is_timestamp(type):
            raise
        # Python has no year 0 and none after 9999; Arrow has, and timers may be set there.
        values = [_far_time(each) for each in column.cast(pa.int64()).to_pylist()]
    return [json_value(value, type) for value in values]


def _far_time(micros: int | None) -> Any:
    if micros is None:
        return None
    try:
        return _EPOCH + dt.timedelta(microseconds=micros)
    except OverflowError:
        return f"{micros} us since 1970"


def _ddl(type: pa.DataType) -> str:
    try:
        return type_ddl(type)
    except PlanError:
        return str(type)
