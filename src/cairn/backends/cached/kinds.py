"""The classes of rows in a database, by kind of state."""

from __future__ import annotations

from cairn.backends.cached.lists import CachedListRows
from cairn.backends.cached.maps import CachedMapRows
from cairn.backends.cached.ordered import IndexRows, OrderedRows
from cairn.backends.cached.rows import CachedRows, Memory
from cairn.backends.cached.timer_names import INDEX_KIND, KIND
from cairn.backends.packing import Packing

ROWS: dict[str, type[CachedRows]] = {
    "map": CachedMapRows,
    "list": CachedListRows,
    KIND: OrderedRows,
    INDEX_KIND: IndexRows,
}


def make_rows(name: str, packing: Packing, memory: Memory, group: int) -> CachedRows:
    return ROWS.get(packing.kind, CachedRows)(name, packing, memory, group)
