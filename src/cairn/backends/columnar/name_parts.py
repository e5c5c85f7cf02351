"""Parts of names as integers, and back, for the index of names.

Always true here:
- integers are equal exactly when Spark groups the values together: one NaN, no -0.0;
- a bit marks null; the integer in its place is zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.columnar.int_index import Names
from cairn.backends.columnar.long_texts import BYTE_MASKS, LongTexts
from cairn.backends.columnar.spread import form_of, is_fixed, valid_buffer, validity
from cairn.key_groups import text_words
from cairn.types.codec import Key, codec
from cairn.types.codec.core import Values

Ints = npt.NDArray[np.int64]

_SHORT_BYTES_MAX = 15
_NULL_BITS_MAX = 31
"""Limit of a part: the bits of key and entry together must fit an integer."""
_NUMBERED_BYTES = 300
"""Approximate size of a value that is a Python object, with its places in a dict and a list."""


class Part(ABC):
    """One type of a name: `width` integers, and `bits` bits that mark nulls."""

    width = 1
    bits = 1

    @property
    def nbytes(self) -> int:
        """Approximate bytes of the values that have a number."""
        return 0

    @abstractmethod
    def split(self, array: pa.Array, *, add: bool) -> tuple[list[Ints], Ints | None]:
        """Return a column as integers, and its null bits; with `add`, new values get a number."""

    @abstractmethod
    def join(self, names: Names, at: int, bit: int, *, nullable: bool = True) -> pa.Array:
        """Return the column. Without `nullable`, nulls lie under a null struct."""


class _FixedPart(Part):
    def __init__(self, type: pa.DataType) -> None:
        self._form = form_of(type)
        self._dtype = self._form.dtypes[1]
        self.width = 2 if self._dtype.kind == "V" else 1

    def split(self, array: pa.Array, *, add: bool) -> tuple[list[Ints], Ints | None]:
        valid, data = self._form.split(array)
        assert data is not None
        flags = None
        if valid is not None:
            data = data.copy()
            data[~valid] = np.zeros(1, data.dtype)[0]
            flags = (~valid).astype(np.int64)
        if self._dtype.kind == "f":
            data = data + self._dtype.type(0.0)  # No -0.0.
            data[np.isnan(data)] = np.nan
            data = data.view(f"i{self._dtype.itemsize}")
        if self.width == 2:
            pairs = np.ascontiguousarray(data).view(np.int64).reshape(-1, 2)
            return [np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])], flags
        return [np.ascontiguousarray(data, np.int64)], flags

    def join(self, names: Names, at: int, bit: int, *, nullable: bool = True) -> pa.Array:
        if self.width == 2:
            pairs = np.stack(names.columns[at : at + 2], axis=1)
            data = np.ascontiguousarray(pairs).view(self._dtype).reshape(-1)
        elif self._dtype.kind == "f":
            bits = names.columns[at].astype(f"i{self._dtype.itemsize}")
            data = bits.view(self._dtype)
        else:
            data = names.columns[at].astype(self._dtype)
        return self._form.join([_valid(names, bit) if nullable else None, data])


class _NumberedPart(Part):
    """Values that get their numbers from a dict; null is one of them."""

    bits = 0

    def __init__(self, type: pa.DataType) -> None:
        self._codec = codec(type)
        self._numbers: dict[Key, int] = {}
        self._values: Values = []

    @property
    def nbytes(self) -> int:
        return _NUMBERED_BYTES * len(self._values)

    def split(self, array: pa.Array, *, add: bool) -> tuple[list[Ints], Ints | None]:
        keys = self._codec.decode_keys(array)
        numbers, values = self._numbers, self._values
        if add:
            for key in dict.fromkeys(keys):
                if key not in numbers:
                    numbers[key] = len(values)
                    values.append(key)
        get = numbers.get
        return [np.fromiter((get(key, -1) for key in keys), np.int64, len(keys))], None

    def join(self, names: Names, at: int, bit: int, *, nullable: bool = True) -> pa.Array:
        values = self._values
        found = [values[number] for number in names.columns[at].tolist()]
        if not nullable:
            found = [self._codec.blank if value is None else value for value in found]
        return self._codec.encode(found)


class _TextPart(Part):
    """Text or binary: up to 15 bytes are the integers themselves, longer values get a number."""

    width = 2

    def __init__(self, type: pa.DataType) -> None:
        self._type = type
        self._longer = LongTexts(type)

    @property
    def nbytes(self) -> int:
        return self._longer.nbytes

    def split(self, array: pa.Array, *, add: bool) -> tuple[list[Ints], Ints | None]:
        starts, lengths, data = text_words(array)
        words = data.view(np.int64)
        valid = validity(array)
        if valid is not None:
            lengths = np.where(valid, lengths, 0)
        first = words[starts] & BYTE_MASKS[np.minimum(lengths, 8)]
        second = words[starts + 8] & BYTE_MASKS[np.clip(lengths - 8, 0, 7)]
        second |= lengths << 56
        is_long = np.flatnonzero(lengths > _SHORT_BYTES_MAX)
        if len(is_long):
            longer = array if len(is_long) == len(array) else array.take(pa.array(is_long))
            first[is_long] = self._longer.number(
                longer, starts[is_long], lengths[is_long], words, add=add
            )
            second[is_long] = -1
        return [first, second], None if valid is None else (~valid).astype(np.int64)

    def join(self, names: Names, at: int, bit: int, *, nullable: bool = True) -> pa.Array:
        first, second = names.columns[at : at + 2]
        is_long = second < 0
        lengths = np.where(is_long, 0, second >> 56)
        each = np.stack([first, second], axis=1).view(np.uint8)
        offsets = np.zeros(len(first) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        data = each[np.arange(16) < lengths[:, None]]
        valid = _valid(names, bit) if nullable else None
        buffers = [valid_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(data)]
        array = pa.Array.from_buffers(self._type, len(first), buffers)
        if is_long.any():
            longer = self._longer.values(first[is_long])
            array = pc.replace_with_mask(array, pa.array(is_long), longer)
        return array


class _StructPart(Part):
    """Several columns that make a key, or a key that is a struct."""

    def __init__(self, type: pa.DataType) -> None:
        self._type = type
        self._parts = [part_of(field.type) for field in type]
        self.width = sum(part.width for part in self._parts)
        self.bits = 1 + sum(part.bits for part in self._parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def split(self, array: pa.Array, *, add: bool) -> tuple[list[Ints], Ints | None]:
        valid = validity(array)
        flags = None if valid is None else (~valid).astype(np.int64)
        columns: list[Ints] = []
        bit = 1
        # A flattened field is null where the struct is.
        for part, field in zip(self._parts, array.flatten(), strict=True):
            more, inner = part.split(field, add=add)
            columns += more
            if inner is not None:
                inner = inner << bit
                flags = inner if flags is None else flags | inner
            bit += part.bits
        return columns, flags

    def join(self, names: Names, at: int, bit: int, *, nullable: bool = True) -> pa.Array:
        valid = _valid(names, bit) if nullable else None
        bit += 1
        columns = []
        for part, field in zip(self._parts, self._type, strict=True):
            columns.append(part.join(names, at, bit, nullable=field.nullable))
            at += part.width
            bit += part.bits
        mask = None if valid is None else pa.array(~valid)
        return pa.StructArray.from_arrays(columns, fields=list(self._type), mask=mask)


def part_of(type: pa.DataType) -> Part:
    if pa.types.is_struct(type) and type.num_fields:
        struct = _StructPart(type)
        if struct.bits <= _NULL_BITS_MAX:
            return struct
    if pa.types.is_string(type) or pa.types.is_binary(type):
        return _TextPart(type)
    return _FixedPart(type) if is_fixed(type) else _NumberedPart(type)


def _valid(names: Names, bit: int) -> npt.NDArray[np.bool_] | None:
    if names.nulls is None:
        return None
    is_null = (names.nulls >> bit) & 1
    return is_null == 0 if is_null.any() else None
