"""State of batches that does not fit in memory: in RocksDB, and in files of a join's rows."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cairn import state
from cairn.backends.cached.columns import SpillTable
from cairn.backends.cached.mapped_rows import MappedRowTable
from cairn.backends.contract import BaseCancelledError, BaseTarget
from cairn.backends.files import open_rows
from cairn.backends.handles import make_batch_handle, make_batch_table
from cairn.backends.rocksdb.backend import RocksBackend
from cairn.backends.timed_rows import TimedRows
from cairn.key_groups import key_groups
from cairn.storage.manifest import FileRef
from cairn.storage.store import Store, open_store
from tests.backends import make

GROUPS = range(4)
COUNT = 20_000
MEMORY_BYTES = 1 << 20
EPOCHS = itertools.count(9)


class Slot:
    def __init__(self, folder: Path, memory_bytes: int, declaration: state.Declaration) -> None:
        declaration.name = "s"
        self.folder = folder
        self.backend = RocksBackend(str(folder / "state"), memory_bytes)
        self.table: Any = make_batch_table(declaration, pa.int64(), self.backend, len(GROUPS))
        self.table.assign(GROUPS)
        self.handle: Any = make_batch_handle(self.table)

    def put(self, keys: range, word: str = "v") -> None:
        self.handle.put_many(pa.array(keys), pa.array([f"{word}{key}" for key in keys]))
        self.table.promote()

    def read(self, keys: range) -> list[str | None]:
        found: list[str | None] = self.handle.get_many(pa.array(keys)).to_pylist()
        return found

    def write_base(self, store: Store, known: tuple[FileRef, ...] = ()) -> FileRef:
        base = self.backend.begin_base({"s": self.table}, GROUPS)
        try:
            target = BaseTarget(store, 3, "op", next(EPOCHS), str(self.folder), 0, known)
            stored = base.write(target, lambda: None)
        finally:
            base.close()
        return stored.list_for(GROUPS, first_epoch=0, last_epoch=7)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    made = Slot(tmp_path / "small", MEMORY_BYTES, state.Value("string"))
    yield made
    made.backend.close()


def test_state_that_does_not_fit_stays_within_its_memory(slot: Slot) -> None:
    table: SpillTable = slot.table
    for start in range(0, COUNT, 1000):
        slot.put(range(start, start + 1000))
        assert table.nbytes <= MEMORY_BYTES
    assert not table.is_whole
    assert slot.read(range(-2, COUNT)) == [None, None, *(f"v{key}" for key in range(COUNT))]
    assert table.count_held().keys == COUNT


def test_rows_used_last_are_the_ones_in_memory(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = range(100)
    for start in range(0, COUNT, 1000):
        slot.put(range(start, start + 1000))
        slot.read(hot)
    assert not slot.table.is_whole

    def refuse(*args: object) -> None:
        raise AssertionError("a row that is used in every epoch was read from RocksDB")

    monkeypatch.setattr(slot.table._below, "read", refuse)
    assert slot.read(hot) == [f"v{key}" for key in hot]


def test_a_base_of_state_in_rocksdb_shares_files_with_the_one_before(
    slot: Slot, store: Store
) -> None:
    slot.put(range(COUNT))
    first = slot.write_base(store)
    slot.put(range(10), "w")
    second = slot.write_base(store, (first,))
    assert first.format == second.format == "rocksdb"
    assert set(first.objects) < set(second.objects)


def test_a_base_has_nothing_of_later_epochs(slot: Slot, store: Store) -> None:
    slot.put(range(COUNT))
    base = slot.backend.begin_base({"s": slot.table}, GROUPS)
    slot.put(range(COUNT), "later ")
    target = BaseTarget(store, 3, "op", next(EPOCHS), str(slot.folder), 0, ())
    stored = base.write(target, lambda: None)
    base.close()
    ref = stored.list_for(GROUPS, first_epoch=0, last_epoch=7)
    with open_rows(store, ref, str(slot.folder)) as reader:
        values = [v for batch in reader.read("s") for v in batch["value"].to_pylist()]
    assert sorted(values) == sorted(f"v{key}" for key in range(COUNT))


@pytest.mark.parametrize("memory_bytes", [MEMORY_BYTES, 64 << 20])
def test_a_base_in_rocksdb_is_read_whether_or_not_it_fits_in_arrays(
    slot: Slot, store: Store, tmp_path: Path, memory_bytes: int
) -> None:
    slot.put(range(COUNT))
    slot.put(range(0, COUNT, 2), "w")
    ref = slot.write_base(store)
    other = Slot(tmp_path / "other", memory_bytes, state.Value("string"))
    is_loaded = other.backend.load(store, ref, GROUPS)
    assert is_loaded == (memory_bytes == MEMORY_BYTES)
    if not is_loaded:
        with open_rows(store, ref, str(tmp_path)) as reader:
            for batch in reader.read("s"):
                other.table.apply(batch)
    assert other.read(range(COUNT)) == [f"{'v' if key % 2 else 'w'}{key}" for key in range(COUNT)]
    other.backend.close()


def test_lookups_find_rows_while_an_epoch_reads_them_from_rocksdb(slot: Slot) -> None:
    slot.put(range(COUNT))
    keys = list(range(0, COUNT, 7))
    groups = key_groups(pa.array(keys), pa.int64(), len(GROUPS)).tolist()
    places = list(zip(groups, keys, strict=True))
    wrong: list[Any] = []

    def look() -> None:
        for at in range(0, len(places), 50):
            some = places[at : at + 50]
            found = slot.table.look_up(some, finished=False)
            wrong.extend(p for p, v in zip(some, found, strict=True) if v != f"v{p[1]}")

    thread = threading.Thread(target=look)
    thread.start()
    for start in range(0, COUNT, 500):
        slot.read(range(start, start + 500))
    thread.join()
    assert not wrong


def test_content_of_a_joins_rows_is_in_files_when_it_does_not_fit(tmp_path: Path) -> None:
    schema = pa.schema([("text", pa.string())])
    slot = Slot(tmp_path / "join", 4 << 20, TimedRows(schema, step_us=1000))
    table: MappedRowTable = slot.table
    none = np.zeros(1000, np.bool_)
    for epoch in range(20):
        texts = [f"{epoch} {key} " + "x" * 1000 for key in range(1000)]
        rows = pa.StructArray.from_arrays([pa.array(texts)], fields=list(schema))
        slot.handle.append(pa.array(range(1000)), np.full(1000, epoch), rows, none)
        table.promote()
    assert table._mapped and not list((tmp_path / "join" / "state").iterdir())
    every = np.zeros(1, np.int64), np.full(1, 100)
    (found,) = slot.handle.match(pa.array([7]), *every)
    found_texts = found.rows(slot.handle.row_type).field("text").to_pylist()
    assert found_texts == [f"{epoch} 7 " + "x" * 1000 for epoch in range(20)]
    slot.backend.close()


def test_keys_known_to_have_no_entries_are_kept_within_the_memory(tmp_path: Path) -> None:
    slot = Slot(tmp_path, MEMORY_BYTES, state.Map("long", "string"))
    keys = pa.array(range(COUNT))
    slot.handle.put_many(keys, keys, pa.array([f"value of {key}" for key in range(COUNT)]))
    slot.table.promote()
    assert not slot.table.is_whole
    for start in range(COUNT, 6 * COUNT, COUNT):
        assert not len(slot.handle.of_keys(pa.array(range(start, start + COUNT)))[0])
        slot.table.promote()
        assert slot.table._known_keys.nbytes <= MEMORY_BYTES
    assert slot.handle.of_keys(pa.array([7]))[2].to_pylist() == ["value of 7"]
    slot.backend.close()


@pytest.mark.parametrize("kind", ["value", "map"])
def test_rows_are_counted_once_while_a_base_is_written_and_after_it_was_given_up(
    kind: str, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.backends.cached.columns.PIECE_ROWS", 50)
    monkeypatch.setattr("cairn.backends.versioned.base._STEP_OPS", 20)
    slot = Slot.__new__(Slot)
    slot.folder = tmp_path
    slot.backend = backend = make("sqlite", str(tmp_path / "state"), MEMORY_BYTES)  # type: ignore[assignment]
    declaration: Any = state.Value("string") if kind == "value" else state.Map("bigint", "string")
    declaration.name = "s"
    table: Any = make_batch_table(declaration, pa.int64(), backend, len(GROUPS))
    table.assign(GROUPS)
    handle: Any = make_batch_handle(table)

    def put(keys: range) -> None:
        entries = () if kind == "value" else (pa.array([key % 3 for key in keys]),)
        handle.put_many(pa.array(keys), *entries, pa.array([f"v{key}" for key in keys]))
        table.promote()

    put(range(100))
    slot.table = table
    slot.write_base(store)
    table.note_loaded(GROUPS)
    put(range(50, 400))
    assert table.count_held().entries == 400

    def give_up() -> None:
        assert table.count_held().entries == 400, "while it is written"
        nonlocal passes
        passes += 1
        if passes == 4:
            raise BaseCancelledError

    passes = 0
    with pytest.raises(BaseCancelledError):
        base = backend.begin_base({"s": table}, GROUPS)
        try:
            base.write(BaseTarget(store, 3, "op", next(EPOCHS), str(tmp_path), 0), give_up)
        finally:
            base.close()
    assert table.count_held().entries == 400, "after it was given up"
    slot.write_base(store)
    assert table.count_held() == (400, 400)
    assert sum(rows for _, rows in slot.backend.describe_states(GROUPS)["s"].counts.values()) == 400
    backend.close()
