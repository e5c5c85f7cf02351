"""Values as JSON, and back.

JSON has fewer types than Arrow, and browsers fewer numbers than JSON:

    timestamp        "2024-01-01T00:00:00Z"; without a zone, without the Z
    decimal, large   text: an integer beyond 2**53 - 1 loses digits in a browser
    NaN, Infinity    text
    binary           base64
    interval         "PT1.5S"
    struct           an object; map: [[key, value], …], as its keys need not be text

`json_value` writes a value of a declared type. `loose_json` writes a value whose type is not
declared (the result of an aggregate, a difference between two epochs) by its Python class.

Always true here:
- python_value(json_value(v, t), t) == v for every value of a declared type (lists are tuples);
- every JSON parser reads the result: it has no NaN;
- pickled objects are never unpickled;
- a value that does not fit its type is a QueryError with what was expected and found.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import decimal
import math
import re
from collections.abc import Mapping
from typing import Final, TypeAlias

import pyarrow as pa

from cairn.errors import QueryError
from cairn.types import OBJECT, format_type
from cairn.types.codec.core import Datum, ValueTypeError
from cairn.types.codec.registry import codec

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

SAFE_INTEGER: Final = 2**53 - 1
"""Browsers hold integers up to this exactly."""
_DEPTH_MAX: Final = 50
_SECOND: Final = dt.timedelta(seconds=1)
_MICROSECOND: Final = dt.timedelta(microseconds=1)
_INTERVAL: Final = re.compile(r"(-?)PT([0-9]+)(?:\.([0-9]{1,6}))?S")
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,40}")
_is: Final = pa.types
# Their class alone says how they are written.
_SCALARS: Final = {bool, int, float, str, bytes, decimal.Decimal, dt.date, dt.timedelta}


def json_value(value: Datum, type: pa.DataType) -> Json:
    """Return the JSON of a value, given as Arrow or a state's `get()` returns it."""
    if value is None:
        return None
    if type is OBJECT:
        return repr(value)
    if value.__class__ in _SCALARS:
        return loose_json(value)
    if _is.is_struct(type):
        parts = value.values() if isinstance(value, Mapping) else value
        return {
            field.name: json_value(part, field.type)
            for field, part in zip(type, parts, strict=True)
        }
    if _is.is_map(type):
        pairs = value.items() if isinstance(value, Mapping) else value
        return [[json_value(k, type.key_type), json_value(v, type.item_type)] for k, v in pairs]
    if _is_list(type):
        return [json_value(item, type.value_type) for item in value]
    if _is.is_dictionary(type):
        return json_value(value, type.value_type)
    if _is.is_timestamp(type) and isinstance(value, dt.datetime):
        if type.tz is None:
            value = value.replace(tzinfo=None)
        elif value.tzinfo is None:
            value = value.replace(tzinfo=dt.UTC)
    return loose_json(value)


def loose_json(value: object, depth: int = 0) -> Json:
    """Return the JSON of a value by its Python class."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -SAFE_INTEGER <= value <= SAFE_INTEGER else str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(dt.UTC).replace(tzinfo=None).isoformat() + "Z"
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return _interval_text(value)
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    return _loose_nested(value, depth + 1) if depth < _DEPTH_MAX else str(value)


def _loose_nested(value: object, depth: int) -> Json:
    if isinstance(value, dict):
        return [[loose_json(k, depth), loose_json(v, depth)] for k, v in value.items()]
    if not isinstance(value, list | tuple | set | frozenset):
        return str(value)
    parts = [loose_json(part, depth) for part in value]
    names = getattr(value, "_fields", None)
    return parts if names is None else dict(zip(names, parts, strict=True))


def _interval_text(value: dt.timedelta) -> str:
    micros = value // _MICROSECOND
    seconds, rest = divmod(abs(micros), 1_000_000)
    fraction = f".{rest:06d}".rstrip("0") if rest else ""
    return f"{'-' if micros < 0 else ''}PT{seconds}{fraction}S"


def python_value(json: Json, type: pa.DataType) -> Datum:
    """Return the value of a type that JSON stands for; QueryError if it does not fit."""
    if json is None:
        return None
    try:
        converted = codec(type)
        value = converted.normalise(_parse(json, type))
        converted.encode([value])  # Refuses numbers that are too large.
        return converted.restore(value)
    except (ValueTypeError, ValueError, OverflowError, ArithmeticError, RecursionError):
        raise misfit(json, type) from None


def text_value(text: str, type: pa.DataType) -> Datum:
    """Return the value of a type that was typed: `true`, `42` and `1.5` need no quotes."""
    if _is.is_boolean(type):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise misfit(text, type)
    return python_value(text, type)


def misfit(json: Json, type: pa.DataType) -> QueryError:
    shown = repr(json)
    shown = shown if len(shown) <= 80 else shown[:79] + "…"
    ddl = format_type(type)
    return QueryError(
        f"a value does not fit its type\n  expected: {ddl}{_example(type)}\n  found: {shown}\n"
        "  next: give a value of that type",
        expected=ddl,
    )


def _parse(json: Datum, type: pa.DataType) -> Datum:
    """Return a value that the type's codec accepts or refuses."""
    if json is None:
        return None
    if type is OBJECT:
        raise ValueError("objects cannot be given as JSON")
    if _is.is_integer(type):
        if isinstance(json, str) and _INTEGER.fullmatch(json):
            return int(json)
        return json
    if _is.is_floating(type):
        return float(json) if isinstance(json, str | int) and not isinstance(json, bool) else json
    if _is.is_boolean(type):
        return json
    if not isinstance(json, str | list | dict | int | float):
        raise ValueError("not JSON")
    if _is.is_decimal(type):
        # A float is rounded already: its text is the number that was meant.
        number = decimal.Decimal(str(json))
        if not number.is_finite():
            raise ValueError("a decimal is finite")
        return number
    if _is.is_struct(type):
        return _parse_struct(json, type)
    if _is.is_map(type):
        pairs = list(json.items()) if isinstance(json, dict) else json
        return {
            _hashable(_parse(k, type.key_type)): _parse(v, type.item_type) for k, v in _each(pairs)
        }
    if _is_list(type):
        return [_parse(item, type.value_type) for item in _each(json)]
    if not isinstance(json, str):
        raise ValueError("expected text")
    return _parse_text(json, type)


def _parse_text(text: str, type: pa.DataType) -> Datum:
    if _is_bytes(type):
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(str(error)) from None
    if _is.is_date(type):
        return dt.date.fromisoformat(text)
    if _is.is_timestamp(type):
        found = dt.datetime.fromisoformat(text)
        if type.tz is None:
            if found.tzinfo is not None:
                raise ValueError("it has a zone, the type does not")
            return found
        return found.replace(tzinfo=dt.UTC) if found.tzinfo is None else found
    if _is.is_duration(type):
        match = _INTERVAL.fullmatch(text)
        if match is None:
            raise ValueError("not an interval")
        sign, seconds, fraction = match.groups()
        span = int(seconds) * _SECOND + int((fraction or "").ljust(6, "0")) * _MICROSECOND
        return -span if sign else span
    return text


def _parse_struct(json: Datum, type: pa.DataType) -> tuple[Datum, ...]:
    names = [field.name for field in type]
    if isinstance(json, dict):
        unknown = [name for name in json if name not in names]
        if unknown:
            raise ValueError(f"no field {unknown[0]!r}")
        return tuple(_parse(json.get(field.name), field.type) for field in type)
    parts = _each(json)
    if len(parts) != len(names):
        raise ValueError("another number of fields")
    return tuple(_parse(part, field.type) for field, part in zip(type, parts, strict=True))


def _each(json: Datum) -> list[Datum]:
    if not isinstance(json, list):
        raise ValueError("expected an array")
    return json


def _hashable(value: Datum) -> Datum:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _example(type: pa.DataType) -> str:
    if type is OBJECT:
        return ""
    if _is.is_timestamp(type):
        return ', such as "2024-01-31T12:00:00' + ('Z"' if type.tz else '"')
    if _is.is_date(type):
        return ', such as "2024-01-31"'
    if _is_bytes(type):
        return " in base64"
    if _is.is_duration(type):
        return ', such as "PT1.5S"'
    if _is.is_map(type):
        return " as [[key, value], …]"
    return ""


def _is_bytes(type: pa.DataType) -> bool:
    return bool(_is.is_binary(type) or _is.is_large_binary(type) or _is.is_binary_view(type))


def _is_list(type: pa.DataType) -> bool:
    return bool(_is.is_list(type) or _is.is_large_list(type))
