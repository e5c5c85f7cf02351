"""Key groups: the same key has the same group in Spark, in a slot and in a client.

A key's group is `pmod(xxhash64(columns…), group_count)`; subtasks own contiguous
ranges of groups. The hash here is Spark's xxhash64 bit for bit: XXH64 with seed
42, where each value's hash is the seed of the next and a null changes nothing.

Always true here:
- hash_key(values, types) equals Spark's xxhash64 over columns of those types;
- every NaN hashes alike, and -0.0 hashes as 0.0, at any depth;
- groups_of partitions range(group_count) and agrees with subtask_of;
- a type whose hash Spark refuses (a map inside) is refused here.
"""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from xxhash import xxh64_intdigest

from cairn.errors import PlanError
from cairn.types import OBJECT, contains_map, type_ddl

_SEED = 42
_EPOCH_UTC = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_EPOCH_NTZ = dt.datetime(1970, 1, 1)
_EPOCH_ORDINAL = dt.date(1970, 1, 1).toordinal()
_MICROSECOND = dt.timedelta(microseconds=1)
# Wide enough for any decimal(38, s): scaling must never round.
_EXACT = decimal.Context(prec=76)

_pack_int = struct.Struct("<i").pack
_pack_long = struct.Struct("<q").pack
_pack_float = struct.Struct("<f").pack
_pack_double = struct.Struct("<d").pack

# A hasher takes a value that is not None and the seed so far (unsigned), and gives the next seed.
_Hasher = Callable[[Any, int], int]


def key_hasher(types: Sequence[pa.DataType]) -> Callable[[Sequence[Any]], int]:
    """hash_key for keys of these types, several times faster for the second key on."""
    hashers = [_hasher(type) for type in types]

    def hash_values(values: Sequence[Any]) -> int:
        assert len(values) == len(hashers), "a key has one value per key column"
        digest = _SEED
        for index, value in enumerate(values):
            if value is not None:
                digest = hashers[index](value, digest)
        return digest - (1 << 64) if digest >> 63 else digest

    return hash_values


def hash_key(values: Sequence[Any], types: Sequence[pa.DataType]) -> int:
    """Spark's `xxhash64(values…)` as a signed 64-bit integer."""
    return key_hasher(types)(values)


def key_group(values: Sequence[Any], types: Sequence[pa.DataType], group_count: int) -> int:
    """The index of the key's group, from 0 to group_count - 1."""
    return hash_key(values, types) % group_count


def subtask_of(group: int, parallelism: int, group_count: int) -> int:
    """The subtask that owns a key group."""
    return group * parallelism // group_count


def groups_of(subtask: int, parallelism: int, group_count: int) -> range:
    """The key groups a subtask owns; empty when there are more subtasks than groups."""
    start = -(-subtask * group_count // parallelism)
    stop = -(-(subtask + 1) * group_count // parallelism)
    return range(start, stop)


def spark_key_group_sql(columns: Sequence[tuple[str, pa.DataType]], group_count: int) -> str:
    """The SQL that computes key_group over column expressions given as SQL text."""
    if not columns:
        raise PlanError("a key needs at least one column, found none")
    for _, type in columns:
        _hasher(type)
    arguments = ", ".join(_normalised_sql(text, type) for text, type in columns)
    return f"CAST(pmod(xxhash64({arguments}), {group_count}L) AS INT)"


def _normalised_sql(text: str, type: pa.DataType) -> str:
    # Spark 4.3 hashes -0.0 as 0.0 by itself; adding zero keeps that true should it ever stop.
    if pa.types.is_float64(type):
        return f"({text} + 0.0D)"
    if pa.types.is_float32(type):
        return f"({text} + CAST(0 AS FLOAT))"
    return text


@functools.cache
def _hasher(type: pa.DataType) -> _Hasher:
    if type in _SCALARS:
        return _SCALARS[type]
    if type is not OBJECT and not contains_map(type):
        return _built_hasher(type)
    raise PlanError(
        f"a key cannot be {type_ddl(type)}: Spark does not hash it\n"
        "  next: key by columns without maps and objects",
        type=type,
    )


def _built_hasher(type: pa.DataType) -> _Hasher:
    if pa.types.is_decimal128(type):
        return _decimal_hasher(type.precision, type.scale)
    if pa.types.is_list(type):
        return _list_hasher(_hasher(type.value_type))
    assert pa.types.is_struct(type), "types come from parse_type"
    return _struct_hasher([_hasher(field.type) for field in type])


def _hash_int(value: int, seed: int) -> int:
    # Booleans and all integers below 64 bits hash as 4 bytes.
    return xxh64_intdigest(_pack_int(value), seed)


def _hash_long(value: int, seed: int) -> int:
    return xxh64_intdigest(_pack_long(value), seed)


def _hash_float(value: float, seed: int) -> int:
    canonical = math.nan if math.isnan(value) else value + 0.0
    return xxh64_intdigest(_pack_float(canonical), seed)


def _hash_double(value: float, seed: int) -> int:
    canonical = math.nan if math.isnan(value) else value + 0.0
    return xxh64_intdigest(_pack_double(canonical), seed)


def _hash_string(value: str, seed: int) -> int:
    return xxh64_intdigest(value.encode(), seed)


def _hash_binary(value: bytes, seed: int) -> int:
    return xxh64_intdigest(value, seed)


def _hash_date(value: dt.date, seed: int) -> int:
    return _hash_int(value.toordinal() - _EPOCH_ORDINAL, seed)


def _hash_timestamp(value: dt.datetime, seed: int) -> int:
    return _hash_long((value - _EPOCH_UTC) // _MICROSECOND, seed)


def _hash_timestamp_ntz(value: dt.datetime, seed: int) -> int:
    return _hash_long((value - _EPOCH_NTZ) // _MICROSECOND, seed)


def _hash_interval(value: dt.timedelta, seed: int) -> int:
    return _hash_long(value // _MICROSECOND, seed)


def _decimal_hasher(precision: int, scale: int) -> _Hasher:
    def hash_small(value: decimal.Decimal, seed: int) -> int:
        return _hash_long(int(value.scaleb(scale, _EXACT)), seed)

    def hash_big(value: decimal.Decimal, seed: int) -> int:
        # Java's BigInteger.toByteArray: big-endian two's complement, as short as it gets.
        unscaled = int(value.scaleb(scale, _EXACT))
        size = (unscaled if unscaled >= 0 else ~unscaled).bit_length() // 8 + 1
        return xxh64_intdigest(unscaled.to_bytes(size, "big", signed=True), seed)

    return hash_small if precision <= 18 else hash_big


def _list_hasher(element: _Hasher) -> _Hasher:
    def hash_list(values: Sequence[Any], seed: int) -> int:
        for value in values:
            if value is not None:
                seed = element(value, seed)
        return seed

    return hash_list


def _struct_hasher(fields: list[_Hasher]) -> _Hasher:
    def hash_struct(values: Sequence[Any], seed: int) -> int:
        for hasher, value in zip(fields, values, strict=True):
            if value is not None:
                seed = hasher(value, seed)
        return seed

    return hash_struct


_SCALARS: dict[pa.DataType, _Hasher] = {
    pa.bool_(): _hash_int,
    pa.int8(): _hash_int,
    pa.int16(): _hash_int,
    pa.int32(): _hash_int,
    pa.int64(): _hash_long,
    pa.float32(): _hash_float,
    pa.float64(): _hash_double,
    pa.string(): _hash_string,
    pa.binary(): _hash_binary,
    pa.date32(): _hash_date,
    pa.timestamp("us", "UTC"): _hash_timestamp,
    pa.timestamp("us"): _hash_timestamp_ntz,
    pa.duration("us"): _hash_interval,
}
