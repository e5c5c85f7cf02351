"""List state in a database: rows that hold a view of each key's items.

A key has a header (the number of items) and a row per item. A key without a header has no content.

Always true here:
- appending costs what is appended, however much a key holds;
- a view shows committed content; only `promote` and `restore` change it.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from cairn.backends.cached.database import Op
from cairn.backends.cached.maps import CachedMapRows
from cairn.backends.cached.rows import CACHED_ENTRY_BYTES, OPS_KEYS, CachedRows, pieces
from cairn.backends.contract import Change, Content
from cairn.backends.packing import decode, encode
from cairn.types.codec import Datum, Key
from cairn.types.codec.core import Values

_INDEX: Final = struct.Struct(">Q")


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
        return max(0, self.held)

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

    def restore(self, changes: Mapping[Key, Change]) -> None:
        if not self.settles_later:
            self.promote(changes)
            return
        known: dict[Key, Change] = {}
        size = 0
        for key, (start, added) in changes.items():
            earlier = self.dirty.get(key)
            if dict.__contains__(self, key) or self.recall(key):
                known[key] = (start, added)
                continue
            is_held = start > 0 or len(added) > 0
            if earlier is None:
                self.unsettled[key] = is_held
            else:
                self.held += is_held - (earlier[0] > 0 or len(earlier[1]) > 0)
            self.dirty[key] = _merge(earlier, (start, added))
            size += self._content_bytes(added)
        self.memory.add_dirty(size)
        if known:
            self.promote(known)

    def needs_settled(self, keys: Sequence[Key]) -> list[Key]:
        return []

    def names_to_settle(self, keys: Sequence[Key]) -> list[bytes]:
        return CachedRows.names_to_settle(self, keys)

    def settle(self, keys: Sequence[Key], raws: Sequence[bytes | None]) -> None:
        CachedRows.settle(self, keys, raws)

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
