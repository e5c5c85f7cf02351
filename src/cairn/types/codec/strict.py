"""Codecs that refuse, when a value is written, everything that could not be stored later.

Most codecs leave rare misfits (a number beyond 64 bits, half a surrogate pair) to the encoding of
the whole column, because checking every value costs more. By then the row that wrote the value is
unknown. With dead letters the row must be known, so a strict codec checks each value.

Always true here:
- `encode` accepts every value that a strict codec's `normalise` returns.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from collections.abc import Callable

import pyarrow as pa

from cairn.types import OBJECT
from cairn.types.codec.core import (
    Codec,
    Convert,
    Datum,
    FrozenMap,
    ValueTypeError,
    field_step,
    misfit,
)

_INT64_LIMIT = 1 << 63
_SPAN_MAX = dt.timedelta(microseconds=_INT64_LIMIT - 1)

Check = Callable[[Datum], None]
"""Raises ValueTypeError for a normalised value that cannot be encoded."""


@functools.cache
def strict(codec: Codec) -> Codec:
    """Return the same codec, but with a `normalise` that refuses what `encode` would refuse."""
    check = _check(codec.type)
    if check is None:
        return codec
    return dataclasses.replace(codec, normalise=_with_check(codec, check), exact=None)


def _with_check(codec: Codec, check: Check) -> Convert:
    """Return a `normalise` that checks what the codec's own returns."""
    normalise = codec.normalise

    # Most rows write numbers and text: these need no second call.
    def integer(value: Datum) -> Datum:
        if value.__class__ is int and -_INT64_LIMIT <= value < _INT64_LIMIT:
            return value
        return other(value)

    def text(value: Datum) -> Datum:
        return value if value.__class__ is str and value.isascii() else other(value)

    def other(value: Datum) -> Datum:
        found = normalise(value)
        check(found)
        return found

    if codec.exact is int:
        return integer
    return text if codec.exact is str else other


def _check(type: pa.DataType) -> Check | None:
    """Return the check that values of a type still need; None if they need none."""
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


def _check_integer(type: pa.DataType, value: int) -> None:
    if not -_INT64_LIMIT <= value < _INT64_LIMIT:
        raise misfit(type, value, "out of range")


def _check_text(type: pa.DataType, value: str) -> None:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise misfit(type, value, f"it is not text: {error.reason}") from None


def _check_span(type: pa.DataType, value: dt.timedelta) -> None:
    if not -_SPAN_MAX <= value <= _SPAN_MAX:
        raise misfit(type, value, "out of range")


def _check_struct(type: pa.DataType) -> Check | None:
    found = [(at, field_step(field.name), _check(field.type)) for at, field in enumerate(type)]
    checks = [(at, step, check) for at, step, check in found if check is not None]

    def check(value: Datum) -> None:
        for at, step, check in checks:
            part = value[at]
            if part is not None:
                try:
                    check(part)
                except ValueTypeError as error:
                    raise error.within(step) from None

    return check if checks else None


def _check_list(type: pa.DataType) -> Check | None:
    check = _check(type.value_type)
    return None if check is None else functools.partial(_check_parts, check)


def _check_parts(check: Check, values: tuple[Datum, ...]) -> None:
    for at, part in enumerate(values):
        if part is not None:
            try:
                check(part)
            except ValueTypeError as error:
                raise error.within(f"[{at}]") from None


def _check_map(type: pa.DataType) -> Check | None:
    of_key, of_item = _check(type.key_type), _check(type.item_type)

    def check(values: FrozenMap) -> None:
        for key, item in values.items():
            if of_key is not None:
                of_key(key)
            if of_item is not None and item is not None:
                try:
                    of_item(item)
                except ValueTypeError as error:
                    raise error.within(f"[{key!r}]") from None

    return None if of_key is of_item is None else check
