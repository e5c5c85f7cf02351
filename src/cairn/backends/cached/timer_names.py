"""Names in a database that begin with a time: `time | key`, in the order of their times.

Timers have such names, and so have the time indexes of other states.

The time is an unsigned integer of msgpack, so other readers unpack the name like any other.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from cairn.backends.cached.database import Database
from cairn.backends.contract import Content
from cairn.backends.packing import Packing
from cairn.types.codec import Key

KIND: Final = "timers"
"""The kind of timers, in the index of a base."""
INDEX_KIND: Final = "times"
"""The kind of a time index: a state beside another one, that is in no delta and that no reader
sees. It lists when the keys of the other state are due, and can be made from them again."""
TIME_KINDS: Final = (KIND, INDEX_KIND)
_INDEX_SUFFIX: Final = ".times"
TIME_BYTES: Final = 9
_TIME: Final = struct.Struct(">BQ")
_TAG: Final = 0xCF
_OFFSET: Final = 1 << 63


def index_name(state: str) -> str:
    """Return the name of the time index of a state: users' states have no dot in theirs."""
    return state + _INDEX_SUFFIX


def is_index(name: str) -> bool:
    """True if a state is the time index of another one."""
    return name.endswith(_INDEX_SUFFIX)


def pack_time(time_ms: int) -> bytes:
    """Return bytes that sort as times do."""
    return _TIME.pack(_TAG, time_ms + _OFFSET)


def pack_times(times: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return the bytes of many times, a row each."""
    packed = np.empty((len(times), TIME_BYTES), np.uint8)
    packed[:, 0] = _TAG
    words = np.ascontiguousarray(times, np.int64).view(np.uint64) ^ np.uint64(_OFFSET)
    packed[:, 1:] = words.astype(">u8").view(np.uint8).reshape(-1, 8)
    return packed


def unpack_times(data: bytes) -> npt.NDArray[np.int64]:
    """Return times from their bytes, one after the other."""
    packed = np.frombuffer(data, np.uint8).reshape(-1, TIME_BYTES)
    words = np.ascontiguousarray(packed[:, 1:]).view(">u8").reshape(-1).astype(np.uint64)
    times: npt.NDArray[np.int64] = (words ^ np.uint64(_OFFSET)).view(np.int64)
    return times


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
