"""Values that expire, as they are stored: each with the time it was written.

In Arrow `struct<at: bigint, value: T>`, in memory a pair of the two. `at` is in milliseconds.

Always true here:
- a pair is a plain tuple: millions of them are no work for Python's collector;
- `split` and `joined` undo each other, for lists item by item.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.types.codec.base import Codec, Values, put_nulls, same
from cairn.types.codec.registry import codec

_AT = pa.int64()


def stamped_type(type: pa.DataType) -> pa.DataType:
    """Of the Arrow type of the values alone."""
    return pa.struct([pa.field("at", _AT), pa.field("value", type)])


@functools.cache
def stamped_codec(type: Any) -> Codec:
    """The codec of (at, value) pairs of a declared type."""
    plain = codec(type)
    whole = codec(stamped_type(plain.arrow))
    read_at = codec(_AT).read

    def read(array: pa.Array) -> Values:
        # flatten() hides what lies under a null struct, which may be anything.
        at, values = array.flatten() if array.null_count else (array.field(0), array.field(1))
        return put_nulls(list(zip(read_at(at), plain.read(values), strict=True)), array)

    def unpack(pair: Any) -> Any:
        at, value = pair
        return at, None if value is None else plain.unpack(value)

    return dataclasses.replace(whole, read=read, unpack=tuple if plain.unpack is same else unpack)


def split(values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """(times, values) of stamped values, or of lists of them."""
    if not pa.types.is_list(values.type):
        at, plain = values.flatten()
        return at, plain
    offsets, items, nulls = list_parts(values)
    at, plain = items.flatten()
    return (
        pa.ListArray.from_arrays(offsets, at, mask=nulls),
        pa.ListArray.from_arrays(offsets, plain, mask=nulls),
    )


def joined(at: pa.Array, values: pa.Array, live: pa.Array) -> pa.Array:
    """Stamped values, null where they are not live. Lists stay as they are."""
    if pa.types.is_list(values.type):
        offsets, items, nulls = list_parts(values)
        _, stamps, _ = list_parts(at)
        return pa.ListArray.from_arrays(offsets, _pairs(stamps, items, None), mask=nulls)
    return _pairs(at, values, live)


def _pairs(at: pa.Array, values: pa.Array, live: pa.Array | None) -> pa.Array:
    validity = None
    if live is not None:
        bits = np.packbits(live.to_numpy(zero_copy_only=False), bitorder="little")
        validity = pa.py_buffer(bits)
    type = stamped_type(values.type)
    # Not from_arrays: it would refuse nulls in the NOT NULL fields of what is deleted.
    return pa.StructArray.from_buffers(type, len(values), [validity], children=[at, values])


def list_parts(array: pa.ListArray) -> tuple[pa.Array, pa.Array, pa.Array | None]:
    """Offsets from zero, the items they are of, and which lists are null."""
    ends = array.offsets.to_numpy()
    first, last = (int(ends[0]), int(ends[-1])) if len(ends) else (0, 0)
    offsets = pa.array(ends - first if len(ends) else [0], pa.int32())
    nulls = array.is_null() if array.null_count else None
    return offsets, array.values.slice(first, last - first), nulls
