"""The codec of a type."""

from __future__ import annotations

import functools

import pyarrow as pa

from cairn.types import OBJECT, TypeLike, contains_map, parse_type
from cairn.types.codec import leaves, nested
from cairn.types.codec.core import Codec


@functools.cache
def codec(type: TypeLike) -> Codec:
    """Return the codec of a type, given as anything parse_type accepts."""
    parsed = parse_type(type)
    # Equal types share one codec however they were declared.
    return codec(parsed) if parsed is not type and parsed != type else _build(parsed)


def is_hashable(type: pa.DataType) -> bool:
    """True if values of the type can be keys: it contains no map and is not OBJECT."""
    return type is not OBJECT and not contains_map(type)


def _build(type: pa.DataType) -> Codec:
    if type is OBJECT:
        return leaves.object_codec()
    if pa.types.is_struct(type):
        return nested.struct_codec(type, codec)
    if pa.types.is_list(type):
        return nested.list_codec(type, codec)
    if pa.types.is_map(type):
        return nested.map_codec(type, codec)
    if pa.types.is_integer(type):
        return leaves.integer_codec(type)
    if pa.types.is_floating(type):
        return leaves.floating_codec(type)
    if pa.types.is_decimal(type):
        return leaves.decimal_codec(type)
    if pa.types.is_timestamp(type):
        return leaves.timestamp_codec(type) if type.tz else leaves.timestamp_ntz_codec(type)
    if pa.types.is_date32(type):
        return leaves.date_codec(type)
    if pa.types.is_duration(type):
        return leaves.duration_codec(type)
    return leaves.plain_codec(type)
