"""Where a savepoint is written: typed Parquet files, cut by key group, in a folder of its own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cairn.errors import RestoreError
from cairn.snapshots import destination, open_savepoint, saving, write_savepoint
from cairn.snapshots.destination import Destination
from cairn.storage.manifest import StateDecl
from cairn.storage.store import open_store
from cairn.testing import Fault, FaultyStore
from tests.unit.snapshots.checkpoints import UID, Checkpoint, listed, same_state, state_of, value
from tests.unit.snapshots.savepoints import STATES, holds, saved, shop


def test_names_of_operators_and_states_that_are_no_file_names_are_quoted(tmp_path: Path) -> None:
    checkpoint = Checkpoint({"..": value("int"), "é x": value("int")}, uid="a/b%c")
    checkpoint.commit({"..": {1: 1}, "é x": {1: 2}})
    savepoint = saved(checkpoint, url=str(tmp_path / "s"))
    assert state_of(savepoint, "a/b%c") == {"..": {1: 1}, "é x": {1: 2}}
    assert savepoint.verify() == []
    assert {f.path.rpartition("/")[0] for f in savepoint.info.files} == {
        "state/a%2Fb%25c/%2E.",
        "state/a%2Fb%25c/%C3%A9%20x",
    }


def check_round_trip(decl: StateDecl, held: dict[Any, Any]) -> None:
    checkpoint = Checkpoint({"s": decl}, group_count=4)
    checkpoint.commit({"s": held})
    assert same_state(state_of(saved(checkpoint)), checkpoint.model)


@pytest.mark.parametrize(
    ("declared", "held"),
    [
        ("struct<>", [(), ()]),
        ("array<struct<>>", [[(), None, ()], []]),
        ("map<string,struct<>>", [{"a": (), "b": None}, {}]),
        ("struct<x:struct<>,y:int NOT NULL>", [((), 1), (None, 2)]),
    ],
)
def test_structs_without_fields_survive_parquet(declared: str, held: list[Any]) -> None:
    check_round_trip(value(declared), dict(enumerate(held)))
    check_round_trip(listed(declared), {0: held})


def test_parquet_columns_are_typed_and_sorted_by_key_group(tmp_path: Path) -> None:
    checkpoint = shop()
    savepoint = saved(checkpoint, url=str(tmp_path / "s"))
    table = pq.read_table(tmp_path / "s" / "state" / UID / "last")
    assert {f.name: str(f.type) for f in table.schema} == {
        "key_group": "int32",
        "key": "int64",
        "entry": "string",
        "value": "double",
    }
    groups = table["key_group"].to_pylist()
    assert groups == sorted(groups)
    assert groups == [checkpoint.group(key) for key in table["key"].to_pylist()]
    assert table.num_rows == savepoint.info.operators[UID].states["last"].rows
    lists = pq.read_table(tmp_path / "s" / "state" / UID / "items")
    assert str(lists.schema.field("value").type) == "list<element: string>"


def test_files_are_cut_between_key_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.snapshots.reader.CHUNK_ROWS", 100)
    monkeypatch.setattr(destination, "FILE_ROWS", 300)
    monkeypatch.setattr(destination, "ROW_GROUP_ROWS", 100)
    checkpoint = Checkpoint(STATES, group_count=32)
    checkpoint.commit({"n": {k: k for k in range(2000)}})
    savepoint = saved(checkpoint)
    files = savepoint.info.operators[UID].states["n"].files
    assert len(files) > 3
    assert all(a.last_group < b.first_group for a, b in itertools.pairwise(files))
    for file in files:
        parquet = pq.ParquetFile(pa.BufferReader(savepoint.store.get(file.path)))
        groups = parquet.read()["key_group"].to_pylist()
        assert (min(groups), max(groups), len(groups)) == (
            file.first_group,
            file.last_group,
            file.rows,
        )
        assert parquet.metadata.num_row_groups > 1 or file is files[-1]
    assert state_of(savepoint) == checkpoint.model
    some = savepoint.rows(UID, "n", range(5, 9))
    found = {k for batch in some for k in batch["key"].to_pylist()}
    assert found == {k for k in range(2000) if checkpoint.group(k) in range(5, 9)}


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ("savepoint.json", "another savepoint"),
        ("unfinished.json", "being written, or was never finished"),
        ("notes/todo.txt", "notes/todo.txt"),
    ],
)
def test_a_folder_that_holds_something_is_refused_and_left_alone(there: str, found: str) -> None:
    checkpoint, dest = shop(), open_store("memory:")
    dest.put(there, b"mine")
    with pytest.raises(RestoreError, match=found):
        write_savepoint(checkpoint.store, None, dest.url)
    assert [each.path for each in dest.list()] == [there]
    assert dest.get(there) == b"mine"
    assert holds(checkpoint.store) == []


def test_of_two_writers_to_one_folder_one_is_refused() -> None:
    checkpoint, dest = shop(), open_store("memory:")
    refused: list[Exception] = []

    def second(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(RestoreError, match="being written") as caught:
                write_savepoint(checkpoint.store, None, dest.url)
            refused.append(caught.value)

    write_savepoint(checkpoint.store, None, dest.url, progress=second)
    assert refused
    assert open_savepoint(dest.url).verify() == []


def test_a_claim_of_unknown_outcome_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, dest = shop(), open_store("memory:")
    faulty = FaultyStore(dest, [Fault("put_if_absent", 1, "after")])
    monkeypatch.setattr(saving, "open_store", lambda url: faulty)
    write_savepoint(checkpoint.store, None, dest.url)
    assert faulty.faults_seen
    assert open_savepoint(dest.url).verify() == []


def test_after_rows_that_are_refused_no_folder_of_state_is_left(tmp_path: Path) -> None:
    dest = Destination(open_store(str(tmp_path)), "an-id", 1)
    dest.store.put("state/op/v/part.parquet", b"by an executor")
    dest.undo()
    assert not list(tmp_path.iterdir())
