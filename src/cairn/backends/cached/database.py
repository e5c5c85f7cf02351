"""A database of a slot, as the rows above it use it: sorted rows of bytes.

Keys are `key group (2 bytes, big endian) | state | key [| entry or index]`. So rows of a key lie
together, and those of a state in a key group. How many bytes name the state is up to the database.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

Op = tuple[bytes, bytes | None]
"""A row to put, or to delete (None)."""


class Database(Protocol):
    """Sorted rows of bytes."""

    rows_bound: int
    """Number of `CachedRows` objects that keep their rows here."""

    def prefix(self, state: str, group: int) -> bytes:
        """Return the begin of all keys of a state in a key group."""

    def get(self, key: bytes) -> bytes | None: ...

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def scan(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield rows with this prefix, in order, from `start` on."""


def after(prefix: bytes) -> bytes:
    """Return the first key that is greater than all keys with this prefix."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1])
