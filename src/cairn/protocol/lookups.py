"""Lookups of committed state: the questions to a slot's second socket, and its answers.

Ask     state of some keys, in one version
End     the slot is not needed any more
Told    the packed values, or that the slot does not hold this version
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

ASK_BYTES_MAX: Final = 8 << 20
TOLD_BYTES_MAX: Final = 64 << 20


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """What is held of some keys."""

    uid: str
    state: str
    version: str
    form: Form
    groups: list[int]
    keys: list[bytes]
    """Packed, each in its key group."""


class Told(msgspec.Struct, frozen=True, array_like=True):
    values: list[bytes | None] | None
    """Packed, None for nothing; without a list the version is not here."""
    floor_ms: int | None = None
    """What had expired by then may be gone already."""


@dataclass(frozen=True)
class DoorSpec:
    """What slots are told of the driver: whom to let in, and where it is."""

    key: bytes = field(repr=False)
    host: str
    address: str
    """Where the driver is reached from other machines."""


ask_encoder: Final = msgspec.msgpack.Encoder()
ask_decoder: Final = msgspec.msgpack.Decoder(Ask | End)
ended_decoder: Final = msgspec.msgpack.Decoder(bool)
told_decoder: Final = msgspec.msgpack.Decoder(Told)


def this_host() -> str:
    """Return a name that is the same for two processes on one machine that see the same files."""
    boot = mounts = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers may share the machine and its name, and not a single file.
        mounts = str(os.stat("/proc/self/ns/mnt").st_ino)
    return f"{os.uname().nodename}:{boot}:{mounts}"
