"""Key groups: the same key has the same group in Spark, in a slot and in a client.

A key's group is `pmod(xxhash64(columns…), group_count)`; subtasks own contiguous
ranges of groups: equal ones, or ranges by load, which their `starts` give. The hash here
is Spark's xxhash64 bit for bit: XXH64 with seed 42, where each value's hash is the seed of
the next and a null changes nothing.

Always true here:
- hash_key(values, types) equals Spark's xxhash64 over columns of those types;
- every NaN hashes alike, and -0.0 hashes as 0.0, at any depth;
- key_groups(column) has the key_group of each of its keys;
- groups_of partitions range(group_count) and agrees with subtask_of;
- a type whose hash Spark refuses (a map inside) is refused here.
"""

from __future__ import annotations

import bisect
import datetime as dt
import decimal
import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh64_intdigest

from cairn.errors import PlanError
from cairn.types import OBJECT, contains_map, type_ddl
from cairn.types.codec import codec

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


def key_groups(keys: pa.Array, type: pa.DataType, group_count: int) -> npt.NDArray[np.int64]:
    """The group of each key of a column: of the one key column, or a struct of several."""
    seeds = np.full(len(keys), _SEED, np.uint64)
    groups: npt.NDArray[np.int64] = _hash_column(keys, type, seeds).view(np.int64) % group_count
    return groups


def hash_names(columns: Sequence[pa.Array], types: Sequence[pa.DataType]) -> npt.NDArray[np.uint64]:
    """Return a hash of each row of these columns."""
    hashes = np.full(len(columns[0]), _SEED, np.uint64)
    for column, type in zip(columns, types, strict=True):
        hashes = _hash_column(column, type, hashes)
    return hashes


Starts = tuple[int, ...]
"""The first key group of each subtask; empty: subtasks own equally many key groups."""


def subtask_of(group: int, parallelism: int, group_count: int, starts: Starts = ()) -> int:
    """The subtask that owns a key group."""
    if starts:
        return bisect.bisect_right(starts, group) - 1
    return group * parallelism // group_count


def groups_of(subtask: int, parallelism: int, group_count: int, starts: Starts = ()) -> range:
    """The key groups a subtask owns; empty when there are more subtasks than groups."""
    if starts:
        return range(starts[subtask], (*starts, group_count)[subtask + 1])
    start = -(-subtask * group_count // parallelism)
    stop = -(-(subtask + 1) * group_count // parallelism)
    return range(start, stop)


def count_owners(most: int, parallelism: int) -> int:
    """Return the number of subtasks that run an operator; `most` is 0 for all that the job has."""
    return min(most or parallelism, parallelism)


def starts_within(most: int, parallelism: int, group_count: int, starts: Starts = ()) -> Starts:
    """The ranges of an operator that at most `most` subtasks run; 0: as many as the job has.

    The first subtasks own equal ranges, and the others none. An operator without a bound below
    the parallelism has the ranges of the job.
    """
    if not 0 < most < parallelism:
        return starts
    owned = tuple(groups_of(subtask, most, group_count).start for subtask in range(most))
    return owned + (group_count,) * (parallelism - most)


def overlap(groups: range, others: range) -> range:
    """The key groups that are in both, which may be none."""
    return range(max(groups.start, others.start), min(groups.stop, others.stop))


def spark_key_group_sql(columns: Sequence[tuple[str, pa.DataType]], group_count: int) -> str:
    """The SQL that computes key_group over column expressions given as SQL text."""
    if not columns:
        raise PlanError("a key needs at least one column, found none")
    for _, type in columns:
        _hasher(type)
    arguments = ", ".join(_normalise_sql(text, type) for text, type in columns)
    return f"CAST(pmod(xxhash64({arguments}), {group_count}L) AS INT)"


def _normalise_sql(text: str, type: pa.DataType) -> str:
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
        return _build_hasher(type)
    raise PlanError(
        f"a key cannot be {type_ddl(type)}: Spark does not hash it\n"
        "  next: key by columns without maps and objects",
        type=type,
    )


def _build_hasher(type: pa.DataType) -> _Hasher:
    if pa.types.is_decimal128(type):
        return _decimal_hasher(type.precision, type.scale)
    if pa.types.is_list(type):
        return _list_hasher(_hasher(type.value_type))
    assert pa.types.is_struct(type), "types come from parse_type"
    return _struct_hasher([_hasher(field.type) for field in type])


# By the column: the same arithmetic, on all values at once.

_Hashes = npt.NDArray[np.uint64]
_LANES_FROM = 31
"""Texts of more bytes begin with stripes of four lanes."""
_STRIPED_MAX = 1024
"""Texts of more bytes are hashed one at a time: a stripe is a numpy call for all texts."""
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
        0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
    )
)  # fmt: skip


def _hash_column(array: pa.Array, type: pa.DataType, seeds: _Hashes) -> _Hashes:
    """The next seed of each row; nulls leave theirs as it is."""
    if pa.types.is_struct(type):
        # Flattened, a field is null where the struct is.
        for field, column in zip(type, array.flatten(), strict=True):
            seeds = _hash_column(column, field.type, seeds)
        return seeds
    if pa.types.is_string(type) or pa.types.is_binary(type):
        return _with_nulls(array, _hash_texts(array, seeds), seeds)
    if type not in _WIDTHS:
        hash_value = _hasher(type)
        pairs = zip(codec(type).decode(array), seeds.tolist(), strict=True)
        hashed = (seed if value is None else hash_value(value, seed) for value, seed in pairs)
        return np.fromiter(hashed, np.uint64, len(array))
    if _WIDTHS[type] == 8:
        hashes = _hash_longs(_numbers(array, np.dtype(np.int64)).view(np.uint64), seeds)
    else:
        narrow = _numbers(array, np.dtype(np.int32)).view(np.uint32)
        hashes = _hash_ints(narrow.astype(np.uint64), seeds)
    return _with_nulls(array, hashes, seeds)


def _with_nulls(array: pa.Array, hashes: _Hashes, seeds: _Hashes) -> _Hashes:
    if not array.null_count:
        return hashes
    return np.where(array.is_valid().to_numpy(zero_copy_only=False), hashes, seeds)


def _numbers(array: pa.Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The bits that are hashed, as integers; under a null anything."""
    if pa.types.is_boolean(array.type):
        flags: npt.NDArray[Any] = array.fill_null(False).to_numpy(zero_copy_only=False)
        return flags.astype(dtype)
    kind = "f" if pa.types.is_floating(array.type) else "i"
    if not len(array):
        return np.empty(0, dtype)
    stored = np.dtype(f"{kind}{array.type.bit_width // 8}")
    numbers = np.frombuffer(array.buffers()[1], stored, array.offset + len(array))[array.offset :]
    if kind == "f":
        floats: npt.NDArray[Any] = numbers + stored.type(0.0)  # A copy, without -0.0.
        floats[np.isnan(floats)] = np.nan
        return floats.view(dtype)
    return np.ascontiguousarray(numbers, dtype)


def _hash_longs(numbers: _Hashes, seeds: _Hashes) -> _Hashes:
    hashes = seeds + _P5 + np.uint64(8)
    hashes ^= _rotate(numbers * _P2, 31) * _P1
    hashes = _rotate(hashes, 27) * _P1 + _P4
    return _avalanche(hashes)


def _hash_ints(numbers: _Hashes, seeds: _Hashes) -> _Hashes:
    hashes = seeds + _P5 + np.uint64(4)
    hashes ^= numbers * _P1
    hashes = _rotate(hashes, 23) * _P2 + _P3
    return _avalanche(hashes)


def _hash_texts(array: pa.Array, seeds: _Hashes) -> _Hashes:
    """By the column: stripes of 32 bytes, words of eight, one of four, then bytes."""
    starts, lengths, words = text_words(array)
    is_plain = lengths <= _STRIPED_MAX
    plain = np.where(is_plain, lengths, 0)
    hashes = seeds + _P5
    longer = np.flatnonzero(plain > _LANES_FROM)
    if len(longer):
        hashes[longer] = _hash_stripes(starts[longer], plain[longer], words, seeds[longer])
    hashes += plain.astype(np.uint64)
    starts, rest = starts + (plain & ~31), plain & 31
    for at in range(min(3, int(rest.max(initial=0)) // 8)):
        mixed = hashes ^ (_rotate(words[starts + 8 * at] * _P2, 31) * _P1)
        mixed = _rotate(mixed, 27) * _P1 + _P4
        hashes = np.where(rest >= 8 * at + 8, mixed, hashes)
    ends, rest = starts + (rest & ~7), rest & 7
    mixed = hashes ^ ((words[ends] & np.uint64(0xFFFFFFFF)) * _P1)
    mixed = _rotate(mixed, 23) * _P2 + _P3
    hashes = np.where(rest >= 4, mixed, hashes)
    ends += rest & 4
    for at in range(3):
        mixed = hashes ^ ((words[ends + at] & np.uint64(0xFF)) * _P5)
        hashes = np.where((rest & 3) > at, _rotate(mixed, 11) * _P1, hashes)
    hashes = _avalanche(hashes)
    if not is_plain.all():
        longest = np.flatnonzero(~is_plain)
        texts = array.take(pa.array(longest)).cast(pa.binary()).to_pylist()
        pairs = zip(texts, seeds[longest].tolist(), strict=True)
        # Under a null there may be a length, but no text.
        hashes[longest] = [xxh64_intdigest(text or b"", seed) for text, seed in pairs]
    return hashes


def _hash_stripes(
    starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], words: _Hashes, seeds: _Hashes
) -> _Hashes:
    """Return the hash of the whole stripes of each text, of which each has one at least."""
    lanes = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
    for at in range(0, int(lengths.max()) & ~31, 32):
        rows = np.flatnonzero(lengths >= at + 32)
        for number, lane in enumerate(lanes):
            word = words[starts[rows] + (at + 8 * number)]
            lane[rows] = _rotate(lane[rows] + word * _P2, 31) * _P1
    hashes = np.zeros(len(seeds), np.uint64)
    for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True):
        hashes += _rotate(lane, bits)
    for lane in lanes:
        hashes ^= _rotate(lane * _P2, 31) * _P1
        hashes = hashes * _P1 + _P4
    return hashes


def text_words(
    array: pa.Array,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], _Hashes]:
    """Return the start and length of each text, and the eight bytes from any place on.

    Places may be asked for that lie up to fifteen bytes behind the last text.
    """
    _, offsets_buffer, data_buffer = array.buffers()
    if not len(array) or offsets_buffer is None:
        offsets = np.zeros(len(array) + 1, np.int64)
    else:
        raw = np.frombuffer(offsets_buffer, np.int32, array.offset + len(array) + 1)
        offsets = raw[array.offset :].astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.zeros((last - first + 31) // 8 * 8, np.uint8)
    if last > first:
        data[: last - first] = np.frombuffer(data_buffer, np.uint8, last)[first:]
    words = np.lib.stride_tricks.as_strided(data.view(np.uint64), (len(data) - 7,), (1,))
    starts: npt.NDArray[np.int64] = offsets[:-1] - first
    return starts, np.diff(offsets), words


def _rotate(values: _Hashes, bits: int) -> _Hashes:
    return (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))


def _avalanche(hashes: _Hashes) -> _Hashes:
    hashes ^= hashes >> np.uint64(33)
    hashes *= _P2
    hashes ^= hashes >> np.uint64(29)
    hashes *= _P3
    hashes ^= hashes >> np.uint64(32)
    return hashes


_WIDTHS: dict[pa.DataType, int] = {
    pa.bool_(): 4,
    pa.int8(): 4,
    pa.int16(): 4,
    pa.int32(): 4,
    pa.int64(): 8,
    pa.float32(): 4,
    pa.float64(): 8,
    pa.date32(): 4,
    pa.timestamp("us", "UTC"): 8,
    pa.timestamp("us"): 8,
    pa.duration("us"): 8,
}
"""Bytes that are hashed, of the types that are hashed by the column."""


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
    pa.binary(): xxh64_intdigest,
    pa.date32(): _hash_date,
    pa.timestamp("us", "UTC"): _hash_timestamp,
    pa.timestamp("us"): _hash_timestamp_ntz,
    pa.duration("us"): _hash_interval,
}
