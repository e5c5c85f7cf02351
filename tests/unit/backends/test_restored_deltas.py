"""Deltas after a base are applied without a look at the database; counts become right later."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn import state
from cairn.backends.contract import ABSENT, BaseTarget, Origin
from cairn.backends.handles import make_batch_handle, make_batch_table
from cairn.backends.overlay import Table, make_table
from cairn.backends.redis.backend import RedisBackend
from cairn.backends.redis.database import RedisDatabase
from cairn.backends.timer_table import TimerTable
from cairn.backends.versioned.database import VersionedDatabase
from cairn.functions import EVENT_TIMERS
from cairn.ids import new_id
from cairn.storage.manifest import FileRef
from cairn.storage.store import open_store
from tests.backends import OUTSIDE, make

GROUP_COUNT = 4
GROUPS = range(GROUP_COUNT)
KEYS = 30
Deltas = dict[str, pa.RecordBatch]


def declarations() -> dict[str, state.Declaration]:
    found: dict[str, state.Declaration] = {
        "value": state.Value("string"),
        "kept": state.Value("bigint", ttl="1 hour"),
        "items": state.List("bigint"),
        "entries": state.Map("bigint", "bigint"),
        "column": state.Value("bigint"),
        "cells": state.Map("bigint", "bigint"),
        EVENT_TIMERS: state.Map("bigint", "boolean"),
    }
    for name, declaration in found.items():
        declaration.name = name
    return found


class Slot:
    """All kinds of state over a database, as of the epochs that it was given."""

    def __init__(self, kind: str, folder: Path, job_id: str, number: int) -> None:
        self.kind, self.folder, self.job_id, self.number = kind, folder, job_id, number
        directory = str(folder / f"slot{number}")
        self.backend = make(kind, directory, 1 << 20, job_id=job_id, operator="op")
        self.store = open_store(str(folder / "store"))
        self.tables: dict[str, Table] = {}
        for name, declaration in declarations().items():
            make_one = make_batch_table if name in ("column", "cells") else make_table
            self.tables[name] = make_one(declaration, pa.int64(), self.backend, GROUP_COUNT)
            self.tables[name].assign(GROUPS)
        self.column: Any = make_batch_handle(self.tables["column"])
        self.cells: Any = make_batch_handle(self.tables["cells"])

    def load(self, base: FileRef, deltas: list[Deltas]) -> None:
        if isinstance(self.backend, RedisBackend):
            self.backend.begin_restore(Origin(1, 1000, False, lambda number, nonce: True))
        assert self.backend.load(self.store, base, GROUPS)
        for each in deltas:
            for name, delta in each.items():
                self.tables[name].apply(delta)

    def commit(self) -> Deltas:
        deltas = {name: delta for name, t in self.tables.items() if (delta := t.delta())}
        for table in self.tables.values():
            table.promote()
        return deltas

    def write_base(self, epoch: int) -> FileRef:
        base = self.backend.begin_base({}, GROUPS)
        try:
            target = BaseTarget(self.store, 1, "op", epoch, str(self.folder), 0)
            stored = base.write(target, lambda: None)
        finally:
            base.close()
        for table in self.tables.values():
            table.promote()
        return stored.list_for(GROUPS, first_epoch=0, last_epoch=epoch)

    def forget_decoded(self) -> None:
        for rows in self.backend.all_rows():  # type: ignore[attr-defined]
            rows.rotate()
            rows.rotate()


class Model:
    """The expected content of each state, by key."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.held: dict[str, dict[int, Any]] = {name: {} for name in declarations()}

    def change(self, slot: Slot, keys: int) -> None:
        """Change some keys in every state, as an epoch does."""
        chance = self.chance
        for name in ("value", "kept"):
            for key in chance.sample(range(KEYS), keys):
                change = None if chance.random() < 0.3 else chance.randrange(9)
                if name == "value" and change is not None:
                    change = "x" * change
                if name == "kept" and change is not None:
                    change = (1_000_000 + change, change)
                self._put(slot, name, key, change)
                _keep(self.held[name], key, change)
        for key in chance.sample(range(KEYS), keys):
            items = self.held["items"].get(key, [])
            start = chance.randrange(len(items) + 1) if chance.random() < 0.5 else len(items)
            added = [chance.randrange(9) for _ in range(chance.randrange(3))]
            if start < len(items) or added:
                self._put(slot, "items", key, (start, added))
                _keep(self.held["items"], key, [*items[:start], *added] or None)
        for key in chance.sample(range(KEYS), keys):
            entries = dict(self.held["entries"].get(key, {}))
            changed: dict[int, Any] = {}
            for entry in chance.sample(range(90 if key < 2 else 5), 80 if key < 2 else 2):
                changed[entry] = ABSENT if entry in entries and chance.random() < 0.5 else entry
            self._put(slot, "entries", key, changed)
            _keep(self.held["entries"], key, _merge(entries, changed))
        table = slot.tables[EVENT_TIMERS]
        for key in chance.sample(range(KEYS), keys):
            timers = dict(self.held[EVENT_TIMERS].get(key, {}))
            time = chance.randrange(4)
            change = ABSENT if time in timers else True
            table.changes[key % GROUP_COUNT][key] = {time: change}
            _keep(self.held[EVENT_TIMERS], key, _merge(timers, {time: change}))
        some = chance.sample(range(KEYS), keys)
        values = [None if chance.random() < 0.3 else chance.randrange(9) for _ in some]
        slot.column.put_many(pa.array(some), pa.array(values, pa.int64()))
        for key, value in zip(some, values, strict=True):
            _keep(self.held["column"], key, value)
        entries_of = [chance.randrange(4) for _ in some]
        slot.cells.put_many(pa.array(some), pa.array(entries_of), pa.array(values, pa.int64()))
        for key, entry, value in zip(some, entries_of, values, strict=True):
            cells = self.held["cells"].get(key, {})
            merged = _merge(cells, {entry: ABSENT if value is None else value})
            _keep(self.held["cells"], key, merged)

    def _put(self, slot: Slot, name: str, key: int, change: Any) -> None:
        slot.tables[name].changes[key % GROUP_COUNT][key] = change

    def check(self, slot: Slot, keys: range = range(KEYS)) -> None:
        """Read some keys as functions do."""
        groups = [key % GROUP_COUNT for key in keys]
        slot.backend.prefetch(groups, list(keys))
        for key, group in zip(keys, groups, strict=True):
            for name in ("value", "kept", "items", "entries"):
                found = slot.tables[name].rows[group].get(key)
                if name == "items":
                    found = None if found is None else list(found)
                if name == "entries":
                    found = None if found is None else dict(found)
                    count = len(self.held[name].get(key, {}))
                    assert len(slot.tables[name].rows[group].get(key, {})) == count
                assert found == self.held[name].get(key), (name, key)
        found = slot.column.get_many(pa.array(keys)).to_pylist()
        assert found == [self.held["column"].get(key) for key in keys]
        cells: dict[int, dict[int, int]] = {}
        rows, entries, values = slot.cells.of_keys(pa.array(keys))
        for row, entry, value in zip(
            rows.to_pylist(), entries.to_pylist(), values.to_pylist(), strict=True
        ):
            cells.setdefault(keys[row], {})[entry] = value
        assert cells == {k: v for k, v in self.held["cells"].items() if k in keys}

    def check_timers(self, slot: Slot) -> None:
        table = slot.tables[EVENT_TIMERS]
        assert isinstance(table, TimerTable)
        found: dict[int, dict[int, bool]] = {}
        for group in GROUPS:
            for key, times in table.rows[group].items():
                assert isinstance(key, int)
                found[key] = dict(times)
        assert found == self.held[EVENT_TIMERS]

    def check_counts(self, slot: Slot) -> None:
        for name, table in slot.tables.items():
            held = self.held[name]
            is_map = name in ("entries", "cells", EVENT_TIMERS)
            entries = sum(map(len, held.values())) if is_map else len(held)
            keys = entries if name == EVENT_TIMERS else len(held)
            found = table.count_held()
            assert (found.keys, found.entries) == (keys, entries), name


def _keep(held: dict[int, Any], key: int, content: Any) -> None:
    held.pop(key, None)
    if content is not None:
        held[key] = content


def _merge(entries: dict[int, Any], changed: dict[int, Any]) -> dict[int, Any] | None:
    merged = {**entries, **changed}
    return {entry: value for entry, value in merged.items() if value is not ABSENT} or None


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all calls that read from a database."""
    found: list[str] = []

    def watch(database: Any, name: str) -> None:
        read = getattr(database, name)

        def noted(*args: Any) -> Any:
            found.append(name)
            return read(*args)

        monkeypatch.setattr(database, name, noted)

    for name in ("get_many", "scan", "read_pages"):
        watch(VersionedDatabase, name)
        watch(RedisDatabase, name)
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", OUTSIDE)
def test_deltas_are_applied_unread_and_leave_content_and_counts_as_they_were(
    kind: str, seed: int, tmp_path: Path, reads: list[str]
) -> None:
    job_id, model = new_id(), Model(seed)
    slot = Slot(kind, tmp_path, job_id, 0)
    for _ in range(3):
        model.change(slot, 20)
        slot.commit()
    base = slot.write_base(1)
    for number in range(1, 4):
        deltas: list[Deltas] = []
        for _ in range(3):
            model.change(slot, 6)
            deltas.append(slot.commit())
        slot.backend.close()
        reads.clear()
        slot = Slot(kind, tmp_path, job_id, number)
        slot.load(base, deltas)
        assert reads == [], "of the database"
        assert not slot.backend.is_settled()
        if seed % 3 == 1:
            # Rows come before a base: some keys are read and changed.
            model.check(slot, range(0, KEYS, 2))
            slot.forget_decoded()
            model.change(slot, 5)
            slot.commit()
            model.check(slot)
        if seed % 3 == 2:
            # Changed again without having been read.
            model.change(slot, 5)
            slot.commit()
        base = slot.write_base(10 * number)
        assert slot.backend.is_settled()
        model.check_counts(slot)
        slot.forget_decoded()
        model.check(slot)
        model.check_timers(slot)
    slot.backend.close()
    slot = Slot(kind, tmp_path, job_id, 9)
    slot.load(base, [])
    model.check_counts(slot)
    model.check(slot)
    slot.backend.close()


@pytest.mark.parametrize("kind", OUTSIDE)
def test_rows_of_key_groups_in_no_database_are_counted_at_once(kind: str, tmp_path: Path) -> None:
    job_id = new_id()
    first = Slot(kind, tmp_path, job_id, 0)
    first.column.put_many(pa.array(range(KEYS)), pa.array(range(KEYS)))
    delta = first.commit()["column"]
    base = first.write_base(1)
    first.backend.close()
    slot = Slot(kind, tmp_path, job_id, 1)
    slot.load(base, [])
    table = slot.tables["column"]
    table.assign(range(2, GROUP_COUNT))
    table.assign(GROUPS)
    gone = delta.filter(pa.array(delta["group"].to_numpy() < 2))
    assert 0 < gone.num_rows < KEYS
    table.apply(gone)
    assert table.count_held().keys == KEYS and slot.backend.is_settled()
    assert slot.column.get_many(pa.array(range(KEYS))).to_pylist() == list(range(KEYS))
    slot.backend.close()
