"""Map state in a database: rows that hold a view of each key's entries.

A key has a header (the number of entries) and a row per entry. A key without a header has none.

Always true here:
- changing an entry costs what is changed, however much a key holds;
- a view shows committed content; only `promote` and `restore` change it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from cairn.backends.cached.database import Op
from cairn.backends.cached.rows import (
    CACHED_ENTRY_BYTES,
    COUNT_SAMPLE,
    DIRTY_ENTRY_BYTES,
    OPS_KEYS,
    CachedRows,
    Memory,
    pieces,
)
from cairn.backends.contract import ABSENT, Change, Content
from cairn.backends.packing import Packing, decode, encode, estimate_value_bytes
from cairn.types.codec import Datum, Key

# Maps up to this size are read whole when one entry is read.
_SCAN_ENTRIES_MAX: Final = 64
_MISSING: Any = object()


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
    """Map state: the cache holds views. Changes are (number of entries, {entry: value}).

    The number is None while a restored change is not settled. Such a key has no view, and its value
    in `unsettled` is the number before; None: that of the database.
    """

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
        return max(0, self.entries_held)

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
        unsettled = self.needs_settled(keys)
        if unsettled:
            self.settle(unsettled, self.read_many(self.names_to_settle(unsettled)))
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

    def restore(self, changes: Mapping[Key, Change]) -> None:
        if not self.settles_later:
            self.promote(changes)
            return
        known: dict[Key, Change] = {}
        size = 0
        for key, changed in changes.items():
            if key in self.old:
                self.recall(key)
            view: MapView | None = dict.get(self, key)
            if view is not None and view.whole:
                known[key] = changed
                continue
            if view is not None:
                del self[key]
            count, merged = self.dirty.get(key, (None, {}))
            self.unsettled.setdefault(key, count)
            merged.update(changed)
            self.dirty[key] = (None, merged)
            size += self._content_bytes(changed.values())
        self.memory.add_dirty(size)
        if known:
            self.promote(known)

    def select_unsettled(self) -> list[Key]:
        return list(self.unsettled)

    def needs_settled(self, keys: Sequence[Key]) -> list[Key]:
        return [key for key in keys if key in self.unsettled] if self.unsettled else []

    def names_to_settle(self, keys: Sequence[Key]) -> list[bytes]:
        # The number of entries, and which there are: in one call, so they fit together.
        names: list[bytes] = []
        key_bytes, entry_bytes = self.packing.key, self.packing.entry
        for key in keys:
            header = self.prefix + key_bytes(key)
            names += [header, *[header + entry_bytes(entry) for entry in self.dirty[key][1]]]
        return names

    def settle(self, keys: Sequence[Key], raws: Sequence[bytes | None]) -> None:
        found = iter(raws)
        for key in keys:
            header, changed = next(found), self.dirty[key][1]
            stored = 0 if header is None else decode(header)
            is_held = [raw is not None for raw in islice(found, len(changed))]
            is_live = [value is not ABSENT for value in changed.values()]
            count = stored + sum(is_live) - sum(is_held)
            before = self.unsettled.pop(key)
            before = stored if before is None else before
            self.dirty[key] = (count, changed)
            self.held += (count > 0) - (before > 0)
            self.entries_held += count - before

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
