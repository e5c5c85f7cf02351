"""Codecs of structs, arrays and maps, made of the codecs of their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.types import all_nullable, row_class
from cairn.types.codec.base import (
    Codec,
    Convert,
    FrozenMap,
    Values,
    ValueTypeError,
    misfit,
    put_nulls,
    same,
)

# Codecs call their type `type`, as users do; the builtin needs another name beside it.
builtin_type = type
_OFFSET_MAX = 2**31 - 1

CodecOf = Callable[[Any], Codec]


def _if_some(convert: Convert) -> Convert:
    """The same for places that may be null."""
    if convert is same:
        return same
    return lambda value: None if value is None else convert(value)


def _each(converts: list[Convert], make: Convert) -> Convert:
    """One value of each field, together as `make` wants them."""
    if all(convert is same for convert in converts):
        return make
    parts = [_if_some(convert) for convert in converts]
    return lambda value: make([part(v) for part, v in zip(parts, value, strict=True)])


def _blame(parts: Iterable[tuple[str, Callable[[Any], Any], Any]]) -> ValueTypeError:
    """Find again, slowly, the part that a fast path refused."""
    for step, normalise, value in parts:
        try:
            normalise(value)
        except ValueTypeError as error:
            return error.within(step)
    raise AssertionError("a value was refused once and accepted the next time")


def struct_codec(type: pa.DataType, codec: CodecOf) -> Codec:
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
                raise misfit(type, origin, f"no field {name!r}")
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
        raise misfit(type, value)

    def normalise(value: Any) -> Any:
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
            parts = zip(steps, normalisers, values, strict=True)
            raise _blame(part for part in parts if part[2] is not None) from None
        for index in required:
            if fitted[index] is None:
                raise misfit(type[index].type, None, "it is NOT NULL").within(steps[index])
        return make(row, fitted)

    def canonical(value: Any) -> Any:
        parts = zip(fields, value, strict=True)
        return make(row, [None if part is None else f.canonical(part) for f, part in parts])

    def reader(reads: list[Callable[[pa.Array], Values]]) -> Any:
        def read(array: pa.Array) -> Values:
            if [field.name for field in array.type] != names:
                array = array.cast(type)
            if not width:
                return put_nulls([row()] * len(array), array)
            # flatten() hides what lies under a null struct, which may be anything.
            columns = array.flatten() if array.null_count else map(array.field, range(width))
            parts = [read_one(column) for read_one, column in zip(reads, columns, strict=True)]
            return put_nulls(list(map(make, repeat(row), zip(*parts, strict=True))), array)

        return read

    blanks = [None if f.nullable else c.blank for f, c in zip(type, fields, strict=True)]

    def write(values: Values) -> pa.Array:
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
        # Most rows have nothing to change: a key is looked up for each of them.
        canonical=same if all(field.canonical is same for field in fields) else canonical,
        read=reader([field.read for field in fields]),
        read_keys=reader([field.read_keys for field in fields]),
        write=write,
        pack=_each([field.pack for field in fields], tuple),
        unpack=_each([field.unpack for field in fields], lambda parts: make(row, parts)),
        blank=make(row, blanks),
    )


def _offsets(values: Values) -> tuple[pa.Array, pa.Array | None]:
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

    def normalise(value: Any) -> tuple[Any, ...]:
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

    def canonical(value: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([None if part is None else child.canonical(part) for part in value])

    def reader(read_child: Callable[[pa.Array], Values]) -> Any:
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

    pack_part, unpack_part = _if_some(child.pack), _if_some(child.unpack)

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

    def normalise(value: Any) -> FrozenMap:
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

    pack_item, unpack_item = _if_some(item.pack), _if_some(item.unpack)

    # Pairs: msgpack would hold a map, but not with every kind of key.
    def pack(value: FrozenMap) -> list[Any]:
        return [(key.pack(k), pack_item(v)) for k, v in value.items()]

    def unpack(pairs: list[Any]) -> FrozenMap:
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
