"""What is held of a key, as bytes: for whoever asks a slot for it.

    value, reducing, aggregating, broadcast    the value
    map, timers, operator list                 [[entry, value], ...]
    list                                       [item, ...]

Always true here:
- what was packed comes out equal, of every type that can be declared;
- the types are not in the bytes: both ends must have declared the same (`form_of`).
"""

from __future__ import annotations

from typing import Any

from cairn.backends.overlay import Table
from cairn.backends.rocksdb.packing import Packing, decode, encode
from cairn.state import Declaration

Form = tuple[str, str, str, str]
"""What both ends must agree in: kind, type, type of the entries, ttl."""


def form_of(declaration: Declaration) -> Form:
    ttl = "" if declaration.ttl is None else declaration.ttl.text
    return declaration.kind, declaration.ddl, declaration.entry_ddl or "", ttl


def packing_of(table: Table) -> Packing:
    entries = getattr(table.layout, "entries", None)
    return Packing(table.declaration.layout, table.keys, table.values, entries)


def pack_held(packing: Packing, held: Any) -> bytes:
    if packing.kind == "list":
        return encode([_packed(packing, item) for item in held])
    if packing.kind == "map":
        assert packing.entries is not None
        name = packing.entries.pack_key
        return encode([[name(entry), _packed(packing, value)] for entry, value in held.items()])
    return packing.value(held)


def _packed(packing: Packing, value: Any) -> Any:
    return None if value is None else packing.values.pack(value)


def unpack_held(packing: Packing, raw: bytes) -> Any:
    """As the backend holds it: a value, a dict of entries, or a list; with times, if it expires."""
    if packing.kind == "list":
        return [_unpacked(packing, item) for item in decode(raw)]
    if packing.kind == "map":
        assert packing.entries is not None
        entries = packing.entries
        return {
            None if name is None else entries.canonical(entries.unpack(name)): _unpacked(
                packing, value
            )
            for name, value in decode(raw)
        }
    return packing.value_of(raw)


def _unpacked(packing: Packing, value: Any) -> Any:
    return None if value is None else packing.values.unpack(value)
