"""Arrow values as JSON: lines that Spark reads back as the same rows, or single values.

    {"id":1,"at":"2026-01-31T10:00:00.000000Z","price":9.90,"raw":"AAE=","tags":["a"]}

Columns become Python values one column at a time. Arrow turns times into text; msgspec encodes
the rest, each row from a struct without a dict in between.

Always true here:
- a null in a row or a struct is left out, as in Spark; in a list it is null;
- timestamps are ISO 8601 in UTC with `Z`, or without a zone; binary is base64;
- a decimal is a number with all its digits; NaN and infinities are text, as in Spark;
- keys of maps are text, the same as that of the value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

Convert = Callable[[pa.Array], list[Any]]

_DAY_US: Final = 86_400_000_000
# msgspec writes the names of a struct as they are.
_ESCAPED: Final = re.compile(r'["\\\x00-\x1f]')

_json = msgspec.json.Encoder(decimal_format="number")


def why_not_json(type: pa.DataType) -> str | None:
    """Return why values of a type cannot be written, or None."""
    if pa.types.is_map(type):
        if not pa.types.is_string(type.key_type):
            return f"a map with keys of type {type.key_type}: in JSON they are strings"
        return why_not_json(type.item_type)
    if pa.types.is_list(type):
        return why_not_json(type.value_type)
    if pa.types.is_struct(type):
        found = (why_not_json(field.type) for field in type)
        return next((why for why in found if why is not None), None)
    return None


class LinesEncoder:
    """Encodes the batches of one schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self._make = _struct(list(schema))

    def encode(self, batch: pa.RecordBatch) -> bytes:
        return _json.encode_lines(self._make(batch.columns, batch.num_rows))


def json_values(array: pa.Array) -> list[bytes | None]:
    """Return each value as JSON; None for null."""
    values = _converter(array.type)(array)
    return [None if value is None else _json.encode(value) for value in values]


def _struct(fields: list[pa.Field]) -> Callable[[list[pa.Array], int], list[Any]]:
    """Return a function that makes one object per row from columns."""
    row = _row_class([field.name for field in fields])
    converters = [_converter(field.type) for field in fields]

    def make(columns: list[pa.Array], count: int) -> list[Any]:
        if not columns:
            return [row() for _ in range(count)]
        values = [convert(c) for convert, c in zip(converters, columns, strict=True)]
        return list(map(row, *values))

    return make


def _row_class(names: list[str]) -> Callable[..., Any]:
    """Return a function of values in the order of the names; nulls are not encoded."""
    if any(map(_ESCAPED.search, names)):
        return lambda *values: {
            name: value for name, value in zip(names, values, strict=True) if value is not None
        }
    made = [(f"f{i}", Any, None) for i in range(len(names))]
    rename = {f"f{i}": name for i, name in enumerate(names)}
    return msgspec.defstruct("Row", made, rename=rename, omit_defaults=True, gc=False)


@lru_cache(maxsize=256)
def _converter(type: pa.DataType) -> Convert:
    if pa.types.is_floating(type):
        return _floats
    if pa.types.is_timestamp(type) or pa.types.is_date(type):
        return lambda array: as_text(array).to_pylist()
    if pa.types.is_duration(type):
        return lambda array: [None if us is None else interval_text(us) for us in _ints(array)]
    if pa.types.is_struct(type):
        return _structs(type)
    if pa.types.is_map(type):
        return _maps(type)
    if pa.types.is_list(type):
        return _lists(type)
    return lambda array: array.to_pylist()


def _ints(array: pa.Array) -> list[Any]:
    counts: list[Any] = array.cast(pa.int64()).to_pylist()
    return counts


def _floats(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist()
    if pc.all(pc.is_finite(array)).as_py() in (True, None):
        return values
    return [v if v is None or math.isfinite(v) else float_text(v) for v in values]


def float_text(value: float) -> str:
    """Return NaN or an infinity as Spark writes it."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def as_text(array: pa.Array, *, separator: str = "T") -> pa.Array:
    """Return dates and timestamps in ISO 8601, with this between date and time."""
    if pa.types.is_date(array.type):
        return array.cast(pa.string())
    # Without the zone, Arrow's text is the time in UTC.
    text = array.cast(pa.timestamp("us")).cast(pa.string())
    if separator != " ":
        text = pc.replace_substring(text, " ", separator, max_replacements=1)
    if array.type.tz is None:
        return text
    return pc.binary_join_element_wise(text, "Z", "")


def interval_text(us: int) -> str:
    """Return a duration as Spark's day-time interval: days, then the time of day."""
    sign, us = ("-", -us) if us < 0 else ("", us)
    days, us = divmod(us, _DAY_US)
    seconds, us = divmod(us, 1_000_000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"INTERVAL '{sign}{days} {hours:02d}:{minutes:02d}:{seconds:02d}.{us:06d}' DAY TO SECOND"


def _structs(type: pa.DataType) -> Convert:
    make = _struct(list(type))

    def convert(array: pa.Array) -> list[Any]:
        rows = make([array.field(i) for i in range(type.num_fields)], len(array))
        if array.null_count == 0:
            return rows
        valid = array.is_valid().to_pylist()
        return [row if is_valid else None for row, is_valid in zip(rows, valid, strict=True)]

    return convert


def _lists(type: pa.DataType) -> Convert:
    values_of = _converter(type.value_type)

    def convert(array: pa.Array) -> list[Any]:
        offsets = array.offsets.to_pylist()
        first = offsets[0] if offsets else 0
        end = offsets[-1] if offsets else 0
        values = values_of(array.values.slice(first, end - first))
        valid = array.is_valid().to_pylist()
        return [
            values[offsets[i] - first : offsets[i + 1] - first] if is_valid else None
            for i, is_valid in enumerate(valid)
        ]

    return convert


def _maps(type: pa.DataType) -> Convert:
    keys_of, values_of = _converter(type.key_type), _converter(type.item_type)

    def convert(array: pa.Array) -> list[Any]:
        offsets = array.offsets.to_pylist()
        first = offsets[0] if offsets else 0
        length = (offsets[-1] if offsets else 0) - first
        keys = map(_key, keys_of(array.keys.slice(first, length)))
        values = values_of(array.items.slice(first, length))
        pairs = list(zip(keys, values, strict=True))
        valid = array.is_valid().to_pylist()
        return [
            dict(pairs[offsets[i] - first : offsets[i + 1] - first]) if is_valid else None
            for i, is_valid in enumerate(valid)
        ]

    return convert


def _key(value: Any) -> str:
    return value if isinstance(value, str) else _json.encode(value).decode().strip('"')
