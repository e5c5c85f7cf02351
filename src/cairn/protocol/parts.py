"""Parts of a begin message, one per subtask: in the message if they are small, else in an object.

    record of subtask 0 | record of subtask 1 | ...       each: checksum, length, msgpack, zeros

All records of an object have the same length, so a subtask reads its own with one request and
without an index.

Always true here:
- the encoded message has a limit that does not depend on the parallelism;
- an object is written before the execution that names it begins, and never changes;
- a record that does not match its checksum is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import xxhash

from cairn.errors import CorruptFileError, EpochError
from cairn.protocol.messages import Begin, Part, PartsAt
from cairn.storage.store import NotFoundError, Store

INLINE_BYTES_MAX = 8 * 1024
"""Limit of the bytes of all parts within a message: about 100 subtasks with one state each."""
_HEAD: Final = struct.Struct("<QI")
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Part)


def move_parts(begin: Begin, put: Callable[[bytes], str], bytes_max: int | None = None) -> Begin:
    """Return the message as tasks carry it. `put` writes an object and returns its path."""
    bytes_max = INLINE_BYTES_MAX if bytes_max is None else bytes_max
    encoded = {subtask: _encoder.encode(part) for subtask, part in begin.parts.items()}
    if sum(map(len, encoded.values())) <= bytes_max:
        return begin
    data, record_bytes = pack_parts(encoded)
    return msgspec.structs.replace(begin, parts={}, parts_at=PartsAt(put(data), record_bytes))


def pack_parts(encoded: Mapping[int, bytes]) -> tuple[bytes, int]:
    """Return the content of an object, and the length of its records."""
    longest = max(map(len, encoded.values()))
    records = (
        _HEAD.pack(xxhash.xxh3_64_intdigest(body), len(body)) + body.ljust(longest, b"\0")
        for _, body in sorted(encoded.items())
    )
    return b"".join(records), _HEAD.size + longest


def for_subtask(begin: Begin, subtask: int) -> Begin:
    """Return the message without the parts of other subtasks."""
    if not begin.parts:
        return begin
    return msgspec.structs.replace(begin, parts={subtask: begin.parts[subtask]})


def read_part(begin: Begin, subtask: int, store: Store) -> Part:
    """Return the part of a subtask, from the message or from the object it names."""
    if begin.parts_at is None:
        return begin.parts[subtask]
    path, length = begin.parts_at.path, begin.parts_at.record_bytes
    try:
        record = store.get_range(path, subtask * length, length)
    except NotFoundError:
        raise EpochError(
            f"{path} is gone from {store.url}: the epoch has ended, or another driver leads",
            epoch=begin.epoch,
        ) from None
    if len(record) == length:
        checksum, size = _HEAD.unpack_from(record)
        body = record[_HEAD.size : _HEAD.size + size]
        if len(body) == size and xxhash.xxh3_64_intdigest(body) == checksum:
            return _decoder.decode(body)
    raise CorruptFileError(
        f"the part of subtask {subtask} in a begin message is damaged\n"
        f"  file: {store.url}/{path}\n"
        "  next: check the store, then start the job again",
        file=f"{store.url}/{path}",
    )
