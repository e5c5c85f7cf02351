"""State as bytes: keys and values of RocksDB rows, and answers to lookups.

The answer to a lookup is everything held of one key, as one msgpack object:

    value, reducing, aggregating, broadcast    the value
    map, timers, operator list                 [[entry, value], ...]
    list                                       [item, ...]

Always true here:
- values of every declarable type come back equal;
- equal keys give equal bytes, and no key is a prefix of another: each is one complete
  msgpack object;
- keys that are read back are found in a dict: there is one NaN;
- bytes do not name their types: both ends must have declared the same (`form_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from cairn.backends.contract import ABSENT, Content
from cairn.state import Declaration
from cairn.types.codec import Codec, Datum, Key
from cairn.types.codec.core import Convert, if_some, same

if TYPE_CHECKING:
    from cairn.backends.overlay import Table

_SIZE_SAMPLE: Final = 16
_SMALL_BYTES: Final = 64
encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder().decode

Form = tuple[str, str, str, str]
"""Kind, type, entry type and ttl of a state: both ends of a lookup must agree on them."""


def form_of(declaration: Declaration) -> Form:
    ttl = "" if declaration.ttl is None else declaration.ttl.text
    return declaration.kind, declaration.ddl, declaration.entry_ddl or "", ttl


class Packing:
    """Packs and unpacks the keys, values and entries of one state."""

    def __init__(self, kind: str, keys: Codec, values: Codec, entries: Codec | None) -> None:
        self.kind = kind
        self.keys = keys
        self.values = values
        self.entries = entries
        self.key = _key_writer(keys)
        self.key_of = _key_reader(keys)
        self.value = _writer(if_some(values.pack))
        self.value_of = _reader(if_some(values.unpack))
        if entries is not None:
            self.entry = _key_writer(entries)
            self.entry_of = _key_reader(entries)


def _writer(pack: Convert) -> Callable[[Datum], bytes]:
    return encode if pack is same else lambda value: encode(pack(value))


def _reader(unpack: Convert) -> Callable[[bytes], Datum]:
    return decode if unpack is same else lambda raw: unpack(decode(raw))


def _key_writer(keys: Codec) -> Callable[[Key], bytes]:
    is_plain = keys.pack is same and keys.canonical is same
    return encode if is_plain else _writer(keys.pack_key)


def _key_reader(keys: Codec) -> Callable[[bytes], Key]:
    return _reader(_key_unpacker(keys))


def _key_unpacker(keys: Codec) -> Convert:
    if keys.canonical is same:
        return if_some(keys.unpack)
    # There is one NaN among keys, the object itself: dicts find it by identity.
    return if_some(lambda packed: keys.canonical(keys.unpack(packed)))


def estimate_value_bytes(values: Collection[Datum], pack: Callable[[Datum], bytes]) -> int:
    """Estimate the bytes of a value beyond its dict entry, from a sample; 0 for small values."""
    step = max(1, len(values) // _SIZE_SAMPLE)
    total = count = 0
    for value in islice(values, 0, None, step):
        count += 1
        if isinstance(value, str | bytes):
            total += len(value)
        elif value is not None and value is not ABSENT and not isinstance(value, int | float):
            total += len(pack(value))
    mean = total // count if count else 0
    return mean if mean > _SMALL_BYTES else 0


# Answers to lookups


def packing_of(table: Table) -> Packing:
    entries = getattr(table.layout, "entries", None)
    return Packing(table.declaration.layout, table.keys, table.values, entries)


def pack_held(packing: Packing, held: Content) -> bytes:
    pack = if_some(packing.values.pack)
    if packing.kind == "list":
        return encode([pack(item) for item in held])
    if packing.kind == "map":
        assert packing.entries is not None
        pack_entry = packing.entries.pack_key
        return encode([[pack_entry(entry), pack(value)] for entry, value in held.items()])
    return packing.value(held)


def unpack_held(packing: Packing, raw: bytes) -> Content:
    """Return a value, a dict of entries or a list, as a backend holds it."""
    unpack = if_some(packing.values.unpack)
    if packing.kind == "list":
        return [unpack(item) for item in decode(raw)]
    if packing.kind == "map":
        assert packing.entries is not None
        entry_of = _key_unpacker(packing.entries)
        return {entry_of(entry): unpack(value) for entry, value in decode(raw)}
    return packing.value_of(raw)
