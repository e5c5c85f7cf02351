"""Values between three places: the user's Python, the state in memory, Arrow columns.

A codec belongs to one type. It checks what users hand in and makes it immutable
(normalise), turns whole Arrow columns into lists of such values (decode) and
back (encode). Work on columns is done by column, never by Arrow scalar.

Always true here:
- decode(encode([v])) == [v] for every v that normalise returned, nulls, NaN and -0.0 included;
- a value that does not fit is refused with its place in the structure, never
  wrapped, truncated or guessed; only decimals are rounded, half up, to their scale;
- values in memory are immutable: arrays are tuples, structs rows, maps FrozenMaps;
- values from decode_keys and normalise_key, and the keys of every map, are equal
  exactly when Spark groups them together: one NaN, no -0.0.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import functools
import math
import pickle
import reprlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, repeat
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from cairn.types import OBJECT, contains_map, parse_type, row_class, type_ddl

UTC = dt.UTC
# Codecs call their type `type`, as users do; the builtin needs another name beside it.
builtin_type = type
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_NTZ = dt.datetime(1970, 1, 1)
_EPOCH_ORDINAL = dt.date(1970, 1, 1).toordinal()
_US_MIN = (dt.datetime.min - _EPOCH_NTZ) // dt.timedelta(microseconds=1)
_US_MAX = (dt.datetime.max - _EPOCH_NTZ) // dt.timedelta(microseconds=1)
_OFFSET_MAX = 2**31 - 1

_Values = list[Any]


class ValueTypeError(TypeError):
    """A value does not fit its type. `path` says where, as in `items[3].price`."""

    def __init__(self, reason: str, steps: tuple[str, ...] = (), index: int | None = None) -> None:
        super().__init__(reason, steps, index)
        self.reason = reason
        self.steps = steps
        self.index = index

    @property
    def path(self) -> str:
        return "".join(self.steps).removeprefix(".")

    def within(self, *steps: str, index: int | None = None) -> ValueTypeError:
        """The same error, seen from the value around it."""
        return ValueTypeError(self.reason, (*steps, *self.steps), index)

    def inner(self) -> ValueTypeError:
        """The same error without the first step of its path."""
        return ValueTypeError(self.reason, self.steps[1:])

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.steps else self.reason


class FrozenMap(dict[Any, Any]):
    """A dict that refuses to change; `dict(m)` gives a copy that can."""

    __slots__ = ()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a map read from state cannot change; copy it with dict(m) and set that")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:
        return FrozenMap, (dict(self),)

    def __repr__(self) -> str:
        return dict.__repr__(self)


def _same(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Codec:
    """How values of one type are checked, stored and read back.

    `normalise`, `canonical` and `restore` are plain functions held in slots, as
    they run once per record. `normalise` refuses None: whether a place may be
    null is known to the place, not to the type.
    """

    type: Any
    arrow: pa.DataType
    normalise: Callable[[Any], Any]
    read: Callable[[pa.Array], _Values]
    read_keys: Callable[[pa.Array], _Values]
    write: Callable[[_Values], pa.Array]
    # From the in-memory form to the form used as a dict key.
    canonical: Callable[[Any], Any] = _same
    restore: Callable[[Any], Any] = _same
    # Instances of exactly this class need no check; None when there is no such class.
    exact: Any = None
    # Stands under a null struct in a field that may not be null; nobody reads it.
    blank: Any = None

    def decode(self, array: pa.Array | pa.ChunkedArray) -> _Values:
        """In-memory values of an Arrow column; nulls are None."""
        return _by_chunk(self.read, array)

    def decode_keys(self, array: pa.Array | pa.ChunkedArray) -> _Values:
        """Like decode, in the form used as dict keys: one NaN object, no -0.0."""
        return _by_chunk(self.read_keys, array)

    def encode(self, values: _Values) -> pa.Array:
        """The Arrow column of normalised values; None is null."""
        return self.write(values)

    def normalise_key(self, value: Any) -> Any:
        """A user's value as the dict key that decode_keys would give."""
        return self.canonical(self.normalise(value))

    def __reduce__(self) -> Any:
        return codec, (self.type,)


@functools.cache
def codec(type: Any) -> Codec:
    """The codec of a type, given as anything parse_type accepts."""
    parsed = parse_type(type)
    # Equal types share one codec however they were declared.
    return codec(parsed) if parsed is not type and parsed != type else _build(parsed)


def is_hashable(type: Any) -> bool:
    """Whether values of the type can be keys: no map and no pickled object inside."""
    return type is not OBJECT and not contains_map(type)


def _build(type: Any) -> Codec:
    if type is OBJECT:
        return _object_codec()
    if pa.types.is_struct(type):
        return _struct_codec(type)
    if pa.types.is_list(type):
        return _list_codec(type)
    if pa.types.is_map(type):
        return _map_codec(type)
    if pa.types.is_integer(type):
        return _integer_codec(type)
    if pa.types.is_floating(type):
        return _floating_codec(type)
    if pa.types.is_decimal(type):
        return _decimal_codec(type)
    if pa.types.is_timestamp(type):
        return _timestamp_codec(type) if type.tz else _timestamp_ntz_codec(type)
    if pa.types.is_date32(type):
        return _date_codec(type)
    if pa.types.is_duration(type):
        return _duration_codec(type)
    return _plain_codec(type)


# --- shared pieces ----------------------------------------------------------------------------


def _misfit(type: Any, value: Any, why: str = "") -> ValueTypeError:
    shown = "None" if value is None else f"{value.__class__.__name__} {reprlib.repr(value)}"
    return ValueTypeError(f"expected {type_ddl(type)}, found {shown}{why and ': ' + why}")


def _by_chunk(read: Callable[[pa.Array], _Values], array: pa.Array | pa.ChunkedArray) -> _Values:
    if isinstance(array, pa.ChunkedArray):
        return list(chain.from_iterable(map(read, array.chunks)))
    return read(array)


def _as(type: pa.DataType, array: pa.Array) -> pa.Array:
    # Spark and files hand over large strings, dictionaries and other time zones.
    return array if array.type == type else array.cast(type)


def _null_indices(array: pa.Array) -> list[int]:
    if not array.null_count:
        return []
    found: list[int] = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist()
    return found


def _put_nulls(values: _Values, array: pa.Array) -> _Values:
    for index in _null_indices(array):
        values[index] = None
    return values


def _integers(array: pa.Array, width: pa.DataType) -> Any:
    """The numbers behind a column of times, as numpy; nulls are zeros."""
    numbers = array.view(width)
    return (numbers.fill_null(0) if numbers.null_count else numbers).to_numpy()


def _write_leaf(type: pa.DataType, to_arrow: Callable[[_Values], Any]) -> Any:
    """An encoder that names the first value that does not fit."""

    def write(values: _Values) -> pa.Array:
        try:
            array = to_arrow(values)
        except (pa.ArrowException, OverflowError, UnicodeError, TypeError, ValueError):
            for index, value in enumerate(values):
                try:
                    to_arrow([value])
                except (pa.ArrowException, ArithmeticError, TypeError, ValueError) as error:
                    misfit = _misfit(type, value, str(error))
                    raise misfit.within(f"[{index}]", index=index) from error
            raise
        if isinstance(array, pa.ChunkedArray):
            raise ValueTypeError(
                f"{len(values)} values of {type_ddl(type)} exceed 2 GiB; encode fewer at once"
            )
        return array

    return write


def _write_plain(type: pa.DataType) -> Any:
    return _write_leaf(type, lambda values: pa.array(values, type))


def _leaf(type: pa.DataType, normalise: Any, read: Any, **more: Any) -> Codec:
    more.setdefault("write", _write_plain(type))
    more.setdefault("read_keys", read)
    return Codec(type=type, arrow=type, normalise=normalise, read=read, **more)


# --- leaves -----------------------------------------------------------------------------------


def _plain_codec(type: pa.DataType) -> Codec:
    """boolean, string and binary: Python has the very type."""
    exact: Any = {pa.bool_(): bool, pa.string(): str, pa.binary(): bytes}[type]
    also: Any = {bool: np.bool_, str: str, bytes: (bytes, bytearray, memoryview)}[exact]

    def normalise(value: Any) -> Any:
        if value.__class__ is exact:
            return value
        if isinstance(value, also):
            return exact(value)
        raise _misfit(type, value)

    def read(array: pa.Array) -> _Values:
        values: _Values = _as(type, array).to_numpy(zero_copy_only=False).tolist()
        return values

    return _leaf(type, normalise, read, exact=exact, blank=exact())


def _integer_codec(type: pa.DataType) -> Codec:
    limit = 1 << (type.bit_width - 1)

    def convert(value: Any) -> int:
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            return int(value)
        raise _misfit(type, value)

    def normalise_long(value: Any) -> int:
        # The range of 64 bits is left to encode: almost no value comes near it.
        return value if value.__class__ is int else convert(value)

    def normalise_short(value: Any) -> int:
        number = value if value.__class__ is int else convert(value)
        if -limit <= number < limit:
            return number
        raise _misfit(type, value, "out of range")

    def read(array: pa.Array) -> _Values:
        array = _as(type, array)
        values: _Values = array.to_pylist() if array.null_count else array.to_numpy().tolist()
        return values

    if type.bit_width == 64:
        return _leaf(type, normalise_long, read, exact=int, blank=0)
    return _leaf(type, normalise_short, read, blank=0)


def _floating_codec(type: pa.DataType) -> Codec:
    single = struct.Struct("<f")

    def convert(value: Any) -> float:
        if isinstance(value, float | int | np.floating | np.integer) and not isinstance(
            value, bool
        ):
            try:
                return float(value)
            except OverflowError:
                raise _misfit(type, value, "out of range") from None
        raise _misfit(type, value)

    def normalise_double(value: Any) -> float:
        return value if value.__class__ is float else convert(value)

    def normalise_float(value: Any) -> float:
        # Rounded here, so that memory holds what storage will give back.
        try:
            rounded: float = single.unpack(single.pack(normalise_double(value)))[0]
        except OverflowError:
            raise _misfit(type, value, "out of range") from None
        return rounded

    def canonical(value: float) -> float:
        return math.nan if math.isnan(value) else value + 0.0

    def read(array: pa.Array) -> _Values:
        array = _as(type, array)
        values: _Values = array.to_pylist() if array.null_count else array.to_numpy().tolist()
        return values

    def read_keys(array: pa.Array) -> _Values:
        array = _as(type, array)
        numbers = (array.fill_null(0) if array.null_count else array).to_numpy() + 0.0
        values: _Values = numbers.tolist()
        for index in np.flatnonzero(np.isnan(numbers)).tolist():
            values[index] = math.nan
        return _put_nulls(values, array)

    wide = type.bit_width == 64
    normalise = normalise_double if wide else normalise_float
    exact = float if wide else None
    return _leaf(
        type, normalise, read, read_keys=read_keys, canonical=canonical, exact=exact, blank=0.0
    )


def _decimal_codec(type: pa.DataType) -> Codec:
    # quantize raises when the result has more digits than the context: that is the range check.
    context = decimal.Context(
        prec=type.precision, rounding=decimal.ROUND_HALF_UP, traps=[decimal.InvalidOperation]
    )
    unit = decimal.Decimal(1).scaleb(-type.scale)

    def normalise(value: Any) -> decimal.Decimal:
        if value.__class__ is not decimal.Decimal:
            if isinstance(value, bool) or not isinstance(value, decimal.Decimal | int | np.integer):
                raise _misfit(type, value)
            value = decimal.Decimal(value if isinstance(value, decimal.Decimal) else int(value))
        try:
            fitted: decimal.Decimal = value.quantize(unit, context=context)
        except decimal.InvalidOperation:
            raise _misfit(type, value, "out of range") from None
        if fitted.is_finite():
            return fitted
        raise _misfit(type, value, "not a number")

    def read(array: pa.Array) -> _Values:
        values: _Values = _as(type, array).to_numpy(zero_copy_only=False).tolist()
        return values

    return _leaf(type, normalise, read, blank=unit * 0)


def _date_codec(type: pa.DataType) -> Codec:
    def normalise(value: Any) -> dt.date:
        if value.__class__ is dt.date:
            return value
        if isinstance(value, np.datetime64):
            value = value.astype("M8[D]").item()
        if isinstance(value, dt.date) and not isinstance(value, dt.datetime):
            return dt.date(value.year, value.month, value.day)
        raise _misfit(type, value)

    def read(array: pa.Array) -> _Values:
        array = _as(type, array)
        ordinals = _integers(array, pa.int32()).astype(np.int64) + _EPOCH_ORDINAL
        _check_years(type, ordinals, dt.date.min.toordinal(), dt.date.max.toordinal())
        return _put_nulls(list(map(dt.date.fromordinal, ordinals.tolist())), array)

    return _leaf(type, normalise, read, exact=dt.date, blank=dt.date(1970, 1, 1))


def _check_years(type: pa.DataType, numbers: Any, low: int, high: int) -> None:
    if len(numbers) and (numbers.min() < low or numbers.max() > high):
        index = int(np.argmax((numbers < low) | (numbers > high)))
        raise ValueTypeError(
            f"this {type_ddl(type)} lies outside the years 1 to 9999 that Python knows",
            (f"[{index}]",),
            index,
        )


def _read_times(type: pa.DataType, epoch: dt.datetime) -> Any:
    def read(array: pa.Array) -> _Values:
        array = _as(type, array)
        numbers = _integers(array, pa.int64())
        _check_years(type, numbers, _US_MIN, _US_MAX)
        # Adding to an aware datetime keeps its zone and costs a sixth of replace(tzinfo=).
        return _put_nulls(list(map(epoch.__add__, numbers.view("m8[us]").tolist())), array)

    return read


def _write_times(type: pa.DataType, epoch: dt.datetime) -> Any:
    def to_arrow(values: _Values) -> pa.Array:
        try:
            passed = [value - epoch for value in values]
        except TypeError:
            passed = [None if value is None else value - epoch for value in values]
        # Arrow converts plain differences three times faster than aware datetimes.
        return pa.array(passed, pa.duration("us")).view(type)

    return _write_leaf(type, to_arrow)


def _exact_datetime(value: dt.datetime) -> dt.datetime:
    # Subclasses (pandas') carry more than Arrow stores and compare in their own way.
    return dt.datetime.combine(
        dt.date(value.year, value.month, value.day),
        dt.time(value.hour, value.minute, value.second, value.microsecond),
        value.tzinfo,
    )


def _timestamp_codec(type: pa.DataType) -> Codec:
    def normalise(value: Any) -> dt.datetime:
        if value.__class__ is dt.datetime and value.tzinfo is UTC:
            return value
        # pandas' NaT is a datetime to Python, in the year NaN.
        if not isinstance(value, dt.datetime) or math.isnan(value.year):
            raise _misfit(type, value)
        if value.utcoffset() is None:
            raise _misfit(
                type, value, "it names no time zone; add tzinfo=datetime.UTC or use timestamp_ntz"
            )
        try:
            return _exact_datetime(value.astimezone(UTC))
        except OverflowError:
            raise _misfit(type, value, "out of range in UTC") from None

    read, write = _read_times(type, _EPOCH), _write_times(type, _EPOCH)
    return _leaf(type, normalise, read, write=write, blank=_EPOCH)


def _timestamp_ntz_codec(type: pa.DataType) -> Codec:
    def normalise(value: Any) -> dt.datetime:
        if value.__class__ is dt.datetime and value.tzinfo is None:
            return value
        if isinstance(value, np.datetime64):
            value = value.astype("M8[us]").item()
        if not isinstance(value, dt.datetime) or math.isnan(value.year):
            raise _misfit(type, value)
        if value.tzinfo is not None:
            raise _misfit(
                type,
                value,
                "it names a time zone; drop it with replace(tzinfo=None) or use timestamp",
            )
        return _exact_datetime(value)

    read, write = _read_times(type, _EPOCH_NTZ), _write_times(type, _EPOCH_NTZ)
    return _leaf(type, normalise, read, write=write, blank=_EPOCH_NTZ)


def _duration_codec(type: pa.DataType) -> Codec:
    def normalise(value: Any) -> dt.timedelta:
        if value.__class__ is dt.timedelta:
            return value
        if isinstance(value, np.timedelta64):
            value = value.astype("m8[us]").item()
        if not isinstance(value, dt.timedelta):
            raise _misfit(type, value)
        return dt.timedelta(value.days, value.seconds, value.microseconds)

    def read(array: pa.Array) -> _Values:
        array = _as(type, array)
        return _put_nulls(_integers(array, pa.int64()).view("m8[us]").tolist(), array)

    return _leaf(type, normalise, read, exact=dt.timedelta, blank=dt.timedelta())


def _object_codec() -> Codec:
    def normalise(value: Any) -> bytes:
        try:
            return pickle.dumps(value, protocol=5)
        except Exception as error:
            raise _misfit(OBJECT, value, f"it does not pickle: {error}") from error

    binary = codec(pa.binary())
    return dataclasses.replace(binary, type=OBJECT, normalise=normalise, restore=pickle.loads)


# --- structs, arrays, maps --------------------------------------------------------------------


def _blame(parts: Iterable[tuple[str, Callable[[Any], Any], Any]]) -> ValueTypeError:
    """Find again, slowly, the part that a fast path refused."""
    for step, normalise, value in parts:
        try:
            normalise(value)
        except ValueTypeError as error:
            return error.within(step)
    raise AssertionError("a value was refused once and accepted the next time")


def _struct_codec(type: pa.DataType) -> Codec:
    names = [field.name for field in type]
    fields = [codec(field.type) for field in type]
    width, row, known = len(names), row_class(type), frozenset(names)
    normalisers = [field.normalise for field in fields]
    required = [index for index, field in enumerate(type) if not field.nullable]
    steps = [f".{name}" if name.isidentifier() else f"[{name!r}]" for name in names]
    # Most parts are of the one class that needs no check: spare them the call.
    exacts = [field.exact for field in fields]
    # Where that holds for every field, one comparison in C accepts the whole row.
    all_exact = None if None in exacts else tuple(exacts)
    make = tuple.__new__

    def by_name(value: Mapping[str, Any], origin: Any) -> Sequence[Any]:
        for name in value:
            if name not in known:
                raise _misfit(type, origin, f"no field {name!r}")
        return [value.get(name) for name in names]

    def spread(value: Any) -> Sequence[Any]:
        if isinstance(value, Mapping):
            return by_name(value, value)
        if isinstance(value, tuple):
            own = getattr(value, "_fields", None) or getattr(value, "__fields__", None)
            # By position, a named tuple with its fields in another order would be misread.
            return by_name(dict(zip(own, value, strict=True)), value) if own else value
        if dataclasses.is_dataclass(value) and not isinstance(value, builtin_type):
            own = [field.name for field in dataclasses.fields(value)]
            return by_name({name: getattr(value, name) for name in own}, value)
        raise _misfit(type, value)

    def normalise(value: Any) -> Any:
        kind = value.__class__
        values = value if kind is row or kind is tuple else spread(value)
        if all_exact is not None and tuple(map(builtin_type, values)) == all_exact:
            return value if kind is row else make(row, values)
        if len(values) != width:
            raise _misfit(type, value, f"{len(values)} values for {width} fields")
        try:
            # zip(strict=True) would cost more than all the checks of a short row.
            fitted = [
                part if part.__class__ is exacts[i] or part is None else normalisers[i](part)
                for i, part in enumerate(values)
            ]
        except ValueTypeError:
            parts = zip(steps, normalisers, values, strict=True)
            raise _blame(part for part in parts if part[2] is not None) from None
        for index in required:
            if fitted[index] is None:
                raise _misfit(type[index].type, None, "it is NOT NULL").within(steps[index])
        return make(row, fitted)

    def canonical(value: Any) -> Any:
        parts = zip(fields, value, strict=True)
        return make(row, [None if part is None else f.canonical(part) for f, part in parts])

    def reader(reads: list[Callable[[pa.Array], _Values]]) -> Any:
        def read(array: pa.Array) -> _Values:
            if [field.name for field in array.type] != names:
                array = array.cast(type)
            if not width:
                return _put_nulls([row()] * len(array), array)
            # flatten() hides what lies under a null struct, which may be anything.
            columns = array.flatten() if array.null_count else map(array.field, range(width))
            parts = [read_one(column) for read_one, column in zip(reads, columns, strict=True)]
            return _put_nulls(list(map(make, repeat(row), zip(*parts, strict=True))), array)

        return read

    blanks = [None if f.nullable else c.blank for f, c in zip(type, fields, strict=True)]

    def write(values: _Values) -> pa.Array:
        validity, count = None, len(values)
        try:
            flat = list(chain.from_iterable(values))
        except TypeError:
            validity = pa.array([value is not None for value in values]).buffers()[1]
            flat = list(chain.from_iterable(blanks if v is None else v for v in values))
        assert len(flat) == count * width, "a row of another width was not normalised"
        children = []
        for index, field in enumerate(fields):
            try:
                children.append(field.write(flat[index::width]))
            except ValueTypeError as error:
                if error.index is None:
                    raise
                at = error.index
                raise error.inner().within(f"[{at}]", steps[index], index=at) from error
        return pa.StructArray.from_buffers(type, count, [validity], children=children)

    return Codec(
        type=type,
        arrow=type,
        normalise=normalise,
        canonical=canonical,
        read=reader([field.read for field in fields]),
        read_keys=reader([field.read_keys for field in fields]),
        write=write,
        blank=make(row, blanks),
    )


def _offsets(values: _Values) -> tuple[pa.Array, pa.Array | None]:
    """Arrow's offsets of variable-length values, and which of them are null."""
    try:
        lengths, nulls = list(map(len, values)), None
    except TypeError:
        lengths = [0 if value is None else len(value) for value in values]
        nulls = pa.array([value is None for value in values])
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] > _OFFSET_MAX:
        raise ValueTypeError(f"{ends[-1]} elements do not fit one column; encode fewer at once")
    return pa.array(ends, pa.int32()), nulls


def _write_child(child: Codec, parts: _Values, offsets: pa.Array) -> pa.Array:
    try:
        return child.write(parts)
    except ValueTypeError as error:
        if error.index is None:
            raise
        starts = offsets.to_numpy()
        index = int(np.searchsorted(starts, error.index, side="right")) - 1
        place = error.index - int(starts[index])
        raise error.inner().within(f"[{index}]", f"[{place}]", index=index) from error


def _bounds(array: pa.Array) -> zip[tuple[int, int]]:
    lengths = array.value_lengths()
    numbers = (lengths.fill_null(0) if lengths.null_count else lengths).to_numpy()
    ends = np.cumsum(numbers, dtype=np.int64).tolist()
    return zip(chain((0,), ends), ends, strict=False)


def _list_codec(type: pa.DataType) -> Codec:
    child = codec(type.value_type)
    normalise_part, exact = child.normalise, child.exact

    def normalise(value: Any) -> tuple[Any, ...]:
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
            raise _misfit(type, value)
        if exact is not None and set(map(builtin_type, value)) == {exact}:
            return tuple(value)
        try:
            return tuple([None if part is None else normalise_part(part) for part in value])
        except ValueTypeError:
            parts = ((f"[{i}]", normalise_part, p) for i, p in enumerate(value) if p is not None)
            raise _blame(parts) from None

    def canonical(value: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([None if part is None else child.canonical(part) for part in value])

    def reader(read_child: Callable[[pa.Array], _Values]) -> Any:
        def read(array: pa.Array) -> _Values:
            if not pa.types.is_list(array.type) and not pa.types.is_large_list(array.type):
                array = array.cast(type)
            parts = tuple(read_child(array.flatten()))
            return _put_nulls([parts[start:stop] for start, stop in _bounds(array)], array)

        return read

    def write(values: _Values) -> pa.Array:
        offsets, nulls = _offsets(values)
        flat = list(chain.from_iterable(value for value in values if value is not None))
        parts = _write_child(child, flat, offsets)
        return pa.ListArray.from_arrays(offsets, parts, type=type, mask=nulls)

    return Codec(
        type=type,
        arrow=type,
        normalise=normalise,
        canonical=canonical,
        read=reader(child.read),
        read_keys=reader(child.read_keys),
        write=write,
        blank=(),
    )


def _map_codec(type: pa.DataType) -> Codec:
    key, item = codec(type.key_type), codec(type.item_type)

    def normalise(value: Any) -> FrozenMap:
        if not isinstance(value, Mapping):
            raise _misfit(type, value)
        try:
            return FrozenMap(
                (key.normalise_key(k), None if v is None else item.normalise(v))
                for k, v in value.items()
            )
        except ValueTypeError:
            keys = (("", key.normalise, k) for k in value)
            items = ((f"[{k!r}]", item.normalise, v) for k, v in value.items() if v is not None)
            raise _blame(chain(keys, items)) from None

    def read(array: pa.Array) -> _Values:
        # Arrow's MapArray has neither flatten nor lengths; the list it is made of has both.
        entry = pa.struct([array.type.key_field, array.type.item_field])
        entries = array.cast(pa.list_(pa.field("entries", entry, nullable=False)))
        keys, items = entries.flatten().flatten()
        pairs = list(zip(key.read_keys(keys), item.read(items), strict=True))
        return _put_nulls([FrozenMap(pairs[a:b]) for a, b in _bounds(entries)], array)

    def write(values: _Values) -> pa.Array:
        offsets, nulls = _offsets(values)
        some = [value for value in values if value is not None]
        keys = _write_child(key, list(chain.from_iterable(some)), offsets)
        flat = list(chain.from_iterable(value.values() for value in some))
        items = _write_child(item, flat, offsets)
        return pa.MapArray.from_arrays(offsets, keys, items, type=type, mask=nulls)

    return Codec(
        type=type,
        arrow=type,
        normalise=normalise,
        read=read,
        read_keys=read,
        write=write,
        blank=FrozenMap(),
    )
