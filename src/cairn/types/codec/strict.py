"""Codecs that refuse, when a value is written, all that could not be stored later.

Most codecs leave what almost no value is, a number beyond 64 bits or half a character, to the
encoding of a whole column: looking at every value costs more than that. Then nobody knows
any more which row wrote it. Where a row must answer for what it writes, it is looked at.

Always true here:
- what a strict codec's `normalise` returns, `encode` takes.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from cairn.types import OBJECT
from cairn.types.codec.base import Codec, ValueTypeError, misfit

_INT64_LIMIT = 1 << 63
_SPAN_MAX = dt.timedelta(microseconds=_INT64_LIMIT - 1)

Check = Callable[[Any], None]
"""Raises ValueTypeError for a normalised value that cannot be encoded."""


@functools.cache
def strict(codec: Codec) -> Codec:
    """Return the same codec, but with a `normalise` that refuses what `encode` would refuse."""
    check = _check(codec.type)
    if check is None:
        return codec
    return dataclasses.replace(codec, normalise=_with_check(codec, check), exact=None)


def _with_check(codec: Codec, check: Check) -> Callable[[Any], Any]:
    """The `normalise` of a codec, and after it a check."""
    normalise = codec.normalise

    # Numbers and text are what most rows write: without a second call for these.
    def integer(value: Any) -> Any:
        if value.__class__ is int and -_INT64_LIMIT <= value < _INT64_LIMIT:
            return value
        return other(value)

    def text(value: Any) -> Any:
        return value if value.__class__ is str and value.isascii() else other(value)

    def other(value: Any) -> Any:
        found = normalise(value)
        check(found)
        return found

    return {int: integer, str: text}.get(codec.exact, other)


def _check(type: Any) -> Check | None:
    """Return what is left to check of values of a type; None if nothing is."""
    if type is OBJECT:
        return None
    if pa.types.is_int64(type):
        return functools.partial(_check_integer, type)
    if pa.types.is_string(type):
        return functools.partial(_check_text, type)
    if pa.types.is_duration(type):
        return functools.partial(_check_span, type)
    if pa.types.is_struct(type):
        return _check_struct(type)
    if pa.types.is_list(type):
        return _check_list(type)
    return _check_map(type) if pa.types.is_map(type) else None


def _check_integer(type: Any, value: int) -> None:
    if not -_INT64_LIMIT <= value < _INT64_LIMIT:
        raise misfit(type, value, "out of range")


def _check_text(type: Any, value: str) -> None:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise misfit(type, value, f"no text: {error.reason}") from None


def _check_span(type: Any, value: dt.timedelta) -> None:
    if not -_SPAN_MAX <= value <= _SPAN_MAX:
        raise misfit(type, value, "out of range")


def _check_struct(type: pa.DataType) -> Check | None:
    found = [(at, _step(field.name), _check(field.type)) for at, field in enumerate(type)]
    checks = [(at, step, check) for at, step, check in found if check is not None]

    def check(value: Any) -> None:
        for at, step, check in checks:
            part = value[at]
            if part is not None:
                try:
                    check(part)
                except ValueTypeError as error:
                    raise error.within(step) from None

    return check if checks else None


def _step(name: str) -> str:
    return f".{name}" if name.isidentifier() else f"[{name!r}]"


def _check_list(type: pa.DataType) -> Check | None:
    check = _check(type.value_type)
    return None if check is None else functools.partial(_check_parts, check)


def _check_parts(check: Check, values: tuple[Any, ...]) -> None:
    for at, part in enumerate(values):
        if part is not None:
            try:
                check(part)
            except ValueTypeError as error:
                raise error.within(f"[{at}]") from None


def _check_map(type: pa.DataType) -> Check | None:
    of_key, of_item = _check(type.key_type), _check(type.item_type)

    def check(values: dict[Any, Any]) -> None:
        for key, item in values.items():
            if of_key is not None:
                of_key(key)
            if of_item is not None and item is not None:
                try:
                    of_item(item)
                except ValueTypeError as error:
                    raise error.within(f"[{key!r}]") from None

    return None if of_key is of_item is None else check
