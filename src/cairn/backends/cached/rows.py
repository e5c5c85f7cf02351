"""Rows of a state and key group in a database, and the part of them in memory.

    the rows object itself    contents read or changed lately, decoded (the young generation)
    old                       contents read or changed before that; dropped if memory is short
    dirty                     changes that the database does not have yet, as in the overlay
    frozen                    changes that a writer is writing to the database just now
    database                  everything else

Always true here:
- the first of these layers that has a key has its newest content;
- dropping the two generations loses nothing;
- only the writer of frozen changes changes a row of the database;
- `peek` needs neither generation: the layers below have the same contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NoReturn, Protocol

from cairn.backends.cached.database import Database, Op, after
from cairn.backends.cached.timer_names import TIME_KINDS, read_timers
from cairn.backends.contract import ABSENT, Change, Content, Cursor
from cairn.backends.packing import Packing, estimate_value_bytes
from cairn.types.codec import Key

# The cost of a decoded value: its share of the dict, and small objects for key and value.
CACHED_ENTRY_BYTES: Final = 100
# The changed value is the cached one; only the dict entry is added.
DIRTY_ENTRY_BYTES: Final = 64
COUNT_SAMPLE: Final = 64
OPS_KEYS: Final = 4096
_MISSING: Any = object()


class Memory(Protocol):
    """Counts the bytes of all rows in memory."""

    settles_later: bool
    """Changes are restored without a look at what they change. It follows in `settle`."""

    def add_cached(self, count: int) -> None: ...
    def add_dirty(self, count: int) -> None: ...


class CachedRows(dict[Key, Content]):
    """Value, reducing and aggregating state; a cached None means that the key has no value."""

    __slots__ = (
        "database", "dirty", "frozen", "group", "held", "memory", "name", "old", "old_bytes",
        "packing", "prefix", "unsettled", "young_bytes",
    )  # fmt: skip

    def __init__(self, name: str, packing: Packing, memory: Memory, group: int) -> None:
        super().__init__()
        self.name = name
        self.group = group
        self.packing = packing
        self.memory = memory
        self.old: dict[Key, Content] = {}
        self.dirty: dict[Key, Change] = {}
        self.frozen: dict[Key, Change] = {}
        self.unsettled: dict[Key, Any] = {}
        """Restored keys of which nobody has looked up yet whether the database has them. Value:
        whether they are held since."""
        self.young_bytes = 0
        self.old_bytes = 0
        self.database: Database | None = None
        self.prefix = b""
        self.held = 0
        """Number of keys; an estimate after large epochs. Unsettled keys are not counted again, so
        it may be too small until they are settled."""

    def bind(self, database: Database) -> None:
        """Use this database from now on."""
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

    def get(self, key: Key, default: Content = None) -> Content:
        value = self[key]
        return default if value is None else value

    def __contains__(self, key: object) -> bool:
        return self[key] is not None

    def __len__(self) -> int:
        return max(0, self.held)

    def entry_count(self) -> int:
        return max(0, self.held)

    def __iter__(self) -> NoReturn:
        raise TypeError("rows in a database are iterated with items()")

    def __missing__(self, key: Key) -> Content:
        if self.recall(key):
            return self[key]
        database = self.database
        raw = None if database is None else database.get(self.prefix + self.packing.key(key))
        value = self[key] = None if raw is None else self.packing.value_of(raw)
        self.add_cached(CACHED_ENTRY_BYTES + len(raw or b""))
        return value

    def peek(self, key: Key) -> Content:
        value = self.recent(key)
        if value is not _MISSING:
            return value
        for layer in self.unwritten():
            value = layer.get(key, _MISSING)
            if value is not _MISSING:
                return value
        database = self.database
        raw = None if database is None else database.get(self.prefix + self.packing.key(key))
        return None if raw is None else self.packing.value_of(raw)

    def recent(self, key: Key) -> Content:
        """Return the content of a key in either generation, the younger one first."""
        value = dict.get(self, key, _MISSING)
        # In this order: a concurrent `rotate` makes young contents old, and drops old ones.
        return self.old.get(key, _MISSING) if value is _MISSING else value

    def unwritten(self) -> list[dict[Key, Change]]:
        """Return the layers that the database lacks, the newest first, before it is read.

        A writer may be writing them, or giving that up: a change that moves meanwhile is in
        two layers, not lost.
        """
        before, frozen = self.dirty, self.frozen
        return [self.dirty, before, frozen]

    def recall(self, key: Key) -> bool:
        """Make a key young, from memory alone; False if it is not in memory."""
        if key in self.old:
            self[key] = self._rejuvenate(key)
            return True
        for layer in (self.dirty, self.frozen):
            value = layer.get(key, _MISSING)
            if value is not _MISSING:
                self[key] = value
                self.add_cached(CACHED_ENTRY_BYTES)
                return True
        return False

    def _rejuvenate(self, key: Key) -> Content:
        share = self.old_bytes // len(self.old)
        self.old_bytes -= share
        self.young_bytes += share
        return self.old.pop(key)

    def add_cached(self, count: int) -> None:
        self.young_bytes += count
        self.memory.add_cached(count)

    def fill(
        self, keys: Sequence[Key], raws: Sequence[bytes | None], frozen: Mapping[Key, Change]
    ) -> None:
        """Cache the database's contents of keys that `recall` did not find.

        `frozen` is the layer as it was before the database was read: changes that a writer
        writes in between are then in both, not lost.
        """
        value_of = self.packing.value_of
        self.update(
            zip(keys, [None if raw is None else value_of(raw) for raw in raws], strict=True)
        )
        size = sum([len(raw) for raw in raws if raw is not None])
        self.add_cached(size + CACHED_ENTRY_BYTES * len(keys))

    def items(self) -> Iterator[tuple[Key, Content]]:  # type: ignore[override]
        # Before the database is read, as in `fill`.
        changed = {**self.dirty, **self.frozen}
        if self.database is not None:
            for key, held in scan_rows(self.database, self.prefix, self.packing):
                if key not in changed:
                    yield key, held
        for key in changed:
            held = self.peek(key)
            if held is not None:
                yield key, held

    def get_many(self, keys: Sequence[Key]) -> list[Content]:
        self.load(keys)
        return list(map(self.get, keys))

    def load(self, keys: Iterable[Key]) -> None:
        """Read these keys into memory."""
        keys = self.not_in_memory(keys)
        if keys:
            key_bytes, frozen = self.packing.key, self.frozen
            raws = self.read_many([self.prefix + key_bytes(key) for key in keys])
            self.fill(keys, raws, frozen)

    def not_in_memory(self, keys: Iterable[Key]) -> list[Key]:
        """Return the keys that must be read; the others are young now."""
        young = dict.__contains__
        return [key for key in keys if not young(self, key) and not self.recall(key)]

    def read_many(self, keys: list[bytes]) -> list[bytes | None]:
        return [None] * len(keys) if self.database is None else self.database.get_many(keys)

    def new_keys(self, keys: Iterable[Key]) -> list[Key]:
        young = dict.__contains__
        return [key for key in keys if not ((young(self, key) or self.recall(key)) and key in self)]

    def scan(
        self, cursor: Cursor | None, count: int
    ) -> tuple[list[tuple[Key, Content]], Cursor | None]:
        if cursor is None:
            # Their changes may cover a part of the row only. In this order, so that no change
            # is missed that a writer writes meanwhile.
            unwritten = {**self.dirty, **self.frozen}
            return [(key, ABSENT) for key in unwritten], b""
        if self.database is None:
            return [], None
        # Before the database is read, as in `fill`.
        frozen = self.frozen
        found = list(islice(scan_rows(self.database, self.prefix, self.packing, cursor), count))
        then = None
        if len(found) == count:
            then = after(self.prefix + self.packing.key(found[-1][0]))
        # The database has old contents of keys that were changed since the scan began.
        dirty = self.dirty
        pairs = [(key, ABSENT if key in dirty or key in frozen else held) for key, held in found]
        return pairs, then

    def compact(self) -> None:
        pass

    def rotate(self) -> int:
        """Drop contents not used since the last rotation, and return their bytes."""
        forgotten = self.old_bytes
        self.old, self.old_bytes = dict.copy(self), self.young_bytes
        self.clear()
        self.young_bytes = 0
        return forgotten

    def set_counts(self, keys: int, entries: int) -> None:
        self.held = keys

    # Changing

    def promote(self, changes: Mapping[Key, Change]) -> None:
        self.held += self._estimate_new(changes)
        self._change(changes)

    def _change(self, changes: Mapping[Key, Change]) -> None:
        cached, unwritten = dict.__len__(self), len(self.dirty)
        self.update(changes)
        self.dirty.update(changes)
        payload = len(changes) * estimate_value_bytes(changes.values(), self.packing.value)
        cached = dict.__len__(self) - cached
        self.add_cached(payload + cached * CACHED_ENTRY_BYTES)
        self.memory.add_dirty(payload + (len(self.dirty) - unwritten) * DIRTY_ENTRY_BYTES)

    def restore(self, changes: Mapping[Key, Change]) -> None:
        if not self.settles_later:
            self.promote(changes)
            return
        unknown = set(self.not_in_memory(changes))
        for key, change in changes.items():
            if key in unknown:
                self.unsettled[key] = change is not None
            else:
                self.held += (change is not None) - (self[key] is not None)
        self._change(changes)

    @property
    def settles_later(self) -> bool:
        # Without a database nothing has to be read, and what is frozen may be there soon.
        return self.memory.settles_later and self.database is not None and not self.frozen

    def select_unsettled(self) -> list[Key]:
        """Return the keys that `settle` needs, to settle all."""
        return list(islice(self.unsettled, 0, None, max(1, len(self.unsettled) // COUNT_SAMPLE)))

    def names_to_settle(self, keys: Sequence[Key]) -> list[bytes]:
        """Return the names of the rows that `settle` gets the contents of."""
        key_bytes = self.packing.key
        return [self.prefix + key_bytes(key) for key in keys]

    def settle(self, keys: Sequence[Key], raws: Sequence[bytes | None]) -> None:
        """Count restored keys by what the database had of them."""
        more = sum(self.unsettled[k] - (r is not None) for k, r in zip(keys, raws, strict=True))
        if keys:
            self.held += round(len(self.unsettled) * more / len(keys))
        self.unsettled = {}

    def needs_settled(self, keys: Sequence[Key]) -> list[Key]:
        """Return those of the keys that must be settled before they are read."""
        return []

    def layer_bytes(self, layer: Mapping[Key, Change]) -> int:
        """Estimate the memory of a layer of changes."""
        payload = estimate_value_bytes(layer.values(), self.packing.value)
        return len(layer) * (DIRTY_ENTRY_BYTES + payload)

    def select_to_compare(self, changes: Mapping[Key, Change]) -> list[Key]:
        """Return the keys whose present content is compared with their changes."""
        return list(islice(changes, 0, None, max(1, len(changes) // COUNT_SAMPLE)))

    def _estimate_new(self, changes: Mapping[Key, Change]) -> int:
        """Estimate from a sample by how much changes raise the number of keys."""
        sample = self.select_to_compare(changes)
        self.load(sample)
        more = sum((changes[key] is not None) - (self[key] is not None) for key in sample)
        return round(len(changes) * more / len(sample)) if sample else 0

    def freeze(self) -> None:
        assert not self.frozen, "a writer is at work already"
        self.frozen, self.dirty = self.dirty, {}

    def thaw(self) -> None:
        """Make frozen changes dirty again, after the writer gave up."""
        self.dirty, self.frozen = {**self.frozen, **self.dirty}, {}

    def ops(self, prefix: bytes) -> Iterator[list[Op]]:
        """Yield the frozen changes as database operations, in pieces, in no order."""
        key_bytes, value_bytes = self.packing.key, self.packing.value
        for piece in pieces(self.frozen):
            yield [
                (prefix + key_bytes(key), None if value is None else value_bytes(value))
                for key, value in piece
            ]


def scan_rows(
    database: Database, prefix: bytes, packing: Packing, start: bytes = b""
) -> Iterator[tuple[Key, Content]]:
    """Yield each key of a state and group in a database, from `start` on, with its content."""
    if packing.kind in TIME_KINDS:
        yield from read_timers(database, prefix, packing).items()
        return
    cut = len(prefix)
    if packing.kind not in ("map", "list"):
        for row, raw in database.scan(prefix, start):
            yield packing.key_of(row[cut:]), packing.value_of(raw)
        return
    is_map = packing.kind == "map"
    header = b""
    held: Content = None
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


def pieces(layer: dict[Key, Change]) -> Iterator[list[tuple[Key, Change]]]:
    """Yield the changes of a layer, a few thousand at a time."""
    pairs = iter(layer.items())
    while piece := list(islice(pairs, OPS_KEYS)):
        yield piece
