"""The types and sizes of a state, as the index of a base lists them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cairn.backends.cached.timer_names import INDEX_KIND
from cairn.backends.layout import Layout, make_layout
from cairn.backends.packing import Packing
from cairn.types import type_ddl
from cairn.types.codec import Codec, codec


class StoredState(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    type: str
    entry_type: str | None
    key_type: str
    counts: dict[int, tuple[int, int]]
    """Number of keys and of stored rows (entries, for maps) per key group."""

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.counts.values())

    @property
    def _codecs(self) -> tuple[str, Codec, Codec, Codec | None]:
        entries = None if self.entry_type is None else codec(self.entry_type)
        return self.kind, codec(self.key_type), codec(self.type), entries

    def packing(self) -> Packing:
        return Packing(*self._codecs)

    def layout(self, name: str) -> Layout:
        return make_layout(name, *self._codecs)


def visible_states(states: Mapping[str, StoredState]) -> list[str]:
    """Return the names of the states that readers see."""
    return [name for name, state in states.items() if state.kind != INDEX_KIND]


def describe_state(packing: Packing, counts: dict[int, tuple[int, int]]) -> StoredState:
    return StoredState(
        kind=packing.kind,
        type=type_ddl(packing.values.type),
        entry_type=None if packing.entries is None else type_ddl(packing.entries.type),
        key_type=type_ddl(packing.keys.type),
        counts=counts,
    )
