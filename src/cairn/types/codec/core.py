"""The codec of a type, and the pieces that codecs of all types share."""

from __future__ import annotations

import dataclasses
import reprlib
import struct
from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.types import type_ddl

# Codecs call their type `type`, as users do; the builtin needs another name beside it.
builtin_type = type

Key: TypeAlias = Hashable
"""A key or map entry as dicts hold it: one NaN, no -0.0."""
Datum: TypeAlias = Any
"""A value in the form its codec gives it; its Python class depends on the declared type."""
Values = list[Datum]
Convert = Callable[[Datum], Datum]
Read = Callable[[pa.Array], Values]
Write = Callable[[Values], pa.Array]
Numbers = npt.NDArray[np.int64] | npt.NDArray[np.int32]


class ValueTypeError(TypeError):
    """A value does not fit its type; `path` is its place, as in `items[3].price`."""

    def __init__(self, reason: str, steps: tuple[str, ...] = (), index: int | None = None) -> None:
        super().__init__(reason, steps, index)
        self.reason = reason
        self.steps = steps
        self.index = index

    @property
    def path(self) -> str:
        return "".join(self.steps).removeprefix(".")

    def within(self, *steps: str, index: int | None = None) -> ValueTypeError:
        """Return the same error with a path that starts further out."""
        return ValueTypeError(self.reason, (*steps, *self.steps), index)

    def inner(self) -> ValueTypeError:
        """Return the same error without the first step of its path."""
        return ValueTypeError(self.reason, self.steps[1:])

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.steps else self.reason


class FrozenMap(dict[Key, Datum]):
    """A dict that refuses to change; `dict(m)` is a copy that can."""

    __slots__ = ()

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("a map read from state cannot change; copy it with dict(m) and set that")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenMap], tuple[dict[Key, Datum]]]:
        return FrozenMap, (dict(self),)

    def __repr__(self) -> str:
        return dict.__repr__(self)


def same(value: Datum) -> Datum:
    return value


def if_some(convert: Convert) -> Convert:
    """Return a function that converts a value and leaves None as it is."""
    return same if convert is same else lambda value: None if value is None else convert(value)


def field_step(name: str) -> str:
    """Return the step of an error's path that leads to a field."""
    return f".{name}" if name.isidentifier() else f"[{name!r}]"


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Codec:
    """Checks, stores and reads back values of one type.

    `normalise`, `canonical` and `restore` are plain functions in slots, as they run once per
    record. `normalise` refuses None: the place decides whether it may be null, not the type.
    """

    type: pa.DataType
    """The declared type: an Arrow type, or OBJECT."""
    arrow: pa.DataType
    normalise: Convert
    read: Read
    read_keys: Read
    write: Write
    # From the in-memory form to the form used as a dict key.
    canonical: Convert = same
    restore: Convert = same
    # From the in-memory form to what msgpack holds, and back; `same` where msgpack has the type.
    pack: Convert = same
    unpack: Convert = same
    # Instances of exactly this class need no check; None if all values need one.
    exact: builtin_type | None = None
    # Stands under a null struct in a NOT NULL field; nobody reads it.
    blank: Datum = None

    def decode(self, array: pa.Array | pa.ChunkedArray) -> Values:
        """Return the values of an Arrow column; nulls are None."""
        return _by_chunk(self.read, array)

    def decode_keys(self, array: pa.Array | pa.ChunkedArray) -> Values:
        """Return the values of an Arrow column as dict keys: one NaN object, no -0.0."""
        return _by_chunk(self.read_keys, array)

    def encode(self, values: Values) -> pa.Array:
        """Return the Arrow column of normalised values; None is null."""
        return self.write(values)

    def normalise_key(self, value: object) -> Datum:
        """Return a user's value as the dict key that decode_keys would return."""
        return self.canonical(self.normalise(value))

    def pack_key(self, value: Key) -> Datum:
        """Pack a key; equal keys are packed alike, and a key may be None."""
        return None if value is None else self.pack(self.canonical(value))

    def __reduce__(self) -> tuple[Callable[[pa.DataType], Codec], tuple[pa.DataType]]:
        from cairn.types.codec.registry import codec

        return codec, (self.type,)


def misfit(type: pa.DataType, value: object, why: str = "") -> ValueTypeError:
    shown = "None" if value is None else f"{value.__class__.__name__} {reprlib.repr(value)}"
    return ValueTypeError(f"expected {type_ddl(type)}, found {shown}{why and ': ' + why}")


def _by_chunk(read: Read, array: pa.Array | pa.ChunkedArray) -> Values:
    if isinstance(array, pa.ChunkedArray):
        return list(chain.from_iterable(map(read, array.chunks)))
    return read(array)


def cast_to(type: pa.DataType, array: pa.Array) -> pa.Array:
    # Spark and files hand over large strings, dictionaries and other time zones.
    return array if array.type == type else array.cast(type)


def null_indices(array: pa.Array) -> list[int]:
    if not array.null_count:
        return []
    found: list[int] = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist()
    return found


def put_nulls(values: Values, array: pa.Array) -> Values:
    for index in null_indices(array):
        values[index] = None
    return values


def integers(array: pa.Array, width: pa.DataType) -> Numbers:
    """Return the numbers behind a column of times; nulls are zeros."""
    numbers = array.view(width)
    found: Numbers = (numbers.fill_null(0) if numbers.null_count else numbers).to_numpy()
    return found


def write_leaf(type: pa.DataType, to_arrow: Write) -> Write:
    """Return an encoder whose error names the first value that does not fit."""

    def write(values: Values) -> pa.Array:
        try:
            array = to_arrow(values)
        except (pa.ArrowException, OverflowError, UnicodeError, TypeError, ValueError):
            for index, value in enumerate(values):
                try:
                    to_arrow([value])
                except (pa.ArrowException, ArithmeticError, TypeError, ValueError) as error:
                    found = misfit(type, value, str(error))
                    raise found.within(f"[{index}]", index=index) from error
            raise
        if isinstance(array, pa.ChunkedArray):
            raise ValueTypeError(
                f"{len(values)} values of {type_ddl(type)} exceed 2 GiB; encode fewer at once"
            )
        return array

    return write


def write_plain(type: pa.DataType) -> Write:
    return write_leaf(type, lambda values: pa.array(values, type))


def write_numbers(type: pa.DataType, form: str) -> Write:
    """Return an encoder of Python numbers of a form of `struct`, which packs them fastest."""

    def to_arrow(values: Values) -> pa.Array:
        try:
            packed = struct.pack(f"{len(values)}{form}", *values)
        except (struct.error, OverflowError):
            # A null among them, or a number that Arrow refuses with a better message.
            return pa.array(values, type)
        return pa.Array.from_buffers(type, len(values), [None, pa.py_buffer(packed)])

    return write_leaf(type, to_arrow)


def leaf(type: pa.DataType, normalise: Convert, read: Read, **more: Any) -> Codec:
    more.setdefault("write", write_plain(type))
    more.setdefault("read_keys", read)
    return Codec(type=type, arrow=type, normalise=normalise, read=read, **more)
