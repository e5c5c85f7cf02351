"""What is due by time is found in the database: after a restore without a scan, and all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cairn import state
from cairn.backends.cached import timed_columns
from cairn.backends.cached.backend import CachedBackend
from cairn.backends.cached.timed_columns import TimedSpillTable
from cairn.backends.contract import BaseTarget
from cairn.backends.expiry import Expiry
from cairn.backends.files import open_rows
from cairn.backends.handles import make_batch_handle, make_batch_table
from cairn.backends.overlay import Table, make_table
from cairn.backends.rocksdb.database import RocksDatabase
from cairn.backends.stored_expiry import StoredExpiry
from cairn.backends.versioned.database import VersionedDatabase
from cairn.ids import new_id
from cairn.storage.manifest import FileRef
from cairn.storage.store import open_store
from tests.backends import make

GROUP_COUNT = 8
GROUPS = range(GROUP_COUNT)
TTL_MS = 6_400
WINDOW_KEYS = 3_000


class Slot:
    """Tables over a backend, and bases of them."""

    def __init__(self, kind: str, folder: Path, job_id: str, epoch: int = 0) -> None:
        self.kind, self.folder, self.job_id, self.epoch = kind, folder, job_id, epoch
        folder.mkdir(exist_ok=True)
        directory = str(folder / f"slot{epoch}")
        self.backend = make(kind, directory, 1 << 16, job_id=job_id, operator="op")
        assert isinstance(self.backend, CachedBackend)
        self.store = open_store(str(folder / "store"))
        self.tables: dict[str, Any] = {}

    def add_row_table(self, declaration: Any, name: str) -> Table:
        declaration.name = name
        table = self.tables[name] = make_table(declaration, pa.int64(), self.backend, GROUP_COUNT)
        table.assign(GROUPS)
        return table

    def add_expiring(self, ttl_ms: int = TTL_MS) -> Expiry:
        expiry = self.add_row_table(state.Value("bigint", ttl=f"{ttl_ms} ms"), "value").expiry
        assert expiry is not None
        return expiry

    def add_windows(self, *, by_time: bool = True) -> Any:
        declaration: Any = state.Map("bigint", "string")
        declaration.name, declaration.by_time = "windows", by_time
        table = make_batch_table(declaration, pa.int64(), self.backend, GROUP_COUNT)
        table.assign(GROUPS)
        self.tables["windows"] = table
        return make_batch_handle(table)

    def put(self, keys: range, at: int) -> None:
        table = self.tables["value"]
        for key in keys:
            table.changes[key % GROUP_COUNT][key] = (at, key)
        table.promote()

    def write_base(self) -> FileRef:
        self.epoch += 1
        base = self.backend.begin_base(self.tables, GROUPS)
        try:
            target = BaseTarget(self.store, 1, "op", self.epoch, str(self.folder), 0)
            stored = base.write(target, lambda: None)
        finally:
            base.close()
        for table in self.tables.values():
            table.promote()
        return stored.list_for(GROUPS, first_epoch=0, last_epoch=self.epoch)

    def follow(self) -> Slot:
        """Return another slot of the same job, which holds nothing yet."""
        self.backend.close()
        return Slot(self.kind, self.folder, self.job_id, self.epoch)

    def load(self, ref: FileRef, groups: range = GROUPS) -> None:
        assert self.backend.load(self.store, ref, groups)


class Reads:
    """The rows that databases return."""

    def __init__(self) -> None:
        self.rows = 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    reads = Reads()

    def watch(database: Any) -> None:
        scan, get_many = database.scan, database.get_many

        def counted_scan(*args: Any) -> Iterator[Any]:
            for row in scan(*args):
                reads.rows += 1
                yield row

        def counted_get(self: Any, keys: Any) -> Any:
            reads.rows += len(keys)
            return get_many(self, keys)

        monkeypatch.setattr(database, "scan", counted_scan)
        monkeypatch.setattr(database, "get_many", counted_get)

    watch(RocksDatabase)
    watch(VersionedDatabase)
    return reads


@pytest.fixture(params=["rocksdb", "postgres"])
def slot(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slot]:
    yield Slot(request.param, tmp_path / "job", new_id())


def remove(expiry: Expiry, now_ms: int) -> int:
    before = expiry.removed_keys
    expiry.begin(now_ms)
    while expiry.reclaim(1.0):
        pass
    return expiry.removed_keys - before


def held(slot: Slot) -> set[int]:
    return {key for rows in slot.tables["value"].rows for key, _ in rows.items()}


# State that expires


def test_a_restore_reads_no_rows_for_expiry_and_removes_what_is_due(
    slot: Slot, reads: Reads
) -> None:
    remove(slot.add_expiring(), 0)
    slot.put(range(0, 100), 100)
    slot.put(range(100, 8_000), 5_000)
    ref = slot.write_base()
    slot = slot.follow()
    expiry = slot.add_expiring()
    reads.rows = 0
    slot.load(ref)
    assert reads.rows == 0
    assert remove(expiry, 6_300) == 0
    # PostgreSQL's pages are not seen here; a scan of the state would be.
    assert reads.rows <= GROUP_COUNT * 1024
    assert remove(expiry, 6_700) == 100
    assert held(slot) == set(range(100, 8_000))
    assert remove(expiry, 11_500) == 7_900
    slot.backend.close()


def test_keys_that_a_restore_brings_without_the_base_are_removed_too(slot: Slot) -> None:
    remove(slot.add_expiring(), 0)
    slot.put(range(50), 100)
    ref = slot.write_base()
    table = slot.tables["value"]
    for key in (1, 2, 1_000):
        table.changes[key % GROUP_COUNT][key] = (3_000, key)
    table.changes[3][3] = None
    delta = table.delta()
    slot = slot.follow()
    expiry = slot.add_expiring()
    slot.load(ref)
    slot.tables["value"].apply(delta)
    assert remove(expiry, 7_000) == 47
    assert held(slot) == {1, 2, 1_000}
    assert remove(expiry, 9_500) == 3
    slot.backend.close()


def test_another_ttl_goes_by_the_same_index(slot: Slot) -> None:
    remove(slot.add_expiring(), 0)
    slot.put(range(10), 100)
    slot.put(range(10, 20), 3_000)
    ref = slot.write_base()
    slot = slot.follow()
    expiry = slot.add_expiring(TTL_MS // 4)
    slot.load(ref)
    assert remove(expiry, 1_800) == 10
    assert remove(expiry, 4_700) == 10
    slot.backend.close()


def test_a_base_without_an_index_is_scanned_until_one_with_it_is_written(
    slot: Slot, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(CachedBackend, "orders_times", False)
        assert not isinstance(slot.add_expiring(), StoredExpiry)
    slot.put(range(8_000), 100)
    ref = slot.write_base()

    slot = slot.follow()
    expiry = slot.add_expiring()
    slot.load(ref)
    expiry.begin(500)
    assert expiry._step(), "a slice of the scan"
    slot.put(range(8_000, 8_010), 500)
    half = slot.write_base()

    # The scan had not ended when the base was written: it begins again.
    slot = slot.follow()
    expiry = slot.add_expiring()
    slot.load(half)
    assert remove(expiry, 1_000) == 0
    whole = slot.write_base()

    slot = slot.follow()
    expiry = slot.add_expiring()
    slot.load(whole)
    reads.rows = 0
    assert remove(expiry, 2_000) == 0 and reads.rows <= GROUP_COUNT * 1024
    assert remove(expiry, 6_700) == 8_000
    assert held(slot) == set(range(8_000, 8_010))
    slot.backend.close()


def test_what_could_not_be_removed_is_removed_later(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(slot.add_expiring(), 0)
    slot.put(range(100), 100)
    ref = slot.write_base()
    slot = slot.follow()
    expiry = slot.add_expiring()
    slot.load(ref)

    def fail(*_: object) -> None:
        raise ConnectionError

    with monkeypatch.context() as broken:
        broken.setattr(type(slot.tables["value"].rows[0]), "get_many", fail)
        with pytest.raises(ConnectionError):
            remove(expiry, 7_000)
    assert remove(expiry, 7_000) == 100
    slot.backend.close()


# Windows


def put_windows(slot: Slot, handle: Any, keys: range, end: int) -> None:
    ends = pa.array(np.full(len(keys), end))
    handle.put_many(pa.array(keys), ends, pa.array([f"{key}:{end}" for key in keys]))
    slot.tables["windows"].promote()


def names(found: tuple[pa.Array, pa.Array, pa.Array]) -> list[tuple[int, int]]:
    keys, ends, values = (column.to_pylist() for column in found)
    assert values == [f"{key}:{end}" for key, end in zip(keys, ends, strict=True)]
    return list(zip(keys, ends, strict=True))


def keep_none_in_arrays(slot: Slot) -> TimedSpillTable:
    table = slot.tables["windows"]
    assert isinstance(table, TimedSpillTable)
    for _ in range(2):
        slot.write_base()
    assert not table.is_whole
    return table


def test_windows_that_have_left_memory_are_found_when_they_are_due(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed_columns, "PAGE_NAMES", 7)
    handle = slot.add_windows()
    for number in range(5):
        put_windows(slot, handle, range(number, WINDOW_KEYS, 5), 1_000 * (number + 1))
    table = keep_none_in_arrays(slot)
    in_memory = len(table._index)
    assert in_memory < WINDOW_KEYS
    assert names(handle.between(None, 999)) == []
    assert handle.entry_above(None) == 1_000 and handle.entry_above(2_500) == 3_000
    due = names(handle.between(None, 2_000))
    assert due == [(key, 1_000 * (at + 1)) for at in (0, 1) for key in range(at, WINDOW_KEYS, 5)]
    keys, ends, values = handle.between(None, 2_000)
    handle.put_many(keys, ends, pa.nulls(len(keys), values.type))
    assert names(handle.between(None, 2_500)) == [] and handle.entry_above(None) == 3_000
    table.rollback()
    assert names(handle.between(None, 2_000)) == due
    handle.put_many(keys, ends, pa.nulls(len(keys), values.type))
    table.promote()
    keep_none_in_arrays(slot)
    assert names(handle.between(None, 2_500)) == [] and handle.entry_above(None) == 3_000
    assert table.count_held().entries == 3 * WINDOW_KEYS // 5
    slot.backend.close()


def test_a_restore_reads_no_rows_for_windows(slot: Slot, reads: Reads) -> None:
    handle = slot.add_windows()
    put_windows(slot, handle, range(10), 1_000)
    put_windows(slot, handle, range(WINDOW_KEYS), 5_000)
    keep_none_in_arrays(slot)
    ref = slot.write_base()
    slot = slot.follow()
    handle = slot.add_windows()
    reads.rows = 0
    slot.load(ref)
    assert reads.rows == 0
    assert handle.entry_above(None) == 1_000
    assert names(handle.between(None, 1_500)) == [(key, 1_000) for key in range(10)]
    assert reads.rows < WINDOW_KEYS
    with open_rows(slot.store, ref, str(slot.folder)) as reader:
        assert reader.states == ["windows"], "the index is not for readers"
    slot.backend.close()


def test_windows_without_an_index_are_read_once_and_stored_by_time(
    slot: Slot, reads: Reads
) -> None:
    handle = slot.add_windows(by_time=False)
    put_windows(slot, handle, range(WINDOW_KEYS), 5_000)
    slot.write_base()
    ref = slot.write_base()
    slot = slot.follow()
    handle = slot.add_windows()
    slot.load(ref)
    put_windows(slot, handle, range(10), 1_000)
    keep_none_in_arrays(slot)
    ref = slot.write_base()
    slot = slot.follow()
    handle = slot.add_windows()
    reads.rows = 0
    slot.load(ref)
    assert reads.rows == 0
    assert names(handle.between(None, 1_500)) == [(key, 1_000) for key in range(10)]
    assert reads.rows < WINDOW_KEYS
    assert len(names(handle.between(None, 5_000))) == WINDOW_KEYS + 10
    slot.backend.close()


def test_key_groups_come_and_go_with_their_part_of_the_index(slot: Slot) -> None:
    handle = slot.add_windows()
    put_windows(slot, handle, range(WINDOW_KEYS), 1_000)
    table = keep_none_in_arrays(slot)
    ref = slot.write_base()
    half, rest = range(0, GROUP_COUNT // 2), range(GROUP_COUNT // 2, GROUP_COUNT)
    table.assign(half)
    kept = names(handle.between(None, 1_000))
    assert 0 < len(kept) < WINDOW_KEYS
    table.assign(GROUPS)
    slot.load(ref, rest)
    put_windows(slot, handle, range(WINDOW_KEYS, WINDOW_KEYS + 5), 500)
    assert handle.entry_above(None) == 500
    assert len(names(handle.between(None, 1_000))) == WINDOW_KEYS + 5
    slot.backend.close()
