"""Messages on the second socket of a slot, which serves lookups of committed state.

LookupRequest   the state of some keys, in one version
End             the slot is not needed any more
LookupReply     the packed values, or none if the slot does not hold this version
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from cairn.backends.packing import Form
from cairn.protocol.messages import End

REQUEST_BYTES_MAX: Final = 8 << 20
REPLY_BYTES_MAX: Final = 64 << 20


class LookupRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Request for the state of some keys."""

    uid: str
    state: str
    version: str
    form: Form
    groups: list[int]
    keys: list[bytes]
    """Packed, each in its key group."""


class LookupReply(msgspec.Struct, frozen=True, array_like=True):
    values: list[bytes | None] | None
    """Packed, None for no value; None for the list if the slot does not hold the version."""
    floor_ms: int | None = None
    """State that expired before this time may be missing."""


@dataclass(frozen=True)
class DoorSpec:
    """The driver, as slots need to know it to accept its lookups."""

    key: bytes = field(repr=False)
    host: str
    address: str
    """The address of the driver for other machines."""


message_encoder: Final = msgspec.msgpack.Encoder()
request_decoder: Final = msgspec.msgpack.Decoder(LookupRequest | End)
ended_decoder: Final = msgspec.msgpack.Decoder(bool)
reply_decoder: Final = msgspec.msgpack.Decoder(LookupReply)


def this_host() -> str:
    """Return a name that two processes share if they see the same files on one machine."""
    boot = mounts = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers may share the machine and its name, but no files.
        mounts = str(os.stat("/proc/self/ns/mnt").st_ino)
    return f"{os.uname().nodename}:{boot}:{mounts}"
