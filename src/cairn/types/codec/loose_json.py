"""Values without a declared type as JSON: results of aggregates, what two epochs differ in.

Always true here:
- the same value is written as `cairn.types.codec.json_values` writes it where a type is known;
- what comes out is JSON that every parser reads, whatever went in;
- pickled objects are never unpickled.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import math
from typing import Any

from cairn.types.codec.json_values import SAFE_INTEGER, interval_text

DEPTH_MAX = 50


def loose_json(value: Any, depth: int = 0) -> Any:
    """A Python value as JSON has it, by what it is."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -SAFE_INTEGER <= value <= SAFE_INTEGER else str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(bytes(value)).decode()
    if isinstance(value, dt.datetime):
        if value.tzinfo is None:
            return value.isoformat()
        return value.astimezone(dt.UTC).replace(tzinfo=None).isoformat() + "Z"
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return interval_text(value)
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if depth < DEPTH_MAX:
        return _nested(value, depth + 1)
    return str(value)


def _nested(value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        return [[loose_json(k, depth), loose_json(v, depth)] for k, v in value.items()]
    names = getattr(value, "_fields", None)
    if isinstance(value, tuple) and names is not None:
        parts = (loose_json(part, depth) for part in value)
        return dict(zip(names, parts, strict=True))
    if isinstance(value, list | tuple | set | frozenset):
        return [loose_json(part, depth) for part in value]
    return str(value)
