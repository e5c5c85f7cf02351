"""RocksDB: bases share files, are taken over as they are, and damage has a name."""

from __future__ import annotations

import math
import operator
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn import state
from cairn.backends.contract import ABSENT
from cairn.backends.files import open_rows
from cairn.backends.rocksdb import files as rocksdb_files
from cairn.backends.rocksdb.backend import DATABASES_MAX, RocksBackend
from cairn.backends.rocksdb.database import SortedWriter
from cairn.backends.rocksdb.files import read_index, verify_rocksdb_base
from cairn.errors import CorruptFileError
from cairn.storage.manifest import FileRef
from cairn.storage.store import open_store
from cairn.types.codec import codec
from tests.unit.backends.bases import GROUP_COUNT, Slot, declarations, stored

NewSlot = Callable[..., Slot]


@pytest.fixture
def new_slot(tmp_path: Path) -> Iterator[NewSlot]:
    slots: list[Slot] = []

    def make(groups: range = range(GROUP_COUNT), backend: str = "rocksdb", **more: Any) -> Slot:
        slot = Slot(backend, str(tmp_path), groups=groups, name=f"slot{len(slots)}", **more)
        slots.append(slot)
        return slot

    yield make
    for slot in slots:
        slot.close()


def rocks(slot: Slot) -> RocksBackend:
    assert isinstance(slot.backend, RocksBackend)
    return slot.backend


def clipped(content: dict[str, dict[int, Any]], groups: range) -> dict[str, dict[int, Any]]:
    return {
        name: {key: value for key, value in held.items() if key % GROUP_COUNT in groups}
        for name, held in content.items()
    }


def narrowed(ref: FileRef, groups: range) -> FileRef:
    return msgspec.structs.replace(ref, first_group=groups.start, group_count=len(groups))


def load(slot: Slot, *refs: FileRef) -> None:
    for ref in refs:
        listed = range(ref.first_group, ref.first_group + ref.group_count)
        groups = range(max(listed.start, slot.groups.start), min(listed.stop, slot.groups.stop))
        if groups:
            assert slot.backend.load(slot.store, ref, groups)


# --- sharing ----------------------------------------------------------------------------------


def test_a_second_base_shares_files_and_uploads_little(new_slot: NewSlot) -> None:
    slot = new_slot()
    slot.fill(20_000)
    base = slot.backend.begin_base(slot.tables, slot.groups)
    first = base.write(slot.target(), lambda: None)
    base.close()
    slot.fill(20_000, step=100, word="changed ")
    base = slot.backend.begin_base(slot.tables, slot.groups)
    second = base.write(slot.target(known=(slot.ref(first),)), lambda: None)
    base.close()
    assert set(first.objects) < set(second.objects)
    assert second.uploaded_bytes < first.uploaded_bytes / 10
    assert stored(slot.store, slot.ref(second), slot.scratch) == slot.content()
    assert first.uploaded_bytes == first.length + first.objects_bytes


def test_an_unchanged_state_uploads_its_index_only(new_slot: NewSlot) -> None:
    slot = new_slot()
    slot.fill(1000)
    ref = slot.write()
    objects = {found.path for found in slot.store.list("state")}
    again = slot.write(known=(ref,))
    assert again.objects == ref.objects
    assert {o.path for o in slot.store.list("state")} - objects <= {again.path}


def test_objects_that_the_parent_does_not_list_are_uploaded_again(new_slot: NewSlot) -> None:
    slot = new_slot()
    slot.fill(1000)
    ref = slot.write()
    slot.store.delete(ref.objects)
    again = slot.write()
    assert all(slot.store.exists(path) for path in again.objects)
    assert stored(slot.store, again, slot.scratch) == slot.content()


def test_after_a_native_load_the_loaded_files_are_shared(new_slot: NewSlot) -> None:
    slot = new_slot()
    slot.fill(1000)
    ref = slot.write()
    other = new_slot()
    load(other, ref)
    assert other.write(known=(ref,)).objects == ref.objects


def test_one_per_cent_of_changes_uploads_under_ten_per_cent_on_average(
    new_slot: NewSlot,
) -> None:
    declared: dict[str, state.Declaration] = {"value": state.Value("string")}
    declared["value"].name = "value"
    slot = new_slot(states=declared)
    rng = random.Random(1)
    count = 20_000
    slot.fill(count)
    full = slot.write()
    known, uploaded = full, []
    for number in range(40):
        by_group: dict[int, dict[int, str]] = {}
        for key in rng.sample(range(count), count // 100):
            by_group.setdefault(key % GROUP_COUNT, {})[key] = f"{number} {key}"
        for group, changes in by_group.items():
            slot.tables["value"].rows[group].promote(changes)
        base = slot.backend.begin_base(slot.tables, slot.groups)
        found = base.write(slot.target(known=(known,)), lambda: None)
        base.close()
        uploaded.append(found.uploaded_bytes - found.length)
        known = slot.ref(found)
    assert sum(uploaded) / len(uploaded) < full.objects_bytes / 10
    assert stored(slot.store, known, slot.scratch) == slot.content()


# --- taking over ------------------------------------------------------------------------------


def test_a_base_is_taken_over_without_decoding(new_slot: NewSlot) -> None:
    slot = new_slot()
    slot.fill(500)
    ref = slot.write()
    other = new_slot()
    load(other, ref)
    assert other.content() == slot.content()
    assert {name: table.count_held().entries for name, table in other.tables.items()} == {
        "value": 500, "items": 500, "entries": 1000,
    }  # fmt: skip
    other.change("value", 1, "more")
    other.change("items", 1, (2, [9]))
    other.change("entries", 1, {"a": ABSENT, "c": 3})
    expected = slot.content()
    expected["value"][1] = "more"
    expected["items"][1] = [1, 2, 9]
    expected["entries"][1] = {"b": -1, "c": 3}
    assert other.content() == expected


@pytest.mark.parametrize("groups", [range(4), range(3, 5), range(6, 8)])
def test_a_narrower_range_sees_its_groups_only_and_so_do_its_bases(
    new_slot: NewSlot, groups: range
) -> None:
    slot = new_slot()
    slot.fill(500)
    ref = slot.write()
    other = new_slot(groups)
    load(other, ref)
    expected = clipped(slot.content(), groups)
    assert other.content() == expected
    other.change("value", groups.start, "more")
    expected["value"][groups.start] = "more"
    again = other.write(known=(ref,))
    assert stored(slot.store, again, slot.scratch) == expected
    assert read_index(slot.store, again).databases[0].group_list() == list(groups)
    third = new_slot(groups)
    load(third, again)
    assert third.content() == expected


def test_a_wider_range_is_served_from_several_databases(new_slot: NewSlot) -> None:
    expected: dict[str, dict[int, Any]] = {}
    refs = []
    for groups in (range(3), range(3, 5), range(5, GROUP_COUNT)):
        slot = new_slot(groups)
        slot.fill(300, word=f"{groups} ")
        refs.append(slot.write())
        for name, held in slot.content().items():
            expected.setdefault(name, {}).update(held)
    whole = new_slot()
    load(whole, *refs)
    assert len(rocks(whole).databases) == 3
    assert whole.content() == {n: dict(sorted(h.items())) for n, h in expected.items()}
    whole.backend.prefetch([key % GROUP_COUNT for key in range(310)], list(range(310)))
    assert whole.tables["value"].rows[5].get(5) == expected["value"][5]
    whole.change("value", 4, "more")
    expected["value"][4] = "more"
    ref = whole.write(known=tuple(refs))
    assert stored(whole.store, ref, whole.scratch) == expected
    again = new_slot(backend="heap")
    with open_rows(again.store, ref, again.scratch) as reader:
        for name in reader.states:
            for batch in reader.read(name, range(GROUP_COUNT)):
                again.tables[name].apply(batch)
    assert again.content() == expected


def test_many_databases_become_a_few(new_slot: NewSlot) -> None:
    expected: dict[str, dict[int, Any]] = {}
    refs = []
    for group in range(GROUP_COUNT):
        slot = new_slot(range(group, group + 1))
        slot.fill(100 * (group + 1))
        refs.append(slot.write())
        for name, held in slot.content().items():
            expected.setdefault(name, {}).update(held)
    whole = new_slot()
    load(whole, *refs)
    assert len(rocks(whole).databases) <= DATABASES_MAX
    assert whole.content() == expected
    assert stored(whole.store, whole.write(known=tuple(refs)), whole.scratch) == expected


def test_a_database_of_which_little_counts_is_copied(new_slot: NewSlot) -> None:
    slot = new_slot()
    slot.fill(2000)
    ref = slot.write()
    other = new_slot(range(1))
    load(other, ref)
    again = other.write(known=(ref,))
    assert not set(again.objects) & set(ref.objects)
    assert again.size < ref.size / 2
    assert stored(slot.store, again, slot.scratch) == clipped(slot.content(), range(1))


def test_a_database_of_which_nothing_counts_is_given_up(new_slot: NewSlot) -> None:
    slot = new_slot()
    slot.fill(GROUP_COUNT)
    slot.write()
    slot.change("value", 1, None)
    slot.change("items", 1, (0, []))
    slot.change("entries", 1, {"a": ABSENT, "b": ABSENT})
    ref = slot.write()
    other = new_slot(range(1, 2))
    load(other, ref)
    assert not any(other.content().values())


def test_other_types_are_not_taken_over(new_slot: NewSlot) -> None:
    slot = new_slot()
    slot.fill(10)
    ref = slot.write()
    declared = declarations()
    declared["value"] = state.Value("bigint")
    declared["value"].name = "value"
    other = new_slot(states=declared)
    assert not other.backend.load(slot.store, ref, other.groups)
    assert other.content() == {}
    heap = new_slot(backend="heap")
    assert not heap.backend.load(slot.store, ref, heap.groups)
    segment = heap.write()
    assert not slot.backend.load(slot.store, segment, slot.groups)


def test_a_state_that_is_gone_does_not_come_back(new_slot: NewSlot) -> None:
    slot = new_slot()
    slot.fill(10)
    ref = slot.write()
    without = declarations()
    del without["value"]
    other = new_slot(states=without)
    load(other, ref)
    again = other.write(known=(ref,))
    with open_rows(slot.store, again, slot.scratch) as reader:
        assert sorted(reader.states) == ["entries", "items"]
    third = new_slot()
    load(third, again)
    third.change("value", 77, "new")
    assert third.content()["value"] == {77: "new"}


def test_a_new_state_joins_loaded_ones(new_slot: NewSlot) -> None:
    few = {"value": declarations()["value"]}
    slot = new_slot(states=few)
    slot.fill(30)
    ref = slot.write()
    other = new_slot()
    load(other, ref)
    other.change("items", 3, (0, [1]))
    again = other.write(known=(ref,))
    assert len(read_index(slot.store, again).databases) == 1
    third = new_slot()
    load(third, again)
    assert third.content() == {"value": slot.content()["value"], "items": {3: [1]}}


def test_a_reset_slot_loads_again(new_slot: NewSlot) -> None:
    slot = new_slot()
    slot.fill(100)
    ref = slot.write()
    expected = slot.content()
    slot.fill(100, word="lost ")
    rocks(slot).flush()
    for table in slot.tables.values():
        table.forget(table.groups)
        table.assign(range(2, 6))
    slot.groups = range(2, 6)
    assert not rocks(slot).databases
    load(slot, ref)
    assert slot.content() == clipped(expected, range(2, 6))


# --- reading ----------------------------------------------------------------------------------


def test_rows_of_a_base_equal_the_dump_of_a_heap_with_the_same_content(new_slot: NewSlot) -> None:
    slot, heap = new_slot(), new_slot(backend="heap")
    for each in (slot, heap):
        each.fill(300)
        each.change("value", 5, None)
    ref = slot.write()
    for groups in (range(GROUP_COUNT), range(2, 3), range(7, 8)):
        assert stored(slot.store, ref, slot.scratch, groups) == clipped(heap.content(), groups)
    with open_rows(slot.store, ref, slot.scratch) as reader:
        for name, table in heap.tables.items():
            assert reader.schema(name) == next(table.dump()).schema
    assert not [name for name in os.listdir(slot.scratch) if name.startswith("rocks-")]


def test_a_reader_fetches_only_the_files_of_its_groups(
    new_slot: NewSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared: dict[str, state.Declaration] = {"value": state.Value("binary")}
    declared["value"].name = "value"
    slot = new_slot(states=declared)
    rng = random.Random(1)
    for group in range(GROUP_COUNT):
        changes = {group + GROUP_COUNT * n: rng.randbytes(100_000) for n in range(80)}
        slot.tables["value"].rows[group].promote(changes)
    rocks(slot).flush()
    rocks(slot).databases[0].compact()
    ref = slot.write()
    assert len(ref.objects) > 1
    fetched = []
    fetch = rocksdb_files.fetch_file
    monkeypatch.setattr(
        rocksdb_files, "fetch_file", lambda s, f, to: (fetched.append(f.path), fetch(s, f, to))
    )
    with open_rows(slot.store, ref, slot.scratch) as reader:
        rows = sum(batch.num_rows for batch in reader.read("value", range(1)))
        assert rows == 80 and len(fetched) < len(ref.objects)
        rows += sum(batch.num_rows for batch in reader.read("value", range(1, GROUP_COUNT)))
    assert rows == 80 * GROUP_COUNT and sorted(fetched) == sorted(ref.objects)


@pytest.mark.parametrize("seed", range(4))
def test_any_groups_of_a_base_are_read_without_the_files_of_the_others(
    new_slot: NewSlot, seed: int
) -> None:
    chance = random.Random(seed)
    declared: dict[str, state.Declaration] = {n: state.Value("long") for n in ("one", "two")}
    for name, declaration in declared.items():
        declaration.name = name
    slot = new_slot(states=declared)
    held: dict[tuple[str, int], int] = {}
    for _ in range(chance.randint(2, 7)):
        # Files that begin and end where key groups do, with gaps between them.
        first = chance.randrange(GROUP_COUNT)
        for group in range(first, min(GROUP_COUNT, first + chance.randint(1, 3))):
            name, count = chance.choice(list(declared)), chance.choice([0, 1, 30])
            keys = [group + GROUP_COUNT * n for n in range(30)]
            changes = {key: n if n < count else None for n, key in enumerate(keys)}
            slot.tables[name].rows[group].promote(changes)
            held[name, group] = count
        rocks(slot).flush()
        if chance.random() < 0.3:
            rocks(slot).databases[0].compact()
    ref = slot.write()
    for groups in (range(a, b) for b in range(GROUP_COUNT + 1) for a in range(b)):
        with open_rows(slot.store, ref, slot.scratch) as reader:
            for name in declared:
                rows = sum(batch.num_rows for batch in reader.read(name, groups))
                assert rows == sum(held.get((name, group), 0) for group in groups)


def test_a_base_in_another_checkpoint_is_found_there(new_slot: NewSlot, tmp_path: Path) -> None:
    slot = new_slot()
    slot.fill(20)
    ref = msgspec.structs.replace(slot.write(), store=slot.store.url)
    child = new_slot(store=open_store(str(tmp_path / "child")))
    load(child, ref)
    assert child.content() == slot.content() == stored(child.store, ref, child.scratch)
    # What lies there is not ours to list as shared: the collector of that checkpoint decides.
    again = child.write(known=(ref,))
    assert again.objects and all(child.store.exists(path) for path in again.objects)
    heap = new_slot(backend="heap")
    heap.fill(20)
    segment = msgspec.structs.replace(heap.write(), store=heap.store.url)
    assert stored(child.store, segment, child.scratch) == heap.content()


def test_a_base_in_a_store_without_files_is_loaded_and_read(new_slot: NewSlot) -> None:
    store = open_store("memory:")
    slot = new_slot(store=store)
    slot.fill(500)
    ref = slot.write()
    other = new_slot(store=store)
    load(other, ref)
    assert other.content() == slot.content() == stored(store, ref, slot.scratch)
    store.delete(ref.objects[:1])
    with pytest.raises(CorruptFileError, match=ref.objects[0]):
        load(new_slot(store=store), ref)


# --- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
@pytest.mark.parametrize("what", ["sst", "index"])
def test_a_damaged_file_is_named(new_slot: NewSlot, how: str, what: str) -> None:
    slot = new_slot()
    slot.fill(1000)
    ref = slot.write()
    verify_rocksdb_base(slot.store, ref)
    path = ref.objects[0] if what == "sst" else ref.path
    data = bytearray(slot.store.get(path))
    if how == "missing":
        slot.store.delete([path])
    else:
        data[len(data) // 2] ^= 1
        slot.store.put(path, bytes(data[: len(data) // 2 if how == "cut" else None]))
    other = new_slot()
    with pytest.raises(CorruptFileError, match=path):
        load(other, ref)
    with pytest.raises(CorruptFileError, match=path):
        stored(slot.store, ref, slot.scratch)
    with pytest.raises(CorruptFileError, match=path):
        verify_rocksdb_base(slot.store, ref)


def test_a_manifest_that_lists_other_files_than_the_index_is_refused(new_slot: NewSlot) -> None:
    slot = new_slot()
    slot.fill(10)
    ref = slot.write()
    other = "state/000000000003/other.sst"
    ref = msgspec.structs.replace(ref, objects=(*ref.objects, other))
    with pytest.raises(CorruptFileError, match="other files"):
        verify_rocksdb_base(slot.store, ref)


# --- memory -----------------------------------------------------------------------------------


def test_little_memory_gives_the_same_state(new_slot: NewSlot) -> None:
    slot, heap = new_slot(memory_bytes=1 << 20), new_slot(backend="heap")
    for round_ in range(6):
        for each in (slot, heap):
            each.fill(3000, step=round_ % 3 + 1, word=f"{round_} " * 5)
            each.change("value", round_, None)
    backend = rocks(slot)
    assert backend.databases, "nothing was ever written"
    assert backend.cached_bytes <= (1 << 20) // 2
    assert backend.dirty_bytes <= (1 << 20) // 4
    for name, table in heap.tables.items():
        for key in range(0, 3000, 17):
            group = key % GROUP_COUNT
            held, found = table.rows[group].get(key), slot.tables[name].rows[group].get(key)
            if name == "items":
                held, found = list(held), list(found)
            assert found == held
    assert slot.content() == heap.content()


def test_a_base_that_memory_cannot_wait_for_is_taken_at_once(new_slot: NewSlot) -> None:
    slot = new_slot(memory_bytes=1 << 20)
    slot.fill(1000)
    expected = slot.content()
    base = slot.backend.begin_base(slot.tables, slot.groups)
    for round_ in range(5):
        slot.fill(3000, word=f"{round_} ")
    ref = slot.ref(base.write(slot.target(), lambda: None))
    base.close()
    assert stored(slot.store, ref, slot.scratch) == expected


def test_the_folder_is_emptied_at_the_start_and_gone_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "left").write_text("over")
    backend = RocksBackend(str(folder))
    assert os.listdir(folder) == []
    backend.close()
    assert not folder.exists()


@pytest.mark.parametrize("base", [False, True])
def test_a_disk_that_fails_loses_nothing(
    new_slot: NewSlot, monkeypatch: pytest.MonkeyPatch, base: bool
) -> None:
    slot = new_slot()
    slot.fill(100)

    def fail(writer: SortedWriter) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SortedWriter, "finish", fail)
        with pytest.raises(OSError, match="No space"):
            slot.write() if base else rocks(slot).flush()
        slot.change("value", 1, "later")
    expected = slot.content()
    assert expected["value"][1] == "later" and len(expected["items"]) == 100
    assert stored(slot.store, slot.write(), slot.scratch) == expected


# --- keys -------------------------------------------------------------------------------------


def test_keys_that_are_prefixes_of_each_other_stay_apart(tmp_path: Path) -> None:
    backend = RocksBackend(str(tmp_path / "state"))
    backend.open_state("m", "map", codec("binary"), codec("long"), codec("long"))
    rows = backend.rows("m", 65535)
    keys = [b"", b"\xff", b"\xff\xff", b"a", b"ab", b"a\0"]
    for number, key in enumerate(keys):
        rows.promote({key: {-1: number, 0: -number, 2**40: number}})
    backend.flush()
    for each in backend.all_rows():
        each.rotate()
        each.rotate()
    for number, key in enumerate(keys):
        assert dict(rows.get(key)) == {-1: number, 0: -number, 2**40: number}
    assert dict(rows.items()).keys() == set(keys)
    rows.promote({b"a": dict.fromkeys([-1, 0, 2**40], ABSENT)})
    assert rows.get(b"a") is None and len(rows.get(b"ab")) == 3
    backend.close()


def test_equal_keys_are_one_key(tmp_path: Path) -> None:
    backend = RocksBackend(str(tmp_path / "state"))
    backend.open_state("v", "value", codec("double"), codec("long"), None)
    rows = backend.rows("v", 0)
    for number, key in enumerate([0.0, -0.0, float("nan"), -float("nan")]):
        rows.promote({key: number})
        backend.flush()
    for each in backend.all_rows():
        each.rotate()
        each.rotate()
    assert rows.get(0.0) == rows.get(-0.0) == 1 and rows.get(float("nan")) == 3
    backend.close()


def test_nan_is_one_entry_of_a_map(tmp_path: Path) -> None:
    backend = RocksBackend(str(tmp_path / "state"))
    backend.open_state("m", "map", codec("double"), codec("long"), codec("double"))
    rows = backend.rows("m", 0)
    rows.promote({math.nan: {math.nan: 1, 0.0: 2}})
    backend.flush()
    for each in backend.all_rows():
        each.rotate()
        each.rotate()
    held = rows.get(math.nan)
    assert held.get(math.nan) == 1 and len(held) == 2
    rows.promote({math.nan: {math.nan: 3}})
    assert len(held) == 2 and dict(dict(rows.items())[math.nan]) == {math.nan: 3, 0.0: 2}
    backend.close()


def test_reducing_and_aggregating_state_are_values(new_slot: NewSlot) -> None:
    declared: dict[str, state.Declaration] = {"total": state.Reducing("bigint", operator.add)}
    declared["total"].name = "total"
    slot = new_slot(states=declared)
    slot.change("total", 1, 5)
    other = new_slot(states=declared)
    load(other, slot.write())
    assert other.content() == {"total": {1: 5}}


def test_a_large_map_is_read_by_entry(new_slot: NewSlot) -> None:
    slot = new_slot()
    slot.change("entries", 1, {str(n): n for n in range(1000)})
    backend = rocks(slot)
    backend.flush()
    for each in backend.all_rows():
        each.rotate()
        each.rotate()
    held = slot.tables["entries"].rows[1].get(1)
    assert held.get("7") == 7 and "x" not in held and len(held) == 1000
    assert not held.whole
    slot.change("entries", 1, {"7": ABSENT, "8": 0, "new": 1, "x": ABSENT})
    assert len(held) == 1000 and "7" not in held and held["new"] == 1
    expected = {str(n): n for n in range(1000) if n != 7} | {"8": 0, "new": 1}
    assert slot.content()["entries"][1] == expected
    assert slot.tables["entries"].count_held().entries == 1000
