"""Codecs of types without parts: numbers, text, times, and pickled objects."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import io
import math
import pickle
import struct
from typing import Any, Final

import numpy as np
import pyarrow as pa

from cairn.types import OBJECT, type_ddl
from cairn.types.codec.core import (
    Codec,
    Convert,
    Datum,
    Numbers,
    Read,
    Values,
    ValueTypeError,
    Write,
    builtin_type,
    cast_to,
    integers,
    leaf,
    misfit,
    put_nulls,
    write_leaf,
    write_numbers,
)

UTC = dt.UTC
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_NTZ = dt.datetime(1970, 1, 1)
_EPOCH_ORDINAL = dt.date(1970, 1, 1).toordinal()
_INT64_LIMIT = 1 << 63
_US_MIN = (dt.datetime.min - _EPOCH_NTZ) // dt.timedelta(microseconds=1)
_US_MAX = (dt.datetime.max - _EPOCH_NTZ) // dt.timedelta(microseconds=1)


def plain_codec(type: pa.DataType) -> Codec:
    """Return the codec of boolean, string or binary: Python has the same type."""
    exact: builtin_type = {pa.bool_(): bool, pa.string(): str, pa.binary(): bytes}[type]
    also = {bool: (np.bool_,), str: (str,), bytes: (bytes, bytearray, memoryview)}[exact]

    def normalise(value: object) -> Datum:
        if value.__class__ is exact:
            return value
        if isinstance(value, also):
            return exact(value)
        raise misfit(type, value)

    def read(array: pa.Array) -> Values:
        values: Values = cast_to(type, array).to_numpy(zero_copy_only=False).tolist()
        return values

    return leaf(type, normalise, read, exact=exact, blank=exact())


def integer_codec(type: pa.DataType) -> Codec:
    limit = 1 << (type.bit_width - 1)

    def convert(value: object) -> int:
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            return int(value)
        raise misfit(type, value)

    def normalise_long(value: object) -> int:
        # The range of 64 bits is left to encode: almost no value comes near it.
        return value if value.__class__ is int else convert(value)

    def normalise_short(value: object) -> int:
        number = value if value.__class__ is int else convert(value)
        if -limit <= number < limit:
            return number
        raise misfit(type, value, "out of range")

    def read(array: pa.Array) -> Values:
        array = cast_to(type, array)
        values: Values = array.to_pylist() if array.null_count else array.to_numpy().tolist()
        return values

    if type.bit_width == 64:
        write = write_numbers(type, "q")
        return leaf(type, normalise_long, read, write=write, exact=int, blank=0)
    return leaf(type, normalise_short, read, blank=0)


def floating_codec(type: pa.DataType) -> Codec:
    single = struct.Struct("<f")

    def convert(value: object) -> float:
        if isinstance(value, float | int | np.floating | np.integer) and not isinstance(
            value, bool
        ):
            try:
                return float(value)
            except OverflowError:
                raise misfit(type, value, "out of range") from None
        raise misfit(type, value)

    def normalise_double(value: object) -> float:
        return value if value.__class__ is float else convert(value)

    def normalise_float(value: object) -> float:
        # Rounded here, so that memory holds what storage will give back.
        try:
            rounded: float = single.unpack(single.pack(normalise_double(value)))[0]
        except OverflowError:
            raise misfit(type, value, "out of range") from None
        return rounded

    def canonical(value: float) -> float:
        return math.nan if math.isnan(value) else value + 0.0

    def read(array: pa.Array) -> Values:
        array = cast_to(type, array)
        values: Values = array.to_pylist() if array.null_count else array.to_numpy().tolist()
        return values

    def read_keys(array: pa.Array) -> Values:
        array = cast_to(type, array)
        numbers = (array.fill_null(0) if array.null_count else array).to_numpy() + 0.0
        values: Values = numbers.tolist()
        for index in np.flatnonzero(np.isnan(numbers)).tolist():
            values[index] = math.nan
        return put_nulls(values, array)

    wide = type.bit_width == 64
    normalise = normalise_double if wide else normalise_float
    more: dict[str, Any] = {"exact": float, "write": write_numbers(type, "d")}
    return leaf(
        type,
        normalise,
        read,
        read_keys=read_keys,
        canonical=canonical,
        blank=0.0,
        **(more if wide else {}),
    )


def decimal_codec(type: pa.DataType) -> Codec:
    # quantize raises when the result has more digits than the context: that is the range check.
    context = decimal.Context(
        prec=type.precision, rounding=decimal.ROUND_HALF_UP, traps=[decimal.InvalidOperation]
    )
    unit = decimal.Decimal(1).scaleb(-type.scale)
    zero = unit * 0

    def normalise(value: object) -> decimal.Decimal:
        if value.__class__ is not decimal.Decimal:
            if isinstance(value, bool) or not isinstance(value, decimal.Decimal | int | np.integer):
                raise misfit(type, value)
            value = decimal.Decimal(value if isinstance(value, decimal.Decimal) else int(value))
        try:
            fitted: decimal.Decimal = value.quantize(unit, context=context)
        except decimal.InvalidOperation:
            raise misfit(type, value, "out of range") from None
        if not fitted:
            return zero  # Storage has one zero, so memory has no other.
        if fitted.is_finite():
            return fitted
        raise misfit(type, value, "not a number")

    def read(array: pa.Array) -> Values:
        values: Values = cast_to(type, array).to_numpy(zero_copy_only=False).tolist()
        return values

    # Wide enough that moving the point never rounds.
    wide = decimal.Context(prec=2 * type.precision + 2)

    def pack(value: decimal.Decimal) -> int | str:
        number = int(value.scaleb(type.scale, context=wide))
        return number if -_INT64_LIMIT <= number < _INT64_LIMIT else str(number)

    def unpack(packed: int | str) -> decimal.Decimal:
        return decimal.Decimal(packed).scaleb(-type.scale, context=wide)

    return leaf(type, normalise, read, pack=pack, unpack=unpack, blank=zero)


def date_codec(type: pa.DataType) -> Codec:
    def normalise(value: object) -> dt.date:
        if value.__class__ is dt.date:
            return value
        if isinstance(value, np.datetime64):
            value = value.astype("M8[D]").item()
        if isinstance(value, dt.date) and not isinstance(value, dt.datetime):
            return dt.date(value.year, value.month, value.day)
        raise misfit(type, value)

    def read(array: pa.Array) -> Values:
        array = cast_to(type, array)
        ordinals = integers(array, pa.int32()).astype(np.int64) + _EPOCH_ORDINAL
        _check_years(type, ordinals, dt.date.min.toordinal(), dt.date.max.toordinal())
        return put_nulls(list(map(dt.date.fromordinal, ordinals.tolist())), array)

    return leaf(
        type,
        normalise,
        read,
        pack=dt.date.toordinal,
        unpack=dt.date.fromordinal,
        exact=dt.date,
        blank=dt.date(1970, 1, 1),
    )


def _check_years(type: pa.DataType, numbers: Numbers, low: int, high: int) -> None:
    if len(numbers) and (numbers.min() < low or numbers.max() > high):
        index = int(np.argmax((numbers < low) | (numbers > high)))
        raise ValueTypeError(
            f"this {type_ddl(type)} is outside the years 1 to 9999, all that Python has",
            (f"[{index}]",),
            index,
        )


def _read_times(type: pa.DataType, epoch: dt.datetime) -> Read:
    def read(array: pa.Array) -> Values:
        array = cast_to(type, array)
        numbers = integers(array, pa.int64())
        _check_years(type, numbers, _US_MIN, _US_MAX)
        # Adding to an aware datetime keeps its zone and costs a sixth of replace(tzinfo=).
        return put_nulls(list(map(epoch.__add__, numbers.view("m8[us]").tolist())), array)

    return read


def _micros(passed: dt.timedelta) -> int:
    return (passed.days * 86400 + passed.seconds) * 1_000_000 + passed.microseconds


def _pack_times(epoch: dt.datetime) -> dict[str, Convert]:
    return {
        "pack": lambda value: _micros(value - epoch),
        "unpack": lambda packed: epoch + dt.timedelta(microseconds=packed),
    }


def _write_times(type: pa.DataType, epoch: dt.datetime) -> Write:
    def to_arrow(values: Values) -> pa.Array:
        try:
            passed = [value - epoch for value in values]
        except TypeError:
            passed = [None if value is None else value - epoch for value in values]
        # Arrow converts plain differences three times faster than aware datetimes.
        return pa.array(passed, pa.duration("us")).view(type)

    return write_leaf(type, to_arrow)


def _exact_datetime(value: dt.datetime) -> dt.datetime:
    # Subclasses (pandas') carry more than Arrow stores and compare in their own way.
    return dt.datetime.combine(
        dt.date(value.year, value.month, value.day),
        dt.time(value.hour, value.minute, value.second, value.microsecond),
        value.tzinfo,
    )


def timestamp_codec(type: pa.DataType) -> Codec:
    def normalise(value: object) -> dt.datetime:
        if value.__class__ is dt.datetime and value.tzinfo is UTC:
            return value
        # pandas' NaT is a datetime to Python, in the year NaN.
        if not isinstance(value, dt.datetime) or math.isnan(value.year):
            raise misfit(type, value)
        if value.utcoffset() is None:
            raise misfit(
                type, value, "it has no time zone; add tzinfo=datetime.UTC or use timestamp_ntz"
            )
        try:
            return _exact_datetime(value.astimezone(UTC))
        except OverflowError:
            raise misfit(type, value, "out of range in UTC") from None

    read, write = _read_times(type, _EPOCH), _write_times(type, _EPOCH)
    return leaf(type, normalise, read, write=write, blank=_EPOCH, **_pack_times(_EPOCH))


def timestamp_ntz_codec(type: pa.DataType) -> Codec:
    def normalise(value: object) -> dt.datetime:
        if value.__class__ is dt.datetime and value.tzinfo is None:
            return value
        if isinstance(value, np.datetime64):
            value = value.astype("M8[us]").item()
        if not isinstance(value, dt.datetime) or math.isnan(value.year):
            raise misfit(type, value)
        if value.tzinfo is not None:
            raise misfit(
                type,
                value,
                "it has a time zone; drop it with replace(tzinfo=None) or use timestamp",
            )
        return _exact_datetime(value)

    read, write = _read_times(type, _EPOCH_NTZ), _write_times(type, _EPOCH_NTZ)
    return leaf(type, normalise, read, write=write, blank=_EPOCH_NTZ, **_pack_times(_EPOCH_NTZ))


def duration_codec(type: pa.DataType) -> Codec:
    def normalise(value: object) -> dt.timedelta:
        if value.__class__ is dt.timedelta:
            return value
        if isinstance(value, np.timedelta64):
            value = value.astype("m8[us]").item()
        if not isinstance(value, dt.timedelta):
            raise misfit(type, value)
        return dt.timedelta(value.days, value.seconds, value.microseconds)

    def read(array: pa.Array) -> Values:
        array = cast_to(type, array)
        return put_nulls(integers(array, pa.int64()).view("m8[us]").tolist(), array)

    return leaf(
        type,
        normalise,
        read,
        pack=_micros,
        unpack=lambda packed: dt.timedelta(microseconds=packed),
        exact=dt.timedelta,
        blank=dt.timedelta(),
    )


def object_codec() -> Codec:
    def normalise(value: object) -> bytes:
        try:
            return pickle.dumps(value, protocol=5)
        except Exception as error:
            raise misfit(OBJECT, value, f"it does not pickle: {error}") from error

    binary = plain_codec(pa.binary())
    return dataclasses.replace(binary, type=OBJECT, normalise=normalise, restore=_unpickle)


MOVED: Final = {
    "cairn.types": "cairn.types.declared",
    "cairn.codec.base": "cairn.types.codec.core",
    "cairn.window_functions": "cairn.operators.window_functions",
}
"""Former modules of rows, maps and windows: pickles in old state name them."""


class _Unpickler(pickle.Unpickler):
    """Finds classes also under the modules they had in older versions."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(MOVED.get(module, module), name)


def _unpickle(data: bytes) -> Datum:
    try:
        return pickle.loads(data)
    except (ModuleNotFoundError, AttributeError):
        return _Unpickler(io.BytesIO(data)).load()
