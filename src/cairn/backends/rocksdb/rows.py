"""Rows of a state and key group that lie in RocksDB, with what is in memory of them.

    the rows object itself    what was read or changed lately, decoded (the young generation)
    old                       what was before that; when memory is short it is forgotten
    dirty                     changes that RocksDB does not have yet, as the overlay holds them
    frozen                    those that a writer is taking to RocksDB just now
    database                  the rest

Always true here:
- the newest word on a key is found by asking in the order above;
- dropping the two generations loses nothing;
- a row of the database is changed only by the writer of frozen changes;
- `peek` needs neither generation: what it finds there is what it would find below.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NoReturn, Protocol

from cairn.backends.base import ABSENT
from cairn.backends.packing import Packing, estimate_value_bytes
from cairn.backends.rocksdb.database import Database, Op, after

# What a decoded value costs: its share of the dict, and small objects for key and value.
CACHED_ENTRY_BYTES: Final = 100
# The changed value is the cached one; only the dict entry is added.
DIRTY_ENTRY_BYTES: Final = 64
COUNT_SAMPLE: Final = 64
# Maps up to this size are read whole when one entry is asked for.
_SCAN_ENTRIES_MAX: Final = 64
OPS_KEYS: Final = 4096
_MISSING: Any = object()
_INDEX: Final = struct.Struct(">Q")


class Memory(Protocol):
    """Who counts the bytes."""

    def cached(self, count: int) -> None: ...
    def changed(self, count: int) -> None: ...
    def flush(self) -> None: ...


class RocksRows(dict[Any, Any]):
    """Value, reducing and aggregating state; a cached None says that there is no value."""

    __slots__ = (
        "database", "dirty", "frozen", "group", "held", "memory", "name", "old", "old_bytes",
        "packing", "prefix", "young_bytes",
    )  # fmt: skip

    def __init__(self, name: str, packing: Packing, memory: Memory, group: int) -> None:
        super().__init__()
        self.name = name
        self.group = group
        self.packing = packing
        self.memory = memory
        self.old: dict[Any, Any] = {}
        self.dirty: dict[Any, Any] = {}
        self.frozen: dict[Any, Any] = {}
        self.young_bytes = 0
        self.old_bytes = 0
        self.database: Database | None = None
        self.prefix = b""
        self.held = 0
        """How many keys; with large epochs an estimate."""

    def bind(self, database: Database) -> None:
        """The rows below are here from now on."""
        assert database is not self.database
        self.unbind()
        self.prefix = database.prefix(self.name, self.group)
        self.database = database
        database.rows_bound += 1

    def unbind(self) -> None:
        if self.database is not None:
            self.database.rows_bound -= 1
            self.database = None

    # Reading

    def get(self, key: Any, default: Any = None) -> Any:
        value = self[key]
        return default if value is None else value

    def __contains__(self, key: Any) -> bool:
        return self[key] is not None

    def __len__(self) -> int:
        return self.held

    def entry_count(self) -> int:
        return self.held

    def __iter__(self) -> NoReturn:
        raise TypeError("rows in RocksDB are iterated with items()")

    def __missing__(self, key: Any) -> Any:
        if self.recall(key):
            return self[key]
        database = self.database
        raw = None if database is None else database.get(self.prefix + self.packing.key(key))
        value = self[key] = None if raw is None else self.packing.value_of(raw)
        self.cached(CACHED_ENTRY_BYTES + len(raw or b""))
        return value

    def peek(self, key: Any) -> Any:
        value = self.remembered(key)
        if value is not _MISSING:
            return value
        for layer in self.unwritten():
            value = layer.get(key, _MISSING)
            if value is not _MISSING:
                return value
        database = self.database
        raw = None if database is None else database.get(self.prefix + self.packing.key(key))
        return None if raw is None else self.packing.value_of(raw)

    def remembered(self, key: Any) -> Any:
        """What either generation has of a key; the younger one is asked first."""
        value = dict.get(self, key, _MISSING)
        # Only now: what was young a moment ago may be old, and what was old be gone.
        return self.old.get(key, _MISSING) if value is _MISSING else value

    def unwritten(self) -> list[dict[Any, Any]]:
        """The layers that the database lacks, the newest first, for one who asks it next.

        A writer may be taking them there, or giving that up: what moves meanwhile is seen
        twice, not lost.
        """
        before, frozen = self.dirty, self.frozen
        return [self.dirty, before, frozen]

    def recall(self, key: Any) -> bool:
        """Make a key young from memory alone, if it is there."""
        if key in self.old:
            self[key] = self._rejuvenate(key)
            return True
        for layer in (self.dirty, self.frozen):
            value = layer.get(key, _MISSING)
            if value is not _MISSING:
                self[key] = value
                self.cached(CACHED_ENTRY_BYTES)
                return True
        return False

    def _rejuvenate(self, key: Any) -> Any:
        share = self.old_bytes // len(self.old)
        self.old_bytes -= share
        self.young_bytes += share
        return self.old.pop(key)

    def cached(self, count: int) -> None:
        self.young_bytes += count
        self.memory.cached(count)

    def fill(
        self, keys: Sequence[Any], raws: Sequence[bytes | None], frozen: Mapping[Any, Any]
    ) -> None:
        """Take in what the database says of keys that `recall` did not find.

        `frozen` is as it was before the database was asked: what a writer takes there in
        between is then seen twice, not lost.
        """
        value_of = self.packing.value_of
        self.update(
            zip(keys, [None if raw is None else value_of(raw) for raw in raws], strict=True)
        )
        size = sum([len(raw) for raw in raws if raw is not None])
        self.cached(size + CACHED_ENTRY_BYTES * len(keys))

    def items(self) -> Iterator[tuple[Any, Any]]:  # type: ignore[override]
        self.memory.flush()
        if self.database is not None:
            yield from scan_rows(self.database, self.prefix, self.packing)

    def held_many(self, keys: Sequence[Any]) -> list[Any]:
        self.know(keys)
        return list(map(self.get, keys))

    def know(self, keys: Iterable[Any]) -> None:
        """Have these keys in memory."""
        young = dict.__contains__
        keys = [key for key in keys if not young(self, key) and not self.recall(key)]
        if keys:
            key_bytes, frozen = self.packing.key, self.frozen
            raws = self.read_many([self.prefix + key_bytes(key) for key in keys])
            self.fill(keys, raws, frozen)

    def read_many(self, keys: list[bytes]) -> list[bytes | None]:
        return [None] * len(keys) if self.database is None else self.database.get_many(keys)

    def new_keys(self, keys: Iterable[Any]) -> list[Any]:
        young = dict.__contains__
        return [key for key in keys if not ((young(self, key) or self.recall(key)) and key in self)]

    def scan(self, cursor: bytes | None, count: int) -> tuple[list[tuple[Any, Any]], bytes | None]:
        if cursor is None:
            # Of these the newest word may be a part of the row. Asked for in this order, so
            # that none is missed which a writer takes down meanwhile.
            unwritten = {**self.dirty, **self.frozen}
            return [(key, ABSENT) for key in unwritten], b""
        if self.database is None:
            return [], None
        # Taken before the database is asked, as in `fill`.
        frozen = self.frozen
        found = list(islice(scan_rows(self.database, self.prefix, self.packing, cursor), count))
        then = None
        if len(found) == count:
            then = after(self.prefix + self.packing.key(found[-1][0]))
        # Of keys that were changed since the scan began, the database has an old word.
        dirty = self.dirty
        pairs = [(key, ABSENT if key in dirty or key in frozen else held) for key, held in found]
        return pairs, then

    def compact(self) -> None:
        pass

    def rotate(self) -> int:
        """Forget what was not touched since the last rotation; how many bytes that were."""
        forgotten = self.old_bytes
        self.old, self.old_bytes = dict.copy(self), self.young_bytes
        self.clear()
        self.young_bytes = 0
        return forgotten

    def set_counts(self, keys: int, entries: int) -> None:
        self.held = keys

    # Changing

    def promote(self, changes: Mapping[Any, Any]) -> None:
        self.held += self._held_more(changes)
        cached, unwritten = dict.__len__(self), len(self.dirty)
        self.update(changes)
        self.dirty.update(changes)
        payload = len(changes) * estimate_value_bytes(changes.values(), self.packing.value)
        cached = dict.__len__(self) - cached
        self.cached(payload + cached * CACHED_ENTRY_BYTES)
        self.memory.changed(payload + (len(self.dirty) - unwritten) * DIRTY_ENTRY_BYTES)

    def _held_more(self, changes: Mapping[Any, Any]) -> int:
        step = max(1, len(changes) // COUNT_SAMPLE)
        sample = list(islice(changes.items(), 0, None, step))
        more = sum((value is not None) - (self[key] is not None) for key, value in sample)
        return round(len(changes) * more / len(sample)) if sample else 0

    def freeze(self) -> None:
        assert not self.frozen, "a writer is at work already"
        self.frozen, self.dirty = self.dirty, {}

    def thaw(self) -> None:
        """The writer gave up: what is frozen is unwritten again."""
        self.dirty, self.frozen = {**self.frozen, **self.dirty}, {}

    def ops(self, prefix: bytes) -> Iterator[list[Op]]:
        """What the frozen changes mean in the database, in pieces, in no order."""
        key_bytes, value_bytes = self.packing.key, self.packing.value
        for piece in pieces(self.frozen):
            yield [
                (prefix + key_bytes(key), None if value is None else value_bytes(value))
                for key, value in piece
            ]


def scan_rows(
    database: Database, prefix: bytes, packing: Packing, start: bytes = b""
) -> Iterator[tuple[Any, Any]]:
    """Every key of a state and group in a database (from `start` on), with what is held of it."""
    cut = len(prefix)
    if packing.kind not in ("map", "list"):
        for row, raw in database.scan(prefix, start):
            yield packing.key_of(row[cut:]), packing.value_of(raw)
        return
    is_map = packing.kind == "map"
    header = b""
    held: Any = None
    for row, raw in database.scan(prefix, start):
        if header and row.startswith(header):
            if is_map:
                held[packing.entry_of(row[len(header) :])] = packing.value_of(raw)
            else:
                held.append(packing.value_of(raw))
            continue
        if header:
            yield packing.key_of(header[cut:]), held
        header, held = row, {} if is_map else []
    if header:
        yield packing.key_of(header[cut:]), held


def pieces(layer: dict[Any, Any]) -> Iterator[list[tuple[Any, Any]]]:
    """The changes of a layer, a few thousand at a time."""
    pairs = iter(layer.items())
    while piece := list(islice(pairs, OPS_KEYS)):
        yield piece
