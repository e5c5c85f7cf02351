"""What state handles are told about the row at hand: its key, and what time it is."""

from __future__ import annotations

from typing import Protocol

from cairn.state import Declaration
from cairn.types.codec import ValueTypeError


class Scope(Protocol):
    """Which key is at hand, and when."""

    key: object
    group: int
    now_ms: int
    event_time_ms: int | None
    floor_ms: int
    """No event of the epoch counts as earlier than this."""


def name_state(handle: Declaration, error: ValueTypeError) -> TypeError:
    """The error of a value that does not fit, with the state's name."""
    where = f".{error.path}" if error.path else ""
    return TypeError(f"state {handle.name!r}{where}: {error.reason}")
