"""Expired rows leave the slot: the right ones, without a search, and memory with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn import state
from cairn.backends import BACKENDS
from cairn.backends import expiry as expiry_module
from cairn.backends.contract import ABSENT
from cairn.backends.expiry import Expiry, leave_out_expired
from cairn.backends.heap.backend import HeapMapRows
from cairn.backends.overlay import Table
from cairn.backends.rocksdb.backend import RocksBackend
from cairn.backends.stored_expiry import StoredExpiry
from cairn.types.codec.stamped import stamp_codec
from tests.unit.backends.bases import GROUP_COUNT, Slot, stored

TTL_MS = 1_000


def declarations() -> dict[str, state.Declaration]:
    span = f"{TTL_MS} ms"
    found: dict[str, state.Declaration] = {
        "value": state.Value("string", ttl=span),
        "items": state.List("long", ttl=span),
        "entries": state.Map("string", "long", ttl=span),
    }
    for name, declaration in found.items():
        declaration.name = name
    return found


@pytest.fixture(params=BACKENDS)
def slot(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slot]:
    slot = Slot(request.param, str(tmp_path), states=declarations())
    begin(slot, 0)
    reclaim(slot)
    yield slot
    slot.close()


def expiry(table: Table) -> Expiry:
    assert table.expiry is not None
    return table.expiry


def begin(slot: Slot, now_ms: int) -> None:
    for table in slot.tables.values():
        expiry(table).begin(now_ms)


def reclaim(slot: Slot) -> None:
    for table in slot.tables.values():
        while expiry(table).reclaim(1.0):
            pass


def commit(slot: Slot, changes: dict[str, dict[int, Any]]) -> None:
    """An epoch that changes these keys."""
    for name, by_key in changes.items():
        for key, change in by_key.items():
            slot.tables[name].changes[key % GROUP_COUNT][key] = change
    for table in slot.tables.values():
        table.promote()


def write(slot: Slot, keys: range, at: int) -> None:
    begin(slot, at)
    commit(
        slot,
        {
            "value": {key: (at, f"v{key}") for key in keys},
            "items": {key: (0, [(at, key), (at, -key)]) for key in keys},
            "entries": {key: {"a": (at, key), "b": (at, None)} for key in keys},
        },
    )


def held(slot: Slot) -> dict[str, set[int]]:
    return {
        name: {key for group in slot.groups for key, _ in table.rows[group].items()}
        for name, table in slot.tables.items()
    }


def alike(slot: Slot, keys: set[int]) -> dict[str, set[int]]:
    """The same keys in every state."""
    return dict.fromkeys(slot.tables, keys)


def test_rows_go_when_they_have_expired_and_not_before(slot: Slot) -> None:
    write(slot, range(0, 50), 0)
    write(slot, range(50, 100), 500)
    begin(slot, TTL_MS - 1)
    reclaim(slot)
    assert held(slot) == alike(slot, set(range(100)))
    begin(slot, TTL_MS + 20)
    reclaim(slot)
    assert held(slot) == alike(slot, set(range(50, 100)))
    begin(slot, 2 * TTL_MS)
    reclaim(slot)
    assert held(slot) == alike(slot, set())
    assert all(expiry(table).removed_keys == 100 for table in slot.tables.values())


def test_a_key_that_is_written_again_lives_on(slot: Slot) -> None:
    write(slot, range(10), 0)
    write(slot, range(5), 900)
    begin(slot, 1_100)
    reclaim(slot)
    assert held(slot) == alike(slot, set(range(5)))
    begin(slot, 1_950)
    reclaim(slot)
    assert held(slot) == alike(slot, set())


def test_a_key_that_is_null_expires_like_others(slot: Slot) -> None:
    table = slot.tables["value"]
    for keys in ((1, 9), (None, 17), (25,)):
        for key in keys:
            table.changes[1][key] = (0, "v")
        table.promote()
    begin(slot, 2 * TTL_MS)
    reclaim(slot)
    assert held(slot)["value"] == set()
    assert expiry(table).removed_keys == 5


def test_entries_go_one_by_one_and_a_list_as_a_whole(slot: Slot) -> None:
    commit(
        slot,
        {
            "entries": {1: {"old": (0, 1), "young": (800, 2)}},
            "items": {1: (0, [(0, 1), (800, 2)])},
        },
    )
    begin(slot, 1_100)
    reclaim(slot)
    entries, items = slot.tables["entries"].rows[1].get(1), slot.tables["items"].rows[1].get(1)
    assert dict(entries) == {"young": (800, 2)}
    assert list(items) == [(0, 1), (800, 2)]
    begin(slot, 1_850)
    reclaim(slot)
    assert held(slot) == {"value": set(), "entries": set(), "items": set()}


def test_a_small_slice_of_time_removes_a_part_and_the_rest_follows(slot: Slot) -> None:
    write(slot, range(20_000), 0)
    begin(slot, 5 * TTL_MS)
    table = slot.tables["value"]
    assert expiry(table).reclaim(0.0), "there is more to do"
    removed = expiry(table).removed_keys
    assert 0 < removed < 20_000
    while expiry(table).reclaim(0.0):
        pass
    assert expiry(table).removed_keys == 20_000


def test_keys_that_are_deleted_and_come_again_do_not_pile_up(slot: Slot) -> None:
    table = slot.tables["value"]
    for at in range(200):
        begin(slot, at)
        commit(slot, {"value": dict.fromkeys(range(100), (at, "v"))})
        commit(slot, {"value": dict.fromkeys(range(100))})
    index = expiry(table)
    if isinstance(index, StoredExpiry):
        entries = sum(len(list(index._index(group).timers())) for group in slot.groups)
        assert entries >= 100
    else:
        entries = sum(index._counts.values())
    assert entries <= GROUP_COUNT * (256 + 2 * 100)


def test_after_a_restore_everything_is_found_again_in_slices(slot: Slot) -> None:
    write(slot, range(0, 30), 0)
    write(slot, range(30, 60), 700)
    files = {name: list(table.dump()) for name, table in slot.tables.items()}
    for name, table in slot.tables.items():
        table.forget(range(GROUP_COUNT))
        for batch in files[name]:
            table.apply(batch)
    if isinstance(slot.backend, RocksBackend):
        slot.backend.flush()
    begin(slot, 1_050)
    reclaim(slot)
    assert held(slot) == alike(slot, set(range(30, 60)))
    begin(slot, 1_750)
    reclaim(slot)
    assert held(slot) == alike(slot, set())


@pytest.mark.parametrize("base_begins", [False, True])
def test_what_is_written_while_rows_are_looked_through_is_judged_by_its_new_time(
    slot: Slot, monkeypatch: pytest.MonkeyPatch, base_begins: bool
) -> None:
    monkeypatch.setattr(expiry_module, "_SCAN_KEYS", 2)
    write(slot, range(80), 0)
    if isinstance(slot.backend, RocksBackend):
        slot.backend.flush()
    for table in slot.tables.values():
        for group in slot.groups:
            expiry(table).assign(group)
    begin(slot, 5 * TTL_MS)
    for table in slot.tables.values():
        for _ in range(3):
            expiry(table)._step()
    again = range(0, 80, 3)
    write(slot, again, 5 * TTL_MS)
    base = slot.backend.begin_base(slot.tables, slot.groups) if base_begins else None
    reclaim(slot)
    if base is not None:
        base.close()
    assert held(slot) == alike(slot, set(again))


def test_key_groups_that_went_are_not_looked_at_and_those_that_came_are(slot: Slot) -> None:
    write(slot, range(40), 0)
    for table in slot.tables.values():
        table.assign(range(0, 4))
    slot.groups = range(0, 4)
    write(slot, range(0, 40, 8), 10)
    for table in slot.tables.values():
        table.assign(range(2, 8))
    slot.groups = range(2, 8)
    begin(slot, 2 * TTL_MS)
    reclaim(slot)
    assert held(slot) == alike(slot, set())


def test_a_base_is_right_while_rows_are_removed_under_it(slot: Slot) -> None:
    write(slot, range(0, 400), 0)
    write(slot, range(400, 600), 900)
    base = slot.backend.begin_base(slot.tables, slot.groups)
    begin(slot, 1_100)
    ref = slot.ref(base.write(slot.target(), lambda: reclaim(slot)))
    base.close()
    found = stored(slot.store, ref, slot.scratch)
    young = set(range(400, 600))
    # What has expired may be in it or not; what has not must be, as it was.
    assert all(young <= set(rows) <= set(range(600)) for rows in found.values())
    assert found["value"][500] == {"at": 900, "value": "v500"}
    assert found["items"][500] == [{"at": 900, "value": 500}, {"at": 900, "value": -500}]
    reclaim(slot)
    assert held(slot) == alike(slot, young)


def test_a_base_of_the_heap_leaves_out_what_has_expired(tmp_path: Path) -> None:
    slot = Slot("heap", str(tmp_path), states=declarations())
    write(slot, range(0, 50), 0)
    write(slot, range(50, 60), 900)
    begin(slot, 1_100)
    found = stored(slot.store, slot.write(), slot.scratch)
    assert set(found["value"]) == set(found["entries"]) == set(range(50, 60))


def test_rocksdb_gives_the_disk_back(tmp_path: Path) -> None:
    slot = Slot("rocksdb", str(tmp_path), states=declarations())
    begin(slot, 0)
    reclaim(slot)
    backend = slot.backend
    assert isinstance(backend, RocksBackend)
    for part in range(10):
        keys = range(part * 2_000, (part + 1) * 2_000)
        commit(slot, {"value": {key: (0, f"{key:0200}") for key in keys}})
        backend.flush()
    before = disk_bytes(backend)
    begin(slot, 2 * TTL_MS)
    reclaim(slot)
    backend.flush()
    backend.compact()
    assert disk_bytes(backend) <= before / 10
    slot.close()


def disk_bytes(backend: RocksBackend) -> int:
    return sum(database.size_bytes() for database in backend.databases)


def test_the_few_rows_that_are_left_are_packed_and_stay_what_they_were(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry_module, "_EMPTIED_KEYS_MIN", 50)
    monkeypatch.setattr(expiry_module, "_QUIET_S", 0.0)
    write(slot, range(0, 100), 0)
    begin(slot, 500)
    commit(slot, {"value": {99: (500, "last")}})
    begin(slot, 1_100)
    reclaim(slot)
    value, items = slot.tables["value"], slot.tables["items"]
    assert [expiry(table).is_emptied() for table in (value, items)] == [True, True]
    assert expiry(value).is_sparse()
    expiry(value).note_tidied(is_packed=True)
    assert not expiry(value).is_emptied() and not expiry(value).is_sparse()
    slot.tables["value"].changes[0][0] = (1_100, "running")
    rows = list(value.rows)
    assert slot.backend.repack([value])
    assert all(table is was for table, was in zip(value.rows, rows, strict=True))
    assert dict(value.rows[3].items()) == {99: (500, "last")}
    value.promote()
    begin(slot, 1_600)
    reclaim(slot)
    assert held(slot)["value"] == {0}


def test_nothing_is_packed_while_a_base_is_written(tmp_path: Path) -> None:
    slot = Slot("heap", str(tmp_path), states=declarations())
    write(slot, range(20), 0)
    base = slot.backend.begin_base(slot.tables, slot.groups)
    values = [list(rows.values()) for rows in slot.tables["value"].rows]  # type: ignore[attr-defined]
    assert not slot.backend.repack([slot.tables["value"]])
    again = [list(rows.values()) for rows in slot.tables["value"].rows]  # type: ignore[attr-defined]
    assert all(
        a is b for x, y in zip(values, again, strict=True) for a, b in zip(x, y, strict=True)
    )
    base.close()


def test_entries_are_counted_without_a_walk_through_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = Slot("heap", str(tmp_path), states=declarations())
    table = slot.tables["entries"]

    def counted() -> int:
        with monkeypatch.context() as patched:
            for walk in ("__iter__", "items", "keys", "values"):
                patched.setattr(HeapMapRows, walk, None, raising=False)
            return table.count_held().entries

    begin(slot, 0)
    reclaim(slot)
    assert counted() == 0
    keys = range(8 * 3_000)
    write(slot, keys, 0)
    assert counted() == 2 * len(keys)
    base = slot.backend.begin_base(slot.tables, slot.groups)
    commit(slot, {"entries": {0: {"a": ABSENT, "c": (900, 1), "d": (900, 1)}}})
    commit(slot, {"entries": {1: {"a": ABSENT, "b": ABSENT, "z": ABSENT}}})
    assert counted() == 2 * len(keys) + 1 - 2
    base.close()
    # Most are removed, so that the dict is made anew.
    begin(slot, 1_100)
    reclaim(slot)
    assert counted() == 2
    assert slot.backend.repack([table])
    assert counted() == 2
    table.forget(slot.groups)
    assert counted() == 0
    slot.close()


# Stored rows


def batch(at: list[int | None]) -> pa.RecordBatch:
    values = stamp_codec("long").encode([None if a is None else (a, 7) for a in at])
    return pa.RecordBatch.from_pydict(
        {
            "group": pa.array([0] * len(at), pa.int32()),
            "key": pa.array(range(len(at)), pa.int64()),
            "value": values,
            "live": values.is_valid(),
        }
    )


def test_of_a_base_expired_rows_are_left_out_and_of_a_delta_they_delete() -> None:
    rows = batch([100, 200, None, 150])
    assert leave_out_expired(rows, "value", 99, keep_rows=False) is rows
    kept = leave_out_expired(rows, "value", 150, keep_rows=False)
    assert kept["key"].to_pylist() == [1, 2]
    deleting = leave_out_expired(rows, "value", 150, keep_rows=True)
    assert deleting["key"].to_pylist() == [0, 1, 2, 3]
    assert deleting["live"].to_pylist() == [False, True, False, False]
    assert stamp_codec("long").decode(deleting["value"]) == [None, (200, 7), None, None]
