"""Arrow columns spread over numpy arrays, and back.

A form belongs to one type and defines the arrays of its values: for a number its validity and its
data; for a struct its validity, then the arrays of its fields. Data of fixed width keeps its
width. Text and binary are places in the texts of the form. Lists and maps are Python objects, as
their codec has them.

Always true here:
- join(split(column)) equals the column;
- a validity of None means that nothing is null;
- data under a null is arbitrary; `join` makes it blank, so that equal columns have equal bytes;
- arrays belong to the form that made them: another one may not have their texts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.backends.columnar.texts import MOVED_ROWS, Texts
from cairn.types.codec import codec

Array = npt.NDArray[Any]
Arrays = list[Array | None]


class Form(ABC):
    """The arrays of values of one type."""

    def __init__(self, type: pa.DataType) -> None:
        self.type = type
        self.dtypes: list[np.dtype[Any]] = [np.dtype(np.bool_)]
        """Dtype of each array. A validity (always bool) comes before its data."""
        self.is_validity: list[bool] = [True]

    @property
    def width(self) -> int:
        return len(self.dtypes)

    @abstractmethod
    def split(self, array: pa.Array) -> Arrays:
        """Return the arrays of a column of exactly this type."""

    @abstractmethod
    def join(
        self, arrays: Sequence[Array | None], inside: Array | None = None, *, nullable: bool = True
    ) -> pa.Array:
        """Return the column of these arrays, which must not be written to afterwards.

        `inside` marks the rows in which the struct around a field is not null. A field that is
        not nullable has no validity; its data in the other rows is blank all the same.
        """

    @property
    def text_bytes(self) -> int:
        """Bytes of all texts that were ever split."""
        return 0

    def text_bytes_of(self, arrays: Sequence[Array | None]) -> int:
        """Return the bytes of the texts in these arrays."""
        return 0

    def renew(self, arrays: Arrays) -> tuple[Form, Arrays]:
        """Return a form with the texts of these arrays only, and the arrays in it."""
        return self, arrays


class FixedForm(Form):
    """Numbers, times and decimals: values of one width."""

    def __init__(self, type: pa.DataType) -> None:
        super().__init__(type)
        self._is_bool = pa.types.is_boolean(type)
        dtype = np.dtype(np.bool_ if self._is_bool else _dtype_of(type))
        self.dtypes.append(dtype)
        self.is_validity.append(False)

    def split(self, array: pa.Array) -> Arrays:
        valid = validity(array)
        if self._is_bool:
            filled = array if valid is None else array.fill_null(False)
            return [valid, filled.to_numpy(zero_copy_only=False)]
        buffer = array.buffers()[1]
        if not len(array) or buffer is None:
            return [valid, np.zeros(len(array), self.dtypes[1])]
        data = np.frombuffer(buffer, self.dtypes[1], array.offset + len(array))
        return [valid, data[array.offset :]]

    def join(
        self, arrays: Sequence[Array | None], inside: Array | None = None, *, nullable: bool = True
    ) -> pa.Array:
        valid, data = _both(arrays[0], inside), arrays[1]
        assert data is not None
        count = len(data)
        if valid is not None:
            data = data.copy()
            data[~valid] = np.zeros(1, data.dtype)[0]
        if self._is_bool:
            data = np.packbits(data, bitorder="little")
        validity = valid_buffer(valid) if nullable else None
        data_buffer = pa.py_buffer(np.ascontiguousarray(data))
        return pa.Array.from_buffers(self.type, count, [validity, data_buffer])


class TextForm(Form):
    """Text and binary."""

    def __init__(self, type: pa.DataType) -> None:
        super().__init__(type)
        self._texts = Texts(type)
        self.dtypes.append(np.dtype(np.int64))
        self.is_validity.append(False)

    def split(self, array: pa.Array) -> Arrays:
        return [validity(array), self._texts.add(array)]

    def join(
        self, arrays: Sequence[Array | None], inside: Array | None = None, *, nullable: bool = True
    ) -> pa.Array:
        valid, places = _both(arrays[0], inside), arrays[1]
        assert places is not None
        if valid is not None:
            places = np.where(valid, places, 0)
        return self._texts.take(places, valid_buffer(valid) if nullable else None)

    @property
    def text_bytes(self) -> int:
        return self._texts.nbytes

    def text_bytes_of(self, arrays: Sequence[Array | None]) -> int:
        places = arrays[1]
        assert places is not None
        return self._texts.size_of(places)

    def renew(self, arrays: Arrays) -> tuple[Form, Arrays]:
        fresh = TextForm(self.type)
        valid, places = arrays
        assert places is not None
        moved = np.empty(len(places), np.int64)
        for start in range(0, len(places), MOVED_ROWS):
            piece = slice(start, start + MOVED_ROWS)
            some = self.join([None if valid is None else valid[piece], places[piece]])
            moved[piece] = fresh._texts.add(some)
        return fresh, [valid, moved]


class ObjectForm(Form):
    """Values with parts."""

    def __init__(self, type: pa.DataType) -> None:
        super().__init__(type)
        self._codec = codec(type)
        self.dtypes.append(np.dtype(object))
        self.is_validity.append(False)

    def split(self, array: pa.Array) -> Arrays:
        return [validity(array), np.fromiter(self._codec.decode(array), object, len(array))]

    def join(
        self, arrays: Sequence[Array | None], inside: Array | None = None, *, nullable: bool = True
    ) -> pa.Array:
        valid, data = _both(arrays[0], inside), arrays[1]
        assert data is not None
        values = data.tolist()
        if valid is not None:
            blank = None if nullable else self._codec.blank
            for at in np.flatnonzero(~valid).tolist():
                values[at] = blank
        return self._codec.encode(values)


class StructForm(Form):
    """A validity of its own, then the fields."""

    def __init__(self, type: pa.DataType) -> None:
        super().__init__(type)
        self._fields = list(type)
        self._forms = [form_of(field.type) for field in type]
        for form in self._forms:
            self.dtypes += form.dtypes
            self.is_validity += form.is_validity

    def split(self, array: pa.Array) -> Arrays:
        arrays: Arrays = [validity(array)]
        for at, form in enumerate(self._forms):
            arrays += form.split(array.field(at))
        return arrays

    def join(
        self, arrays: Sequence[Array | None], inside: Array | None = None, *, nullable: bool = True
    ) -> pa.Array:
        valid = _both(arrays[0], inside)
        columns = [
            form.join(part, valid, nullable=field.nullable)
            for (form, part), field in zip(self._parts(arrays), self._fields, strict=True)
        ]
        mask = None if valid is None or not nullable else pa.array(~valid)
        return pa.StructArray.from_arrays(columns, fields=self._fields, mask=mask)

    def field(self, name: str) -> tuple[Form, slice]:
        """Return the form of a field, and its place among the arrays."""
        number = self.type.get_field_index(name)
        start = 1 + sum(form.width for form in self._forms[:number])
        return self._forms[number], slice(start, start + self._forms[number].width)

    @property
    def text_bytes(self) -> int:
        return sum(form.text_bytes for form in self._forms)

    def text_bytes_of(self, arrays: Sequence[Array | None]) -> int:
        return sum(form.text_bytes_of(part) for form, part in self._parts(arrays))

    def renew(self, arrays: Arrays) -> tuple[Form, Arrays]:
        fresh = StructForm(self.type)
        fresh._forms = []
        renewed: Arrays = arrays[:1]
        for form, part in self._parts(arrays):
            new, moved = form.renew(part)
            fresh._forms.append(new)
            renewed += moved
        return fresh, renewed

    def _parts(self, arrays: Sequence[Array | None]) -> Iterator[tuple[Form, Arrays]]:
        at = 1
        for form in self._forms:
            yield form, list(arrays[at : at + form.width])
            at += form.width


class Columns:
    """Values of one type by position, in arrays that grow."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.size = 0
        self._arrays: Arrays = [
            None if is_validity else np.empty(0, dtype)
            for dtype, is_validity in zip(form.dtypes, form.is_validity, strict=True)
        ]

    def reserve(self, size: int) -> None:
        if size > self.size:
            self.size = max(1024, size, self.size * 3 // 2)
            self._arrays = [grow(array, self.size) for array in self._arrays]

    def take(self, positions: Array, part: slice = slice(None)) -> Arrays:
        """Return the values at positions; of a struct, `part` has the arrays of one field."""
        return [None if array is None else array[positions] for array in self._arrays[part]]

    def put(self, positions: Array, arrays: Arrays) -> None:
        """Write values; the last ones win if a position is given twice."""
        for at, values in enumerate(arrays):
            held = self._arrays[at]
            if values is None:
                if held is not None:
                    held[positions] = True
                continue
            if held is None:
                if values.all():
                    continue
                held = self._arrays[at] = np.ones(self.size, np.bool_)
            held[positions] = values

    def copy_first(self, count: int) -> Columns:
        copy = Columns(self.form)
        copy.size = count
        copy._arrays = [None if array is None else array[:count].copy() for array in self._arrays]
        return copy


def form_of(type: pa.DataType) -> Form:
    """Return a new form of a type."""
    if pa.types.is_struct(type) and type.num_fields:
        return StructForm(type)
    if is_fixed(type):
        return FixedForm(type)
    if pa.types.is_string(type) or pa.types.is_binary(type):
        return TextForm(type)
    return ObjectForm(type)


def is_fixed(type: pa.DataType) -> bool:
    """True if all values of the type have the same width and no parts."""
    return bool(pa.types.is_primitive(type) or pa.types.is_decimal128(type))


def _dtype_of(type: pa.DataType) -> str:
    if pa.types.is_decimal128(type):
        return "V16"
    if pa.types.is_floating(type):
        return f"f{type.bit_width // 8}"
    return f"i{type.bit_width // 8}"


def validity(array: pa.Array) -> Array | None:
    if not array.null_count:
        return None
    valid: Array = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _both(valid: Array | None, inside: Array | None) -> Array | None:
    if valid is None or inside is None:
        return inside if valid is None else valid
    return valid & inside


def valid_buffer(valid: Array | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def grow(array: Any, size: int) -> Any:
    """Return a longer copy, filled up with zero, False or None."""
    if array is None:
        return None
    longer = np.empty(size, object) if array.dtype == object else np.zeros(size, array.dtype)
    longer[: len(array)] = array
    return longer
