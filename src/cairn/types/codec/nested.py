"""Codecs of structs, arrays and maps, made of the codecs of their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, repeat

import numpy as np
import pyarrow as pa

from cairn.types import all_nullable, row_class
from cairn.types.codec.core import (
    Codec,
    Convert,
    Datum,
    FrozenMap,
    Read,
    Values,
    ValueTypeError,
    Write,
    builtin_type,
    field_step,
    if_some,
    misfit,
    put_nulls,
    same,
)

_OFFSET_MAX = 2**31 - 1
_make = tuple.__new__

CodecOf = Callable[[pa.DataType], Codec]


def _each(converts: list[Convert], make: Convert) -> Convert:
    """Convert one value per field, then call `make` with all of them."""
    if all(convert is same for convert in converts):
        return make
    parts = [if_some(convert) for convert in converts]
    return lambda value: make([part(v) for part, v in zip(parts, value, strict=True)])


def _blame(parts: Iterable[tuple[str, Convert, object]]) -> ValueTypeError:
    """Return the error of the part that a fast path refused; this finds it again, slowly."""
    for step, normalise, value in parts:
        try:
            normalise(value)
        except ValueTypeError as error:
            return error.within(step)
    raise AssertionError("a value was refused once and accepted the next time")


class _Fields:
    """The fields of a struct type."""

    def __init__(self, type: pa.DataType, codec: CodecOf) -> None:
        self.type = type
        self.names = [field.name for field in type]
        self.codecs = [codec(field.type) for field in type]
        self.known = frozenset(self.names)
        self.row = row_class(type)
        self.steps = [field_step(name) for name in self.names]
        self.required = [index for index, field in enumerate(type) if not field.nullable]
        """Indices of NOT NULL fields."""
        self.blanks = [
            None if field.nullable else part.blank
            for field, part in zip(type, self.codecs, strict=True)
        ]

    def spread(self, value: object) -> Sequence[Datum]:
        """Return a user's mapping, tuple or dataclass as one value per field."""
        if isinstance(value, Mapping):
            return self._by_name(value, value)
        if isinstance(value, tuple):
            own = getattr(value, "_fields", None) or getattr(value, "__fields__", None)
            # By position, a named tuple with its fields in another order would be misread.
            return self._by_name(dict(zip(own, value, strict=True)), value) if own else value
        if dataclasses.is_dataclass(value) and not isinstance(value, builtin_type):
            names = [field.name for field in dataclasses.fields(value)]
            return self._by_name({name: getattr(value, name) for name in names}, value)
        raise misfit(self.type, value)

    def _by_name(self, values: Mapping[str, Datum], value: object) -> Sequence[Datum]:
        for name in values:
            if name not in self.known:
                raise misfit(self.type, value, f"no field {name!r}")
        return [values.get(name) for name in self.names]


def struct_codec(type: pa.DataType, codec: CodecOf) -> Codec:
    fields = _Fields(type, codec)
    parts, row = fields.codecs, fields.row

    def make_row(values: Sequence[Datum]) -> Datum:
        return _make(row, values)

    # Most rows have nothing to change: a key is looked up for each of them.
    is_canonical = all(part.canonical is same for part in parts)
    return Codec(
        type=type,
        arrow=type,
        normalise=_struct_normaliser(fields),
        canonical=same if is_canonical else _each([part.canonical for part in parts], make_row),
        read=_struct_reader(fields, [part.read for part in parts]),
        read_keys=_struct_reader(fields, [part.read_keys for part in parts]),
        write=_struct_writer(fields),
        pack=_each([part.pack for part in parts], tuple),
        unpack=_each([part.unpack for part in parts], make_row),
        blank=_make(row, fields.blanks),
    )


def _struct_normaliser(fields: _Fields) -> Convert:
    type, row, spread, width = fields.type, fields.row, fields.spread, len(fields.names)
    normalisers = [part.normalise for part in fields.codecs]
    # Most parts are of the one class that needs no check: spare them the call.
    exacts = [part.exact for part in fields.codecs]
    # If every field has such a class, one comparison in C accepts the whole row.
    all_exact = None if None in exacts else tuple(exacts)
    required, make = fields.required, _make

    def normalise(value: Datum) -> Datum:
        kind = value.__class__
        values = value if kind is row or kind is tuple else spread(value)
        if all_exact is not None and tuple(map(builtin_type, values)) == all_exact:
            return value if kind is row else make(row, values)
        if len(values) != width:
            raise misfit(type, value, f"{len(values)} values for {width} fields")
        try:
            # zip(strict=True) would cost more than all the checks of a short row.
            fitted = [
                part if part.__class__ is exacts[i] or part is None else normalisers[i](part)
                for i, part in enumerate(values)
            ]
        except ValueTypeError:
            parts = zip(fields.steps, normalisers, values, strict=True)
            raise _blame(part for part in parts if part[2] is not None) from None
        for index in required:
            if fitted[index] is None:
                raise misfit(type[index].type, None, "it is NOT NULL").within(fields.steps[index])
        return make(row, fitted)

    return normalise


def _struct_reader(fields: _Fields, reads: Sequence[Read]) -> Read:
    row, width = fields.row, len(fields.names)

    def read(array: pa.Array) -> Values:
        if [field.name for field in array.type] != fields.names:
            array = array.cast(fields.type)
        if not width:
            return put_nulls([row()] * len(array), array)
        # flatten() hides what lies under a null struct, which may be anything.
        columns = array.flatten() if array.null_count else map(array.field, range(width))
        parts = [read_one(column) for read_one, column in zip(reads, columns, strict=True)]
        return put_nulls(list(map(_make, repeat(row), zip(*parts, strict=True))), array)

    return read


def _struct_writer(fields: _Fields) -> Write:
    width, blanks = len(fields.names), fields.blanks

    def write(values: Values) -> pa.Array:
        validity, count = None, len(values)
        try:
            flat = list(chain.from_iterable(values))
        except TypeError:
            validity = pa.array([value is not None for value in values]).buffers()[1]
            flat = list(chain.from_iterable(blanks if v is None else v for v in values))
        assert len(flat) == count * width, "a row of another width was not normalised"
        children = []
        for index, part in enumerate(fields.codecs):
            try:
                children.append(part.write(flat[index::width]))
            except ValueTypeError as error:
                if error.index is None:
                    raise
                at = error.index
                raise error.inner().within(f"[{at}]", fields.steps[index], index=at) from error
        return pa.StructArray.from_buffers(fields.type, count, [validity], children=children)

    return write


def _offsets(values: Values) -> tuple[pa.Array, pa.Array | None]:
    """Return Arrow's offsets of variable-length values, and which values are null."""
    try:
        lengths, nulls = list(map(len, values)), None
    except TypeError:
        lengths = [0 if value is None else len(value) for value in values]
        nulls = pa.array([value is None for value in values])
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] > _OFFSET_MAX:
        raise ValueTypeError(f"{ends[-1]} elements do not fit one column; encode fewer at once")
    return pa.array(ends, pa.int32()), nulls


def _write_child(child: Codec, parts: Values, offsets: pa.Array) -> pa.Array:
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


def list_codec(type: pa.DataType, codec: CodecOf) -> Codec:
    child = codec(type.value_type)
    normalise_part, exact = child.normalise, child.exact

    def normalise(value: object) -> tuple[Datum, ...]:
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
            raise misfit(type, value)
        if exact is not None and set(map(builtin_type, value)) == {exact}:
            return tuple(value)
        try:
            return tuple([None if part is None else normalise_part(part) for part in value])
        except ValueTypeError:
            parts = ((f"[{i}]", normalise_part, p) for i, p in enumerate(value) if p is not None)
            raise _blame(parts) from None

    def canonical(value: tuple[Datum, ...]) -> tuple[Datum, ...]:
        return tuple([None if part is None else child.canonical(part) for part in value])

    def reader(read_child: Read) -> Read:
        def read(array: pa.Array) -> Values:
            if not pa.types.is_list(array.type) and not pa.types.is_large_list(array.type):
                array = array.cast(type)
            parts = tuple(read_child(array.flatten()))
            return put_nulls([parts[start:stop] for start, stop in _bounds(array)], array)

        return read

    def write(values: Values) -> pa.Array:
        offsets, nulls = _offsets(values)
        flat = list(chain.from_iterable(value for value in values if value is not None))
        parts = _write_child(child, flat, offsets)
        return pa.ListArray.from_arrays(offsets, parts, type=type, mask=nulls)

    pack_part, unpack_part = if_some(child.pack), if_some(child.unpack)

    return Codec(
        type=type,
        arrow=type,
        normalise=normalise,
        canonical=canonical,
        read=reader(child.read),
        read_keys=reader(child.read_keys),
        write=write,
        pack=same if pack_part is same else lambda value: tuple(map(pack_part, value)),
        unpack=tuple if unpack_part is same else lambda parts: tuple(map(unpack_part, parts)),
        blank=(),
    )


def map_codec(type: pa.DataType, codec: CodecOf) -> Codec:
    key, item = codec(type.key_type), codec(type.item_type)

    def normalise(value: object) -> FrozenMap:
        if not isinstance(value, Mapping):
            raise misfit(type, value)
        try:
            return FrozenMap(
                (key.normalise_key(k), None if v is None else item.normalise(v))
                for k, v in value.items()
            )
        except ValueTypeError:
            keys = (("", key.normalise, k) for k in value)
            items = ((f"[{k!r}]", item.normalise, v) for k, v in value.items() if v is not None)
            raise _blame(chain(keys, items)) from None

    def read(array: pa.Array) -> Values:
        # Arrow's MapArray has neither flatten nor lengths; the list it is made of has both.
        # Under a null struct, fields that are NOT NULL may be null: Arrow would refuse those.
        items = array.type.item_field
        entry = pa.struct([array.type.key_field, items.with_type(all_nullable(items.type))])
        entries = array.cast(pa.list_(pa.field("entries", entry, nullable=False)))
        keys, items = entries.flatten().flatten()
        pairs = list(zip(key.read_keys(keys), item.read(items), strict=True))
        return put_nulls([FrozenMap(pairs[a:b]) for a, b in _bounds(entries)], array)

    def write(values: Values) -> pa.Array:
        offsets, nulls = _offsets(values)
        some = [value for value in values if value is not None]
        keys = _write_child(key, list(chain.from_iterable(some)), offsets)
        flat = list(chain.from_iterable(value.values() for value in some))
        items = _write_child(item, flat, offsets)
        return pa.MapArray.from_arrays(offsets, keys, items, type=type, mask=nulls)

    pack_item, unpack_item = if_some(item.pack), if_some(item.unpack)

    # Pairs: msgpack would hold a map, but not with every kind of key.
    def pack(value: FrozenMap) -> Values:
        return [(key.pack(k), pack_item(v)) for k, v in value.items()]

    def unpack(pairs: Values) -> FrozenMap:
        return FrozenMap((key.canonical(key.unpack(k)), unpack_item(v)) for k, v in pairs)

    return Codec(
        type=type,
        arrow=type,
        normalise=normalise,
        read=read,
        read_keys=read,
        write=write,
        pack=pack,
        unpack=unpack,
        blank=FrozenMap(),
    )
