"""Values as JSON has them, and back, given their type.

JSON has fewer types than Arrow, and browsers fewer numbers than JSON:

    timestamp        "2024-01-01T00:00:00Z"; without a zone, without the Z
    decimal, large   text: an integer beyond 2**53 - 1 loses digits in a browser
    NaN, Infinity    text
    binary           base64
    interval         "PT1.5S"
    struct           an object; map: [[key, value], …], as its keys need not be text

Always true here:
- python_value(json_value(v, t), t) == v for every value of a declared type (lists are tuples);
- what comes out of json_value is JSON that every parser reads, no NaN in it;
- what does not fit its type is a QueryError that says what was expected and found.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import decimal
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from cairn.errors import QueryError
from cairn.types import OBJECT, shown_type
from cairn.types.codec.base import ValueTypeError
from cairn.types.codec.registry import codec

SAFE_INTEGER: Final = 2**53 - 1
"""The largest that a browser's numbers hold exactly, with all below it."""
_SECOND: Final = dt.timedelta(seconds=1)
_MICROSECOND: Final = dt.timedelta(microseconds=1)
_INTERVAL: Final = re.compile(r"(-?)PT([0-9]+)(?:\.([0-9]{1,6}))?S")
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,40}")
_is: Final = pa.types


def json_value(value: Any, type: Any) -> Any:
    """A Python value, as Arrow or a state's `get()` gives it, as JSON has it."""
    if value is None:
        return None
    if type is OBJECT:
        return repr(value)
    if _is.is_boolean(type) or _is_text(type):
        return value
    if _is.is_integer(type):
        return value if -SAFE_INTEGER <= value <= SAFE_INTEGER else str(value)
    if _is.is_floating(type):
        return value if math.isfinite(value) else _odd_number(value)
    if _is_bytes(type):
        return base64.b64encode(value).decode()
    if _is.is_decimal(type):
        return format(value, "f")
    if _is.is_timestamp(type):
        return _timestamp_text(value, type)
    if _is.is_duration(type):
        return interval_text(value)
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
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def python_value(json: Any, type: Any) -> Any:
    """The Python value of a type that JSON stands for. QueryError when it does not fit."""
    if json is None:
        return None
    try:
        converted = codec(type)
        value = converted.normalise(_parsed(json, type))
        converted.encode([value])  # Which is where numbers that are too large are found.
        return converted.restore(value)
    except (ValueTypeError, ValueError, OverflowError, ArithmeticError, RecursionError):
        raise misfit(json, type) from None


def text_value(text: str, type: Any) -> Any:
    """Like python_value, for what somebody typed: `true`, `42` and `1.5` need no quotes."""
    if _is.is_boolean(type):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise misfit(text, type)
    return python_value(text, type)


def misfit(json: Any, type: Any) -> QueryError:
    shown = repr(json)
    shown = shown if len(shown) <= 80 else shown[:79] + "…"
    ddl = shown_type(type)
    return QueryError(
        f"a value does not fit its type\n  expected: {ddl}{_example(type)}\n  found: {shown}\n"
        "  next: give a value of that type",
        expected=ddl,
    )


def _parsed(json: Any, type: Any) -> Any:
    """What the type's codec takes; it checks the rest."""
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
        raise ValueError("this is no JSON")
    if _is.is_decimal(type):
        # A float has been rounded already: its text is what was meant.
        number = decimal.Decimal(str(json))
        if not number.is_finite():
            raise ValueError("a decimal is finite")
        return number
    if _is.is_struct(type):
        return _parsed_struct(json, type)
    if _is.is_map(type):
        pairs = list(json.items()) if isinstance(json, dict) else json
        return {
            _hashable(_parsed(k, type.key_type)): _parsed(v, type.item_type)
            for k, v in _each(pairs)
        }
    if _is_list(type):
        return [_parsed(item, type.value_type) for item in _each(json)]
    if not isinstance(json, str):
        raise ValueError("expected text")
    return _parsed_text(json, type)


def _parsed_text(text: str, type: Any) -> Any:
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
                raise ValueError("it has a zone, the type has none")
            return found
        return found.replace(tzinfo=dt.UTC) if found.tzinfo is None else found
    if _is.is_duration(type):
        match = _INTERVAL.fullmatch(text)
        if match is None:
            raise ValueError("no interval")
        sign, seconds, fraction = match.groups()
        span = int(seconds) * _SECOND + int((fraction or "").ljust(6, "0")) * _MICROSECOND
        return -span if sign else span
    return text


def _parsed_struct(json: Any, type: Any) -> Any:
    names = [field.name for field in type]
    if isinstance(json, dict):
        unknown = [name for name in json if name not in names]
        if unknown:
            raise ValueError(f"no field {unknown[0]!r}")
        return tuple(_parsed(json.get(field.name), field.type) for field in type)
    parts = _each(json)
    if len(parts) != len(names):
        raise ValueError("another number of fields")
    return tuple(_parsed(part, field.type) for field, part in zip(type, parts, strict=True))


def _each(json: Any) -> list[Any]:
    if not isinstance(json, list):
        raise ValueError("expected an array")
    return json


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _odd_number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _timestamp_text(value: Any, type: pa.DataType) -> str:
    if not isinstance(value, dt.datetime):
        return str(value)
    if type.tz is None:
        return value.replace(tzinfo=None).isoformat()
    aware = value if value.tzinfo is not None else value.replace(tzinfo=dt.UTC)
    return aware.astimezone(dt.UTC).replace(tzinfo=None).isoformat() + "Z"


def interval_text(value: dt.timedelta) -> str:
    """In seconds, as ISO 8601 writes them."""
    micros = value // _MICROSECOND
    seconds, rest = divmod(abs(micros), 1_000_000)
    fraction = f".{rest:06d}".rstrip("0") if rest else ""
    return f"{'-' if micros < 0 else ''}PT{seconds}{fraction}S"


def _example(type: Any) -> str:
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


def _is_text(type: Any) -> bool:
    return bool(_is.is_string(type) or _is.is_large_string(type) or _is.is_string_view(type))


def _is_bytes(type: Any) -> bool:
    return bool(_is.is_binary(type) or _is.is_large_binary(type) or _is.is_binary_view(type))


def _is_list(type: Any) -> bool:
    return bool(_is.is_list(type) or _is.is_large_list(type))
