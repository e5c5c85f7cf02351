"""A few states of a backend together, and bases of them in a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from cairn import state
from cairn.backends import Backend, BaseTarget, make_backend
from cairn.backends.files import open_rows
from cairn.backends.overlay import Table, make_table
from cairn.storage.files import StateFile
from cairn.storage.manifest import FileRef
from cairn.storage.store import Store, open_store

GROUP_COUNT = 8
MEMORY_BYTES = 64 << 20


def declarations() -> dict[str, state.Declaration]:
    found: dict[str, state.Declaration] = {
        "value": state.Value("string"),
        "items": state.List("long"),
        "entries": state.Map("string", "long"),
    }
    for name, declaration in found.items():
        declaration.name = name
    return found


def no_pace() -> None:
    pass


class Slot:
    """Tables over a backend. What is changed is committed at once."""

    def __init__(
        self,
        backend: str,
        scratch: str,
        *,
        groups: range = range(GROUP_COUNT),
        states: dict[str, state.Declaration] | None = None,
        memory_bytes: int = MEMORY_BYTES,
        store: Store | None = None,
        name: str = "slot",
    ) -> None:
        self.scratch = os.path.join(scratch, name)
        os.makedirs(self.scratch)
        self.backend: Backend = make_backend(
            backend, os.path.join(self.scratch, "state"), memory_bytes
        )
        self.groups = groups
        self.store = store or open_store(os.path.join(scratch, "store"))
        self.tables: dict[str, Table] = {}
        for name, declaration in (states or declarations()).items():
            self.tables[name] = make_table(declaration, pa.int64(), self.backend, GROUP_COUNT)
            self.tables[name].assign(groups)

    def change(self, name: str, key: int, change: Any) -> None:
        group = key % GROUP_COUNT
        if group in self.groups:
            self.tables[name].rows[group].promote({key: change})

    def fill(self, count: int, step: int = 1, word: str = "v") -> None:
        """A few words on every key."""
        for group in self.groups:
            keys = [key for key in range(0, count, step) if key % GROUP_COUNT == group]
            rows = {name: table.rows[group] for name, table in self.tables.items()}
            if "value" in rows:
                rows["value"].promote({key: f"{word}{key}" for key in keys})
            if "items" in rows:
                rows["items"].promote({key: (0, [key, key + 1]) for key in keys})
            if "entries" in rows:
                rows["entries"].promote({key: {"a": key, "b": -key} for key in keys})

    def content(self) -> dict[str, dict[int, Any]]:
        return read_batches({name: list(t.dump()) for name, t in self.tables.items()})

    def write(
        self,
        pace: Callable[[], None] = no_pace,
        known: tuple[FileRef, ...] = (),
        inline_bytes_max: int = 0,
    ) -> FileRef:
        base = self.backend.begin_base(self.tables, self.groups)
        try:
            return self.ref(base.write(self.target(known, inline_bytes_max), pace))
        finally:
            base.close()

    def target(self, known: tuple[FileRef, ...] = (), inline_bytes_max: int = 0) -> BaseTarget:
        return BaseTarget(self.store, 3, "op", 7, self.scratch, inline_bytes_max, known)

    def ref(self, stored: StateFile) -> FileRef:
        return stored.list_for(self.groups, first_epoch=0, last_epoch=7)

    def close(self) -> None:
        self.backend.close()


def stored(
    store: Store, ref: FileRef, scratch: str, groups: range | None = None
) -> dict[str, dict[int, Any]]:
    """What a file of state holds."""
    with open_rows(store, ref, scratch) as reader:
        return read_batches({name: list(reader.read(name, groups)) for name in reader.states})


def read_batches(batches: dict[str, list[pa.RecordBatch]]) -> dict[str, dict[int, Any]]:
    """Rows in the stored layout, as plain Python by key."""
    found: dict[str, dict[int, Any]] = {}
    for name, some in batches.items():
        held = found.setdefault(name, {})
        for batch in some:
            groups = batch["group"].to_pylist()
            assert groups == sorted(groups)
            for row in batch.to_pylist():
                key = row["key"]
                assert row["live"] and row["group"] == key % GROUP_COUNT
                if "entry" in row:
                    entries = held.setdefault(key, {})
                    assert row["entry"] not in entries
                    entries[row["entry"]] = row["value"]
                elif "start" in row:
                    items = held.setdefault(key, [])
                    assert row["start"] == len(items)
                    items += row["value"]
                else:
                    assert key not in held
                    held[key] = row["value"]
    return {name: held for name, held in found.items() if held}
