"""The names of timers in a database: `time | key`, in the order of their times.

The time is an unsigned integer of msgpack, so other readers unpack the name like any other.
"""

from __future__ import annotations

import struct
from typing import Final

from cairn.backends.cached.database import Database
from cairn.backends.contract import Content
from cairn.backends.packing import Packing
from cairn.types.codec import Key

KIND: Final = "timers"
"""The kind of states with such names, in the index of a base."""
TIME_BYTES: Final = 9
_TIME: Final = struct.Struct(">BQ")
_TAG: Final = 0xCF
_OFFSET: Final = 1 << 63


def pack_time(time_ms: int) -> bytes:
    """Return bytes that sort as times do."""
    return _TIME.pack(_TAG, time_ms + _OFFSET)


def unpack_time(name: bytes) -> int:
    found: int = _TIME.unpack_from(name)[1]
    return found - _OFFSET


def read_timers(database: Database, prefix: bytes, packing: Packing) -> dict[Key, Content]:
    """Return all timers of a key group by key."""
    held: dict[Key, Content] = {}
    for row, _ in database.scan(prefix):
        name = row[len(prefix) :]
        held.setdefault(packing.key_of(name[TIME_BYTES:]), {})[unpack_time(name)] = True
    return held
