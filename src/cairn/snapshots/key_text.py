"""Parse a key from a command line or a url.

A key of one column is plain text: alice, 42, 2024-01-31. A JSON array with a value per column
always works: ["alice", 3]. It is needed for null, and for a text that itself looks like such an
array: ["[\\"alice\\"]"].

Always true here:
- text that does not fit the types of the key columns is a QueryError, never another key.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from cairn.errors import QueryError
from cairn.types import type_ddl
from cairn.types.codec.json_values import python_value, text_value

TEXT_CHARS_MAX = 1 << 16


def parse_key(text: str, names: list[str], types: list[pa.DataType]) -> tuple[Any, ...]:
    """Return the values of the key columns."""
    expected = ", ".join(f"{n} {type_ddl(t)}" for n, t in zip(names, types, strict=True))
    if len(text) > TEXT_CHARS_MAX:
        raise QueryError(
            f"a key of {len(text)} characters is too long\n  expected: at most {TEXT_CHARS_MAX}\n"
            "  next: read the state as a table, and filter it"
        )
    parts = _array(text)
    if parts is not None and len(parts) == len(types):
        return tuple(python_value(part, type) for part, type in zip(parts, types, strict=True))
    if len(types) == 1:
        type = types[0]
        if pa.types.is_nested(type):
            return (python_value(_json(text, expected), type),)
        return (text_value(text, type),)
    found = f"{len(parts)} values" if parts is not None else _shorten(text)
    raise QueryError(
        f"this key has {len(types)} columns\n  expected: {expected}\n  found: {found}\n"
        "  next: give a JSON array with a value for each, such as '[\"a\", 3]'",
        expected=expected,
    )


def _array(text: str) -> list[Any] | None:
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _json(text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise QueryError(
            f"a key of this type is given as JSON\n  expected: {expected}\n"
            f"  found: {_shorten(text)}\n  next: give a JSON array with one value",
            expected=expected,
        ) from None


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:79] + "…")
