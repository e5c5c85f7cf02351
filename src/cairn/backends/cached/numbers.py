"""States by number, in databases that many operators and jobs share: a name may be long."""

from __future__ import annotations

import struct
from typing import Final

from cairn.backends.cached.described import StoredState
from cairn.ids import digest

PREFIX: Final = struct.Struct(">Hi")
"""The begin of a row's key: key group and number of the state."""


def state_number(operator: str, name: str, described: StoredState) -> int:
    """Return the number of a state: the same in all jobs that have it."""
    types = (described.kind, described.key_type, described.entry_type or "", described.type)
    return int(digest(*(part.encode() for part in (operator, name, *types)))[:8], 16) & 0x7FFF_FFFF
