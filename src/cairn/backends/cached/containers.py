"""Map and list state in a database: rows that hold a view of each key's entries or items.

Map state has a header per key (the number of entries) and a row per entry; list state a header
(the number of items) and a row per item. A key without a header has no content.

Always true here:
- changing an entry, or appending, costs what is changed, however much a key holds;
- a view shows committed content; only `promote` changes it.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from cairn.backends.cached.database import Op
from cairn.backends.cached.ordered import IndexRows, OrderedRows
from cairn.backends.cached.rows import (
    CACHED_ENTRY_BYTES,
    COUNT_SAMPLE,
    DIRTY_ENTRY_BYTES,
    OPS_KEYS,
    CachedRows,
    Memory,
    pieces,
)
from cairn.backends.cached.timer_names import INDEX_KIND, KIND
from cairn.backends.contract import ABSENT, Change, Content
from cairn.backends.packing import Packing, decode, encode, estimate_value_bytes
from cairn.types.codec import Datum, Key
from cairn.types.codec.core import Values

# Maps up to this size are read whole when one entry is read.
_SCAN_ENTRIES_MAX: Final = 64
_MISSING: Any = object()
_INDEX: Final = struct.Struct(">Q")


class MapView(Mapping[Key, Datum]):
    """The entries of one key: those in memory, and a way to read the others."""

    __slots__ = ("count", "key_bytes", "known", "rows", "whole")

    def __init__(self, rows: CachedMapRows, key_bytes: bytes, count: int) -> None:
        self.rows = rows
        self.key_bytes = key_bytes
        self.count = count
        self.known: dict[Key, Datum] = {}
        """Entry to value, or to ABSENT; without absent ones if `whole`."""
        self.whole = count == 0
        """All entries are known."""

    def get(self, entry: Key, default: Datum = None) -> Datum:
        value = self.known.get(entry, _MISSING)
        if value is _MISSING:
            if not self.whole:
                self.fetch([entry])
            value = self.known.get(entry, ABSENT)
        return default if value is ABSENT else value

    def __getitem__(self, entry: Key) -> Datum:
        value = self.get(entry, ABSENT)
        if value is ABSENT:
            raise KeyError(entry)
        return value

    def __contains__(self, entry: Any) -> bool:
        return self.get(entry, ABSENT) is not ABSENT

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Key]:
        return iter(self.load())

    def copy(self) -> dict[Key, Datum]:
        return self.load().copy()

    def fetch(self, entries: Sequence[Key]) -> None:
        """Read entries into memory."""
        if self.count <= _SCAN_ENTRIES_MAX:
            self.load()
            return
        rows = self.rows
        prefix = rows.prefix + self.key_bytes
        raws = rows.read_many([prefix + rows.packing.entry(entry) for entry in entries])
        size = CACHED_ENTRY_BYTES * len(raws)
        for entry, raw in zip(entries, raws, strict=True):
            self.known[entry] = ABSENT if raw is None else rows.packing.value_of(raw)
            size += len(raw or b"")
        rows.add_cached(size)

    def load(self) -> dict[Key, Datum]:
        """Read all entries into memory."""
        if not self.whole:
            rows = self.rows
            loaded: dict[Key, Datum] = {}
            size = 0
            if rows.database is not None:
                prefix = rows.prefix + self.key_bytes
                entry_of, value_of = rows.packing.entry_of, rows.packing.value_of
                for key, raw in rows.database.scan(prefix):
                    if len(key) > len(prefix):
                        loaded[entry_of(key[len(prefix) :])] = value_of(raw)
                        size += len(raw) + CACHED_ENTRY_BYTES
            loaded.update(self.known)
            self.known = {e: value for e, value in loaded.items() if value is not ABSENT}
            self.whole = True
            rows.add_cached(size)
        return self.known

    def change(self, changed: Mapping[Key, Datum]) -> None:
        """Apply changes of entries, all of which are known."""
        known = self.known
        for entry, value in changed.items():
            before = known.get(entry, ABSENT) is not ABSENT
            self.count += (value is not ABSENT) - before
            if value is ABSENT and self.whole:
                known.pop(entry, None)
            else:
                known[entry] = value


class CachedMapRows(CachedRows):
    """Map state: the cache holds views. Changes are (number of entries, {entry: value})."""

    __slots__ = ("entries_held",)

    def __init__(self, name: str, packing: Packing, memory: Memory, group: int) -> None:
        super().__init__(name, packing, memory, group)
        self.entries_held = 0

    def get(self, key: Key, default: Content = None) -> Content:
        view = self[key]
        return view if len(view) else default

    def __contains__(self, key: object) -> bool:
        return len(self[key]) > 0

    def peek(self, key: Key) -> Content:
        view = self.recent(key)
        if isinstance(view, MapView) and view.whole:
            return view.known.copy() or None
        held: dict[Key, Datum] = {}
        layers = self.unwritten()
        for at, raw in self._scan_key(key):
            held[self.packing.entry_of(at)] = self.packing.value_of(raw)
        for layer in reversed(layers):
            change = layer.get(key)
            if change is not None:
                held.update(change[1])
        return {entry: value for entry, value in held.items() if value is not ABSENT} or None

    def _scan_key(self, key: Key) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries or items of a key in the database, without the header."""
        database = self.database
        if database is not None:
            prefix = self.prefix + self.packing.key(key)
            for name, raw in database.scan(prefix):
                if len(name) > len(prefix):
                    yield name[len(prefix) :], raw

    def entry_count(self) -> int:
        return self.entries_held

    def set_counts(self, keys: int, entries: int) -> None:
        self.held, self.entries_held = keys, entries

    def recall(self, key: Key) -> bool:
        if key not in self.old:
            return False
        self[key] = self._rejuvenate(key)
        return True

    def fill(
        self, keys: Sequence[Key], raws: Sequence[bytes | None], frozen: Mapping[Key, Change]
    ) -> None:
        layers = (frozen, self.dirty)
        for key, raw in zip(keys, raws, strict=True):
            count = 0 if raw is None else decode(raw)
            view = MapView(self, self.packing.key(key), count)
            for layer in layers:
                change = layer.get(key)
                if change is not None:
                    view.count = change[0]
                    view.known.update(change[1])
            if view.whole:
                view.known = {e: v for e, v in view.known.items() if v is not ABSENT}
            self[key] = view
        self.add_cached(2 * CACHED_ENTRY_BYTES * len(keys))

    def __missing__(self, key: Key) -> Content:
        self.load((key,))
        return self[key]

    def select_to_compare(self, changes: Mapping[Key, Change]) -> list[Key]:
        return list(changes)

    def promote(self, changes: Mapping[Key, Change]) -> None:
        self.load(changes)
        self._load_entries(changes)
        size = 0
        for key, changed in changes.items():
            view: MapView = self[key]
            before = view.count
            view.change(changed)
            self.held += (view.count > 0) - (before > 0)
            self.entries_held += view.count - before
            earlier = self.dirty.get(key)
            merged = {} if earlier is None else earlier[1]
            merged.update(changed)
            self.dirty[key] = (view.count, merged)
            size += self._content_bytes(changed.values())
        self.add_cached(2 * size)
        self.memory.add_dirty(size)

    def _content_bytes(self, values: Collection[Datum]) -> int:
        """Estimate the memory of the changed entries or items of a key."""
        payload = estimate_value_bytes(values, self.packing.value)
        return len(values) * (DIRTY_ENTRY_BYTES + payload) + DIRTY_ENTRY_BYTES

    def layer_bytes(self, layer: Mapping[Key, Change]) -> int:
        sample = list(islice(layer.values(), 0, None, max(1, len(layer) // COUNT_SAMPLE)))
        size = sum(self._content_bytes(self._values_of(change)) for change in sample)
        return size * len(layer) // max(1, len(sample))

    def _values_of(self, change: Change) -> Collection[Datum]:
        return change[1].values()  # type: ignore[no-any-return]

    def _load_entries(self, changes: Mapping[Key, Change]) -> None:
        """Read all changed entries at once: only known entries can be counted."""
        wanted: list[tuple[MapView, Key]] = []
        for key, changed in changes.items():
            view: MapView = self[key]
            if not view.whole:
                if view.count <= _SCAN_ENTRIES_MAX:
                    view.load()
                else:
                    wanted += [(view, entry) for entry in changed if entry not in view.known]
        entry_bytes, prefix = self.packing.entry, self.prefix
        raws = self.read_many([prefix + v.key_bytes + entry_bytes(entry) for v, entry in wanted])
        for (view, entry), raw in zip(wanted, raws, strict=True):
            view.known[entry] = ABSENT if raw is None else self.packing.value_of(raw)

    def thaw(self) -> None:
        for key, (count, changed) in self.frozen.items():
            later = self.dirty.get(key)
            self.dirty[key] = (
                (count, changed) if later is None else (later[0], {**changed, **later[1]})
            )
        self.frozen = {}

    def ops(self, prefix: bytes) -> Iterator[list[Op]]:
        packing = self.packing
        for piece in pieces(self.frozen):
            ops: list[Op] = []
            for key, (count, changed) in piece:
                header = prefix + packing.key(key)
                ops.append((header, encode(count) if count else None))
                for entry, value in changed.items():
                    row = None if value is ABSENT else packing.value(value)
                    ops.append((header + packing.entry(entry), row))
                    if len(ops) >= OPS_KEYS:
                        yield ops
                        ops = []
            yield ops


class ListView(Sequence[Datum]):
    """The items of one key: the first `below` of them in the database, then `tail`."""

    __slots__ = ("below", "key_bytes", "rows", "tail")

    def __init__(self, rows: CachedListRows, key_bytes: bytes, count: int) -> None:
        self.rows = rows
        self.key_bytes = key_bytes
        self.below = count
        self.tail: Values = []

    def __len__(self) -> int:
        return self.below + len(self.tail)

    def __getitem__(self, index: Any) -> Any:
        # One item by its index does not load the whole list.
        if type(index) is int and self.below and index >= 0:
            if index >= self.below:
                return self.tail[index - self.below]
            rows = self.rows
            (raw,) = rows.read_many([rows.prefix + self.key_bytes + _INDEX.pack(index)])
            if raw is not None:
                return rows.packing.value_of(raw)
        return self.load()[index]

    def __iter__(self) -> Iterator[Datum]:
        return iter(self.load())

    def load(self) -> Values:
        if self.below:
            rows = self.rows
            assert rows.database is not None
            prefix = rows.prefix + self.key_bytes
            value_of = rows.packing.value_of
            items: Values = []
            size = 0
            for key, raw in rows.database.scan(prefix):
                if len(key) > len(prefix):
                    if len(items) == self.below:
                        break
                    items.append(value_of(raw))
                    size += len(raw) + CACHED_ENTRY_BYTES
            self.tail = items + self.tail
            self.below = 0
            rows.add_cached(size)
        return self.tail

    def change(self, start: int, added: Sequence[Datum]) -> None:
        if start < self.below:
            self.below, self.tail = start, list(added)
        else:
            del self.tail[start - self.below :]
            self.tail += added


class CachedListRows(CachedMapRows):
    """List state: the cache holds views. Changes are (start, added)."""

    __slots__ = ()

    def peek(self, key: Key) -> Content:
        view = self.recent(key)
        if isinstance(view, ListView) and not view.below:
            return view.tail.copy() or None
        layers = self.unwritten()
        held = [self.packing.value_of(raw) for _, raw in self._scan_key(key)]
        for layer in reversed(layers):
            change = layer.get(key)
            if change is not None:
                start, added = change
                held = [*held[:start], *added]
        return held or None

    def entry_count(self) -> int:
        return self.held

    def fill(
        self, keys: Sequence[Key], raws: Sequence[bytes | None], frozen: Mapping[Key, Change]
    ) -> None:
        layers = (frozen, self.dirty)
        for key, raw in zip(keys, raws, strict=True):
            view = ListView(self, self.packing.key(key), 0 if raw is None else decode(raw))
            for layer in layers:
                change = layer.get(key)
                if change is not None:
                    view.change(*change)
            self[key] = view
        self.add_cached(2 * CACHED_ENTRY_BYTES * len(keys))

    def promote(self, changes: Mapping[Key, Change]) -> None:
        self.load(changes)
        size = 0
        for key, (start, added) in changes.items():
            view: ListView = self[key]
            before = len(view)
            view.change(start, added)
            self.held += (len(view) > 0) - (before > 0)
            self.dirty[key] = _merge(self.dirty.get(key), (start, added))
            size += self._content_bytes(added)
        self.add_cached(size)
        self.memory.add_dirty(size)

    def _values_of(self, change: Change) -> Collection[Datum]:
        return change[1]  # type: ignore[no-any-return]

    def thaw(self) -> None:
        for key, change in self.frozen.items():
            later = self.dirty.get(key)
            self.dirty[key] = change if later is None else _merge(change, later)
        self.frozen = {}

    def ops(self, prefix: bytes) -> Iterator[list[Op]]:
        packing = self.packing
        for piece in pieces(self.frozen):
            headers = [prefix + packing.key(key) for key, _ in piece]
            ops: list[Op] = []
            for header, raw, (_, (start, added)) in zip(
                headers, self.read_many(headers), piece, strict=True
            ):
                count = start + len(added)
                ops.append((header, encode(count) if count else None))
                for at, item in enumerate(added, start):
                    ops.append((header + _INDEX.pack(at), packing.value(item)))
                    if len(ops) >= OPS_KEYS:
                        yield ops
                        ops = []
                stored = 0 if raw is None else decode(raw)
                ops += [(header + _INDEX.pack(at), None) for at in range(count, stored)]
            yield ops


ListChange = tuple[int, Values]


def _merge(change: ListChange | None, later: ListChange) -> ListChange:
    """Return two changes of a list as one; the first one's list is reused."""
    start, added = later
    if change is None or start < change[0]:
        return start, list(added)
    first, items = change
    del items[start - first :]
    items += added
    return first, items


ROWS: dict[str, type[CachedRows]] = {
    "map": CachedMapRows,
    "list": CachedListRows,
    KIND: OrderedRows,
    INDEX_KIND: IndexRows,
}


def make_rows(name: str, packing: Packing, memory: Memory, group: int) -> CachedRows:
    return ROWS.get(packing.kind, CachedRows)(name, packing, memory, group)
