"""Columns as msgpack objects, one per row, and back: the bytes of `packing`, without Python values.

A row is made of blocks: heads and numbers, of fixed width and right-aligned, and the bytes of
texts. The blocks are cut to size and joined by numpy and Arrow, all rows at once.

Always true here:
- the bytes of a row are those that `Packing` makes of its value or key;
- all forms of msgpack are read, whatever their length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

_NULL, _FALSE, _TRUE, _DOUBLE = 0xC0, 0xC2, 0xC3, 0xCB
_ORDINAL_OF_EPOCH = 719_163
"""The day 1970-01-01 in Python's count of days, which is how dates are packed."""


def is_packable(type: pa.DataType) -> bool:
    """True if columns of the type are packed here; others go value by value."""
    if pa.types.is_struct(type):
        return all(is_packable(field.type) for field in type)
    return bool(
        pa.types.is_signed_integer(type)
        or pa.types.is_floating(type)
        or pa.types.is_boolean(type)
        or _is_text(type)
        or _is_time(type)
    )


def _is_text(type: pa.DataType) -> bool:
    return bool(pa.types.is_string(type) or pa.types.is_binary(type))


def _is_time(type: pa.DataType) -> bool:
    is_micros = pa.types.is_timestamp(type) or pa.types.is_duration(type)
    return bool(pa.types.is_date32(type) or (is_micros and type.unit == "us"))


# Writing


class _Blocks:
    """Blocks of rows, side by side."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._joined: list[pa.Array] = []
        self._heads: list[Bytes] = []
        self._is_used: list[Bools] = []

    def add(self, head: Bytes, lengths: Ints) -> None:
        """Add the last bytes of each row of `head`."""
        self._heads.append(head)
        self._is_used.append(np.arange(head.shape[1]) >= (head.shape[1] - lengths)[:, None])

    def add_texts(self, texts: pa.Array) -> None:
        self._close()
        self._joined.append(texts)

    def _close(self) -> None:
        if self._heads:
            is_used = np.concatenate(self._is_used, axis=1)
            data = np.concatenate(self._heads, axis=1)[is_used]
            offsets = np.zeros(self._count + 1, np.int32)
            np.cumsum(np.count_nonzero(is_used, axis=1), out=offsets[1:])
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
            self._joined.append(pa.Array.from_buffers(pa.binary(), self._count, buffers))
            self._heads, self._is_used = [], []

    def join(self) -> pa.Array:
        self._close()
        if len(self._joined) == 1:
            return self._joined[0]
        return pc.binary_join_element_wise(*self._joined, b"")


def pack_columns(
    columns: Sequence[pa.Array], *, head: Bytes | None = None, are_keys: bool = False
) -> pa.Array:
    """Return the bytes of each row: `head`, then its columns, one msgpack object each.

    There is one NaN and no -0.0 among keys.
    """
    count = len(columns[0])
    blocks = _Blocks(count)
    if head is not None:
        blocks.add(head, np.full(count, head.shape[1]))
    for column in columns:
        _pack(column, None, blocks, are_keys=are_keys)
    return blocks.join()


def _pack(array: pa.Array, inside: Bools | None, blocks: _Blocks, *, are_keys: bool) -> None:
    """Add a column. `inside` marks the rows in which the struct around it is not null."""
    valid, type = _validity(array), array.type
    if pa.types.is_struct(type):
        head, lengths = _struct_head(type.num_fields, len(array))
        blocks.add(*_cut(head, lengths, valid, inside))
        within = _both(valid, inside)
        for index in range(type.num_fields):
            _pack(array.field(index), within, blocks, are_keys=are_keys)
    elif _is_text(type):
        held = _both(valid, inside)
        texts = array if pa.types.is_binary(type) else array.view(pa.binary())
        if held is not None:
            texts = pc.if_else(pa.array(held), texts, b"")
        sizes = pc.binary_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)
        heads = _text_heads(sizes, is_binary=pa.types.is_binary(type))
        blocks.add(*_cut(*heads, valid, inside))
        blocks.add_texts(texts)
    else:
        blocks.add(*_cut(*_scalars(array, are_keys=are_keys), valid, inside))


def _cut(
    head: Bytes, lengths: Ints, valid: Bools | None, inside: Bools | None
) -> tuple[Bytes, Ints]:
    """Put a null where a row is not `valid`, and nothing where it is not `inside`."""
    if valid is not None:
        head[~valid, -1] = _NULL
        lengths = np.where(valid, lengths, 1)
    if inside is not None:
        lengths = np.where(inside, lengths, 0)
    return head, lengths


def _struct_head(width: int, count: int) -> tuple[Bytes, Ints]:
    head = bytes([0x90 | width]) if width < 16 else b"\xdc" + width.to_bytes(2, "big")
    return np.tile(np.frombuffer(head, np.uint8), (count, 1)), np.full(count, len(head))


def _scalars(array: pa.Array, *, are_keys: bool) -> tuple[Bytes, Ints]:
    type, count = array.type, len(array)
    if pa.types.is_boolean(type):
        is_true = array.fill_null(False).to_numpy(zero_copy_only=False)
        return np.where(is_true, _TRUE, _FALSE).astype(np.uint8)[:, None], np.ones(count, np.int64)
    if pa.types.is_floating(type):
        numbers = array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float64)
        if are_keys:
            numbers = np.where(np.isnan(numbers), np.nan, numbers) + 0.0
        return _with_code(_DOUBLE, numbers.astype(">f8")), np.full(count, 9)
    if pa.types.is_date32(type):
        return _integers(_plain(array.view(pa.int32())) + _ORDINAL_OF_EPOCH)
    return _integers(_plain(array.view(pa.int64()) if _is_time(type) else array))


def _plain(array: pa.Array) -> Ints:
    plain: Ints = array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return plain


def _with_code(code: Any, words: npt.NDArray[Any]) -> Bytes:
    """Return a code and the eight bytes of each word."""
    head = np.empty((len(words), 9), np.uint8)
    head[:, 0] = code
    head[:, 1:] = words.view(np.uint8).reshape(-1, 8)
    return head


def _integers(numbers: Ints) -> tuple[Bytes, Ints]:
    """Return the shortest form of each number."""
    size = np.zeros(len(numbers), np.int64)
    magnitudes = np.where(numbers < 0, ~numbers, numbers)
    is_negative = numbers < 0
    # A negative number has a sign bit.
    for limit, bytes_more in ((5, 1), (7, 2), (15, 4), (31, 8)):
        size[is_negative & (magnitudes >> limit != 0)] = bytes_more
    for limit, bytes_more in ((7, 1), (8, 2), (16, 4), (32, 8)):
        size[~is_negative & (magnitudes >> limit != 0)] = bytes_more
    head = _with_code(0, numbers.astype(">i8"))
    for bytes_more, code in ((1, 0xCC), (2, 0xCD), (4, 0xCE), (8, 0xCF)):
        is_this = size == bytes_more
        head[is_this, 8 - bytes_more] = np.where(is_negative[is_this], code + 4, code)
    return head, size + 1


def _text_heads(sizes: Ints, *, is_binary: bool) -> tuple[Bytes, Ints]:
    head = np.zeros((len(sizes), 5), np.uint8)
    head[:, 1:] = sizes.astype(">u4").view(np.uint8).reshape(-1, 4)
    more = np.full(len(sizes), 4)
    more[sizes < 1 << 16] = 2
    more[sizes < 1 << 8] = 1
    first = 0xC4 if is_binary else 0xD9
    for code, size in enumerate((1, 2, 4), first):
        head[more == size, 4 - size] = code
    if not is_binary:
        is_short = sizes < 32
        more[is_short] = 0
        head[is_short, 4] = 0xA0 | sizes[is_short].astype(np.uint8)
    return head, more + 1


def _validity(array: pa.Array) -> Bools | None:
    if not array.null_count:
        return None
    valid: Bools = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _both(valid: Bools | None, inside: Bools | None) -> Bools | None:
    if valid is None or inside is None:
        return inside if valid is None else valid
    return valid & inside


# Reading


class _Cursor:
    """A place in each row."""

    def __init__(self, rows: pa.Array) -> None:
        _, offsets, data = rows.buffers()
        count = len(rows)
        ends = np.frombuffer(offsets, np.int32, rows.offset + count + 1)[rows.offset :]
        self.at: Ints = ends[:-1].astype(np.int64)
        # So that eight bytes can be read from every place.
        self.data: Bytes = np.zeros(int(ends[-1]) + 9, np.uint8)
        if data is not None:
            self.data[:-9] = np.frombuffer(data, np.uint8, int(ends[-1]))

    def words(self) -> npt.NDArray[np.uint64]:
        """Return the eight bytes after the first one, as numbers."""
        after = self.data[self.at[:, None] + np.arange(1, 9)]
        words: npt.NDArray[np.uint64] = after.view(">u8").reshape(-1).astype(np.uint64)
        return words


def unpack_column(rows: pa.Array, type: pa.DataType) -> pa.Array:
    """Return the column of which `pack_columns` made these bytes; a null has none."""
    return _unpack(_Cursor(rows), type, _validity(rows), nullable=True)


def _unpack(
    cursor: _Cursor, type: pa.DataType, inside: Bools | None, *, nullable: bool
) -> pa.Array:
    codes = cursor.data[cursor.at]
    valid = codes != _NULL
    if inside is not None:
        valid &= inside
    if pa.types.is_struct(type):
        long = np.where(codes == 0xDC, 3, 1)
        cursor.at = cursor.at + (long if inside is None else np.where(inside, long, 0))
        columns = [_unpack(cursor, f.type, valid, nullable=f.nullable) for f in type]
        mask = None if valid.all() or not nullable else pa.array(~valid)
        return pa.StructArray.from_arrays(columns, fields=list(type), mask=mask)
    if _is_text(type):
        found = _read_texts(cursor, codes, valid, type)
    else:
        found = _read_scalars(cursor, codes, valid, type)
    # A null takes one byte; a row outside has none.
    cursor.at = cursor.at + (~valid if inside is None else ~valid & inside)
    if valid.all() or not nullable:
        return found
    return pc.if_else(pa.array(valid), found, pa.scalar(None, type))


def _read_texts(cursor: _Cursor, codes: Bytes, valid: Bools, type: pa.DataType) -> pa.Array:
    words = cursor.words()
    more = np.zeros(len(codes), np.int64)
    for first in (0xC4, 0xD9):
        for step, size in enumerate((1, 2, 4)):
            more[codes == first + step] = size
    sizes = (words >> (np.uint64(8) * (8 - np.maximum(more, 1)).astype(np.uint64))).astype(np.int64)
    sizes = np.where(more == 0, codes & 31, sizes)
    starts = np.where(valid, cursor.at + 1 + more, cursor.at)
    cursor.at = np.where(valid, starts + sizes, cursor.at)
    # Every second one of these is a text, the others are what lies between them.
    offsets = np.stack([starts, cursor.at], axis=1).reshape(-1)
    large = pa.large_string() if pa.types.is_string(type) else pa.large_binary()
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(cursor.data)]
    every = pa.Array.from_buffers(large, max(0, len(offsets) - 1), buffers)
    return every.take(pa.array(np.arange(0, len(offsets), 2))).cast(type)


def _read_scalars(cursor: _Cursor, codes: Bytes, valid: Bools, type: pa.DataType) -> pa.Array:
    if pa.types.is_boolean(type):
        cursor.at = cursor.at + valid
        return pa.array(codes == _TRUE)
    words = cursor.words()
    if pa.types.is_floating(type):
        cursor.at = np.where(valid, cursor.at + 9, cursor.at)
        return pa.array(np.where(valid, words.view(np.float64), 0.0)).cast(type)
    numbers = codes.astype(np.int8).astype(np.int64)
    more = np.zeros(len(codes), np.int64)
    for step, size in enumerate((1, 2, 4, 8)):
        shift = 64 - 8 * size
        for code, shifted in (
            (0xCC, words >> np.uint64(shift)),
            (0xD0, words.view(np.int64) >> shift),
        ):
            is_this = codes == code + step
            numbers[is_this] = shifted.astype(np.int64)[is_this]
            more[is_this] = size
    cursor.at = np.where(valid, cursor.at + 1 + more, cursor.at)
    numbers = np.where(valid, numbers, 0)
    if pa.types.is_date32(type):
        return pa.array((numbers - _ORDINAL_OF_EPOCH * valid).astype(np.int32)).view(type)
    if _is_time(type):
        return pa.array(numbers).view(type)
    return pa.array(numbers).cast(type)
