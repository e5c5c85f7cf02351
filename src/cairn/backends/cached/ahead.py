"""Reads keys from databases on another thread, while a slot processes the rows before them.

Always true here:
- one read is under way at a time, of one piece of rows, so its memory is bounded;
- only the thread that processes rows changes what is in memory: the other one returns bytes;
- a read ends before its rows can change: the caller takes or drops it within an epoch;
- an error of a read is raised where its result is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from cairn.backends.cached.database import Database
from cairn.backends.cached.rows import CachedRows
from cairn.backends.contract import Change
from cairn.types.codec import Key


class Missing(NamedTuple):
    """Keys that are not in memory, of a state and key group."""

    rows: CachedRows
    keys: list[Key]
    frozen: Mapping[Key, Change]
    """Changes that were being written before the database was read."""


Raws = list[bytes | None]
Read = list[tuple[Missing, Raws]]


def read_missing(parts: Sequence[Missing]) -> Read:
    """Read keys with one call per database."""
    return list(_read(parts))


def _read(parts: Sequence[Missing]) -> Iterator[tuple[Missing, Raws]]:
    by_database: dict[Database | None, list[Missing]] = {}
    for part in parts:
        by_database.setdefault(part.rows.database, []).append(part)
    for database, alike in by_database.items():
        if database is None:
            for part in alike:
                yield part, [None] * len(part.keys)
            continue
        names: list[bytes] = []
        for part in alike:
            key_bytes, prefix = part.rows.packing.key, part.rows.prefix
            names += [prefix + key_bytes(key) for key in part.keys]
        raws = database.get_many(names)
        at = 0
        for part in alike:
            yield part, raws[at : at + len(part.keys)]
            at += len(part.keys)


class ReadAhead:
    """At most one read that is under way."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._reading: Future[Read] | None = None

    def begin(self, parts: Sequence[Missing]) -> None:
        assert self._reading is None, "one read at a time"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._reading = self._thread.submit(read_missing, parts)

    def take(self) -> Read:
        """Wait for the read, and return what was found; nothing if none was begun."""
        reading, self._reading = self._reading, None
        return [] if reading is None else reading.result()

    def drop(self) -> None:
        """Wait for the read, and forget it."""
        # Nobody needs its rows, so nobody needs its error.
        with suppress(Exception):
            self.take()

    def close(self) -> None:
        self.drop()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
