"""Codecs that refuse, when a value is written, all that could not be stored later.

Most codecs leave what almost no value is, a number beyond 64 bits or half a character, to the
encoding of a whole column: looking at every value costs more than that. Then nobody knows
any more which row wrote it. Where a row must answer for what it writes, it is looked at.

Always true here:
- what a strict codec's `normalise` returns, `encode` takes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from cairn.codec.base import Codec, ValueTypeError, misfit
from cairn.types import OBJECT

_INT64_LIMIT = 1 << 63


@functools.cache
def strict(codec: Codec) -> Codec:
    """Return the same codec, but with a `normalise` that refuses what `encode` would refuse."""
    if not _is_loose(codec.type):
        return codec
    return dataclasses.replace(codec, normalise=_checked(codec), exact=None)


def _is_loose(type: Any) -> bool:
    """True if the codec of a type passes some values on that cannot be encoded."""
    if type is OBJECT:
        return False
    if pa.types.is_map(type):
        return _is_loose(type.key_type) or _is_loose(type.item_type)
    if pa.types.is_list(type):
        return _is_loose(type.value_type)
    if pa.types.is_struct(type):
        return any(_is_loose(field.type) for field in type)
    return bool(pa.types.is_int64(type) or pa.types.is_string(type) or pa.types.is_duration(type))


def _checked(codec: Codec) -> Callable[[Any], Any]:
    type, normalise, encode = codec.type, codec.normalise, codec.encode

    def integer(value: Any) -> int:
        number: int = normalise(value)
        if -_INT64_LIMIT <= number < _INT64_LIMIT:
            return number
        raise misfit(type, value, "out of range")

    def text(value: Any) -> str:
        found: str = normalise(value)
        if not found.isascii():
            try:
                found.encode()
            except UnicodeEncodeError as error:
                raise misfit(type, value, f"no text: {error.reason}") from None
        return found

    def other(value: Any) -> Any:
        found = normalise(value)
        try:
            encode([found])
        except (TypeError, ValueError, ArithmeticError, pa.ArrowException) as error:
            inner = error.inner() if isinstance(error, ValueTypeError) else None
            raise inner or misfit(type, value, str(error)) from None
        return found

    if pa.types.is_int64(type):
        return integer
    return text if pa.types.is_string(type) else other
