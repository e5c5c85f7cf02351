"""A state's keys and values as bytes, and about how large they are.

Always true here:
- equal keys give equal bytes, and no key is the beginning of another: each is one
  complete msgpack object;
- what is read back as a key is found in a dict: there is one NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from typing import Any, Final

import msgspec

from cairn.backends.base import ABSENT
from cairn.types.codec import Codec
from cairn.types.codec.base import same

_SIZE_SAMPLE: Final = 16
_SMALL_BYTES: Final = 64
encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder().decode


def _writer(pack: Callable[[Any], Any]) -> Callable[[Any], bytes]:
    return encode if pack is same else lambda value: encode(pack(value))


def _reader(unpack: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    return decode if unpack is same else lambda raw: unpack(decode(raw))


def _key_reader(keys: Codec) -> Callable[[bytes], Any]:
    if keys.canonical is same:
        return _reader(_if_some(keys.unpack))
    # There is one NaN among keys, the object itself: dicts find it by identity.
    return _reader(_if_some(lambda packed: keys.canonical(keys.unpack(packed))))


def _if_some(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return convert if convert is same else lambda value: None if value is None else convert(value)


class Packing:
    """A state's keys and values as bytes. Complete msgpack objects: none is another's prefix."""

    def __init__(self, kind: str, keys: Codec, values: Codec, entries: Codec | None) -> None:
        self.kind = kind
        self.keys = keys
        self.values = values
        self.entries = entries
        plain = keys.pack is same and keys.canonical is same
        self.key = encode if plain else _writer(keys.pack_key)
        self.key_of = _key_reader(keys)
        self.value = _writer(_if_some(values.pack))
        self.value_of = _reader(_if_some(values.unpack))
        if entries is not None:
            plain = entries.pack is same and entries.canonical is same
            self.entry = encode if plain else _writer(entries.pack_key)
            self.entry_of = _key_reader(entries)


def sampled_size(values: Collection[Any], packed: Callable[[Any], bytes]) -> int:
    """About how many bytes a value takes beside its entry; small ones are within the entry."""
    step = max(1, len(values) // _SIZE_SAMPLE)
    total = count = 0
    for value in islice(values, 0, None, step):
        count += 1
        if isinstance(value, str | bytes):
            total += len(value)
        elif value is not None and value is not ABSENT and not isinstance(value, int | float):
            total += len(packed(value))
    mean = total // count if count else 0
    return mean if mean > _SMALL_BYTES else 0
