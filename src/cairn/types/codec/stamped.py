"""Values that expire are stored with the time they were written, in milliseconds.

In Arrow a stamped value is `struct<at: bigint, value: T>`, in memory a pair.

Always true here:
- a pair is a plain tuple: the garbage collector does not track millions of them;
- `split_stamps` and `join_stamps` undo each other, for lists item by item.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pyarrow as pa

from cairn.types.codec.core import Codec, Datum, Values, put_nulls, same
from cairn.types.codec.registry import codec

_AT = pa.int64()


def stamp_type(type: pa.DataType) -> pa.DataType:
    """Return the stored type of stamped values of an Arrow type."""
    return pa.struct([pa.field("at", _AT), pa.field("value", type)])


@functools.cache
def stamp_codec(type: pa.DataType) -> Codec:
    """Return the codec of (at, value) pairs of a declared type."""
    plain = codec(type)
    whole = codec(stamp_type(plain.arrow))
    read_at = codec(_AT).read

    def read(array: pa.Array) -> Values:
        # flatten() hides what lies under a null struct, which may be anything.
        at, values = array.flatten() if array.null_count else (array.field(0), array.field(1))
        return put_nulls(list(zip(read_at(at), plain.read(values), strict=True)), array)

    def unpack(pair: Datum) -> Datum:
        at, value = pair
        return at, None if value is None else plain.unpack(value)

    return dataclasses.replace(whole, read=read, unpack=tuple if plain.unpack is same else unpack)


def split_stamps(values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the times and the values of stamped values, or of lists of them."""
    if not pa.types.is_list(values.type):
        at, plain = values.flatten()
        return at, plain
    offsets, items, nulls = list_parts(values)
    at, plain = items.flatten()
    return (
        pa.ListArray.from_arrays(offsets, at, mask=nulls),
        pa.ListArray.from_arrays(offsets, plain, mask=nulls),
    )


def join_stamps(at: pa.Array, values: pa.Array, live: pa.Array) -> pa.Array:
    """Return stamped values, null where they are not live; `live` does not apply to lists."""
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
    type = stamp_type(values.type)
    # Not from_arrays: it would refuse nulls in the NOT NULL fields of deleted values.
    return pa.StructArray.from_buffers(type, len(values), [validity], children=[at, values])


def list_parts(array: pa.ListArray) -> tuple[pa.Array, pa.Array, pa.Array | None]:
    """Return offsets from zero, the items, and a mask of the null lists."""
    ends = array.offsets.to_numpy()
    first, last = (int(ends[0]), int(ends[-1])) if len(ends) else (0, 0)
    offsets = pa.array(ends - first if len(ends) else [0], pa.int32())
    nulls = array.is_null() if array.null_count else None
    return offsets, array.values.slice(first, last - first), nulls
