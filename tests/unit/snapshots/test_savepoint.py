"""A savepoint holds exactly its epoch, wherever it is moved; what is wrong with one is said."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.codec import codec
from cairn.errors import CorruptFileError, RestoreError, StaleEpochError, StateNotFoundError
from cairn.plan.keygroups import key_hasher
from cairn.snapshots import Savepoint, destination, open_savepoint, saving, write_savepoint
from cairn.snapshots.diff import same_value
from cairn.storage.manifest import StateDecl
from cairn.storage.retention import HOLDS_FOLDER, read_holds
from cairn.storage.saved import saved_points
from cairn.storage.store import Store, open_store
from cairn.testing import Fault, FaultyStore
from tests.unit.slot.scoped_job import GROUP_COUNT, ScopedJob
from tests.unit.snapshots.checkpoints import (
    GONE,
    UID,
    Checkpoint,
    listed,
    mapped,
    same_state,
    state_of,
    value,
)
from tests.unit.test_codec import SCALARS, typed

STATES = {"n": value("bigint"), "items": listed("string"), "last": mapped("string", "double")}


def shop(**more: Any) -> Checkpoint:
    checkpoint = Checkpoint(STATES, **more)
    checkpoint.commit({"n": {k: k for k in range(60)}, "items": {k: ["a"] for k in range(9)}})
    checkpoint.commit({"last": {k: {"x": 1.0, "y": None} for k in range(20)}}, base=True)
    checkpoint.commit({"n": {3: GONE}, "items": {1: ["a", "b"], 2: GONE}, "last": {1: GONE}})
    return checkpoint


def saved(checkpoint: Checkpoint, epoch: int | None = None, url: str = "memory:") -> Savepoint:
    dest = open_store(url)
    write_savepoint(checkpoint.store, epoch, dest.url)
    return open_savepoint(dest.url)


def holds(store: Store) -> list[str]:
    return [found.path for found in store.list(HOLDS_FOLDER)]


# What is in it


def test_a_savepoint_holds_exactly_the_state_of_its_epoch() -> None:
    checkpoint = shop()
    savepoint = saved(checkpoint)
    assert state_of(savepoint) == checkpoint.model
    assert savepoint.verify() == []


def test_the_checkpoint_knows_which_savepoints_were_taken_of_it() -> None:
    checkpoint = shop()
    savepoint = saved(checkpoint, 3)
    (found,) = saved_points(checkpoint.store)
    assert (found["url"], found["epoch"]) == (savepoint.url, 3)
    assert (found["id"], found["bytes"]) == (savepoint.info.id, savepoint.info.bytes)


def test_a_savepoint_of_an_older_epoch_holds_that_one() -> None:
    checkpoint = shop()
    epoch, model = checkpoint.newest, checkpoint.model
    assert epoch is not None
    checkpoint.commit({"n": {3: 33, 4: GONE}})
    assert state_of(saved(checkpoint, epoch.number)) == model
    assert state_of(saved(checkpoint)) == checkpoint.model != model


@pytest.mark.parametrize("parallelism", [1, 3, 8])
def test_files_clipped_by_a_change_of_parallelism_are_saved_once(parallelism: int) -> None:
    checkpoint = shop(parallelism=2)
    checkpoint.parallelism = parallelism
    checkpoint.commit({"n": {3: 33, 4: GONE}})
    assert state_of(saved(checkpoint)) == checkpoint.model


def test_it_says_where_it_comes_from_and_where_the_sources_stand() -> None:
    checkpoint = shop()
    epoch = checkpoint.newest
    assert epoch is not None
    info = saved(checkpoint).info
    assert (info.job, info.max_parallelism, info.epoch) == ("shop", 8, epoch.number)
    for name in ("now_ms", "watermarks", "watermark_ms", "passed_ms", "seen_ms", "timers"):
        assert getattr(info, name) == getattr(epoch, name), name
    assert (info.batch_id, info.offsets, info.sources) == (
        epoch.spark.batch_id,
        epoch.spark.offsets,
        ["rows"],
    )
    operator = info.operators[UID]
    assert operator.function_version == "f" * 32
    assert operator.key_types == {"k": "bigint"}
    assert {name: state.decl for name, state in operator.states.items()} == STATES
    rows = {name: state.rows for name, state in operator.states.items()}
    assert rows == {"n": 59, "items": 8, "last": 38}


def test_empty_states_are_known_by_their_types() -> None:
    checkpoint = Checkpoint(STATES)
    checkpoint.commit()
    savepoint = saved(checkpoint)
    assert state_of(savepoint) == {"n": {}, "items": {}, "last": {}}
    assert savepoint.info.files == []
    assert savepoint.verify() == []


def test_keys_of_several_columns_are_structs_and_may_be_null() -> None:
    checkpoint = Checkpoint({"n": value("int")}, {"shop": "string", "day": "date"})
    keys = [("é/ü ☃", dt.date(2024, 2, 29)), (None, None), ("", None), (None, dt.date.min)]
    checkpoint.commit({"n": {key: at for at, key in enumerate(keys)}})
    savepoint = saved(checkpoint)
    assert state_of(savepoint)["n"] == {key: at for at, key in enumerate(keys)}


def test_a_null_key_is_kept() -> None:
    checkpoint = Checkpoint(STATES, {"k": "string"})
    checkpoint.commit({"n": {None: 1, "": 2, "\0": 3}, "items": {None: ["x"]}})
    assert state_of(saved(checkpoint)) == checkpoint.model


def test_objects_are_saved_as_their_pickles() -> None:
    checkpoint = Checkpoint(
        {"o": value("object"), "many": listed("object"), "by": mapped("int", "object")}
    )
    held = {"a": {1, 2}}
    checkpoint.commit({"o": {1: held}, "many": {1: [held, 3]}, "by": {1: {5: held, 6: None}}})
    savepoint = saved(checkpoint)
    assert state_of(savepoint) == checkpoint.model
    assert pickle.loads(state_of(savepoint)["o"][1]) == held
    (file,) = savepoint.info.operators[UID].states["o"].files
    assert (
        pq.read_schema(pa.BufferReader(savepoint.store.get(file.path))).field("value").type
        == pa.binary()
    )


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


# Types


def check_round_trip(decl: StateDecl, held: dict[Any, Any]) -> None:
    checkpoint = Checkpoint({"s": decl}, group_count=4)
    checkpoint.commit({"s": held})
    assert same_state(state_of(saved(checkpoint)), checkpoint.model)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_values_of_every_type_come_back(data: st.DataObject) -> None:
    declared, values = data.draw(typed)
    held = data.draw(st.lists(values, max_size=5))
    states = {"v": value(declared), "l": listed(declared), "m": mapped("int", declared)}
    checkpoint = Checkpoint(states, group_count=4)
    lists = {0: held, 1: [*held, None], 2: []}
    maps = {key: dict(enumerate([None, *held])) for key in range(3)}
    checkpoint.commit({"v": dict(enumerate(held)), "l": lists, "m": maps})
    assert same_state(state_of(saved(checkpoint)), checkpoint.model)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_keys_and_entries_of_every_type_come_back(data: st.DataObject) -> None:
    declared = data.draw(st.sampled_from(sorted(SCALARS)))
    keys = codec(declared)
    drawn = data.draw(st.lists(SCALARS[declared], max_size=6))
    checkpoint = Checkpoint(
        {"n": value("int"), "m": mapped(declared, "int")}, {"k": declared}, group_count=4
    )
    held = {keys.normalise_key(key): at for at, key in enumerate(drawn)}
    checkpoint.commit({"n": held, "m": dict.fromkeys(held, held)})
    assert state_of(saved(checkpoint)) == checkpoint.model


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


# Sources


def file_source(checkpoint: Checkpoint, entries: int) -> None:
    for number in range(entries):
        line = json.dumps({"path": f"f{number}", "batchId": number})
        checkpoint.store.put(f"spark/000000000001/sources/0/{number}", f"v1\n{line}".encode())


def test_the_files_already_read_are_taken_along_as_of_the_epoch() -> None:
    checkpoint = Checkpoint(STATES, offsets='v1\n{}\n{"logOffset":2}')
    file_source(checkpoint, 6)
    checkpoint.commit()
    found = saved(checkpoint).source_files()
    assert sorted(found) == ["0/0", "0/1", "0/2"]
    assert b'"f2"' in found["0/2"]


def test_sources_may_lie_in_another_store() -> None:
    checkpoint, other = Checkpoint(STATES), open_store("memory:")
    other.put("spark/000000000001/sources/0/0", b"v1\n{}")
    checkpoint.commit()
    dest = open_store("memory:")
    write_savepoint(checkpoint.store, None, dest.url, spark_store=other)
    assert open_savepoint(dest.url).source_files() == {"0/0": b"v1\n{}"}


# Moving, and damage


def test_a_savepoint_can_be_moved(tmp_path: Path) -> None:
    checkpoint = shop()
    saved(checkpoint, url=str(tmp_path / "s"))
    shutil.move(tmp_path / "s", tmp_path / "elsewhere" / "t")
    moved = open_savepoint(str(tmp_path / "elsewhere" / "t"))
    assert state_of(moved) == checkpoint.model
    assert moved.verify() == []
    bucket = open_store("memory:")
    for found in moved.store.list():
        bucket.put(found.path, moved.store.get(found.path))
    assert state_of(open_savepoint(bucket.url)) == checkpoint.model


def damaged(savepoint: Savepoint, path: str, how: str) -> None:
    data = savepoint.store.get(path)
    if how == "missing":
        savepoint.store.delete([path])
    elif how == "truncated":
        savepoint.store.put(path, data[:-10])
    elif how == "longer":
        savepoint.store.put(path, data + b"\0")
    else:
        savepoint.store.put(path, data[:20] + bytes([data[20] ^ 1]) + data[21:])


@pytest.mark.parametrize("where", ["memory:", "folder"])
@pytest.mark.parametrize("how", ["missing", "truncated", "longer", "changed"])
def test_a_damaged_file_is_named_and_not_read(how: str, where: str, tmp_path: Path) -> None:
    savepoint = saved(shop(), url=str(tmp_path / "s") if where == "folder" else where)
    (file,) = savepoint.info.operators[UID].states["items"].files
    damaged(savepoint, file.path, how)
    with pytest.raises(CorruptFileError, match=f"{savepoint.url}/{file.path}"):
        list(savepoint.rows(UID, "items"))
    (found,) = savepoint.verify()
    assert found.path == file.path
    list(savepoint.rows(UID, "n"))


def test_every_damaged_file_is_listed() -> None:
    checkpoint = Checkpoint(STATES, offsets='v1\n{}\n{"logOffset":1}')
    file_source(checkpoint, 2)
    checkpoint.commit({"n": {1: 1}, "items": {1: ["a"]}})
    savepoint = saved(checkpoint)
    paths = [file.path for file in savepoint.info.files]
    for path in paths:
        damaged(savepoint, path, "truncated")
    counted: list[tuple[int, int]] = []
    damage = savepoint.verify(lambda done, total: counted.append((done, total)))
    assert [found.path for found in damage] == paths
    assert counted == [(n, len(paths)) for n in range(1, len(paths) + 1)]
    with pytest.raises(CorruptFileError, match="sources/0/0"):
        savepoint.source_files()


@pytest.mark.parametrize("at", [0, 30, 200, -2])
def test_a_damaged_savepoint_json_is_refused(at: int) -> None:
    store = saved(shop()).store
    data = bytearray(store.get("savepoint.json"))
    data[at] ^= 1
    store.put("savepoint.json", bytes(data))
    with pytest.raises(CorruptFileError, match=r"savepoint\.json"):
        open_savepoint(store.url)


def test_a_savepoint_of_a_newer_format_says_which_cairn_is_needed() -> None:
    store = saved(shop()).store
    envelope = json.loads(store.get("savepoint.json"))
    body = store.get("savepoint.json").partition(b'"record":')[2][:-1]
    head = b"9.0\n7.1\n"
    checksum = xxhash.xxh3_128_hexdigest(head + body)
    assert envelope["format"] == "1.0"
    text = f'{{"checksum":"{checksum}","format":"9.0","needs":"7.1","record":'.encode()
    store.put("savepoint.json", text + body + b"}")
    with pytest.raises(RestoreError, match=r"use cairn 7\.1 or newer"):
        open_savepoint(store.url)


# What is no savepoint


def test_a_checkpoint_is_no_savepoint() -> None:
    with pytest.raises(RestoreError, match="it is a checkpoint"):
        open_savepoint(shop().store.url)


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(RestoreError, match="no such folder"):
        open_savepoint(str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(RestoreError, match="unknown scheme 'ftp'"):
        open_savepoint("ftp://somewhere/s")


def test_an_empty_folder_is_no_savepoint(tmp_path: Path) -> None:
    with pytest.raises(RestoreError, match=r"found: no savepoint\.json"):
        open_savepoint(str(tmp_path))


@pytest.mark.parametrize("claimed", [True, False])
def test_an_unfinished_savepoint_is_refused(claimed: bool) -> None:
    store = saved(shop()).store
    store.delete(["savepoint.json"])
    if claimed:
        store.put("unfinished.json", b"{}")
    with pytest.raises(RestoreError, match="an unfinished savepoint"):
        open_savepoint(store.url)


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    savepoint = saved(shop())
    with pytest.raises(StateNotFoundError, match="found: count"):
        list(savepoint.rows("counts", "n"))
    with pytest.raises(StateNotFoundError, match="found: n, items, last"):
        list(savepoint.rows(UID, "m"))


def test_nan_is_itself() -> None:
    assert same_value((1, math.nan, {"a": math.nan}), (1, math.nan, {"a": math.nan}))
    assert not same_value((1, math.nan), (1, 2.0))


# Writing


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


def test_the_epoch_is_held_while_it_is_written_and_no_longer() -> None:
    checkpoint = shop()
    epoch = checkpoint.newest
    assert epoch is not None
    seen = []

    def look(done: int, total: int) -> None:
        seen.append(read_holds(checkpoint.store).epochs)

    write_savepoint(checkpoint.store, None, open_store("memory:").url, progress=look)
    assert seen and set(seen) == {frozenset({epoch.number})}
    assert holds(checkpoint.store) == []


def test_progress_ends_with_everything_done() -> None:
    counted: list[tuple[int, int]] = []
    dest = open_store("memory:")
    write_savepoint(
        shop().store, None, dest.url, progress=lambda done, total: counted.append((done, total))
    )
    assert counted == sorted(counted)
    assert counted[-1] == (8, 8)


def test_after_an_error_neither_hold_nor_files_are_left() -> None:
    checkpoint, dest = shop(), open_store("memory:")
    assert checkpoint.newest is not None
    path = checkpoint.newest.operators[UID].ranges[-1].files[-1].path
    checkpoint.store.delete([path])
    checkpoint.store.put("spark/000000000001/sources/0/0", b"{}")
    with pytest.raises(CorruptFileError, match=path):
        write_savepoint(checkpoint.store, None, dest.url)
    assert holds(checkpoint.store) == []
    assert dest.list() == []


def test_after_an_interrupt_neither_hold_nor_files_are_left() -> None:
    checkpoint, dest = shop(), open_store("memory:")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_savepoint(checkpoint.store, None, dest.url, progress=interrupt)
    assert holds(checkpoint.store) == []
    assert dest.list() == []


def test_an_epoch_that_is_retired_is_refused() -> None:
    checkpoint = Checkpoint(STATES, keep=1)
    first = checkpoint.commit({"n": {1: 1}})
    while checkpoint.log.retired_below() <= first.number:
        checkpoint.commit({"n": {1: 2}})
    dest = open_store("memory:")
    with pytest.raises(StaleEpochError, match=f"epoch {first.number} is retired"):
        write_savepoint(checkpoint.store, first.number, dest.url)
    assert (holds(checkpoint.store), dest.list()) == ([], [])


def test_an_epoch_retired_between_look_and_hold_is_refused() -> None:
    """The leader retires it after the hold's owner has chosen it, before the hold is there."""
    checkpoint = Checkpoint(STATES, keep=1)
    first = checkpoint.commit({"n": {1: 1}})

    class LateHold(FaultyStore):
        def put(self, path: str, data: bytes) -> None:
            if path.startswith(HOLDS_FOLDER):
                while checkpoint.log.retired_below() <= first.number:
                    checkpoint.commit({"n": {1: 2}})
            super().put(path, data)

    with pytest.raises(StaleEpochError, match="is retired"):
        write_savepoint(LateHold(checkpoint.store), None, open_store("memory:").url)
    assert holds(checkpoint.store) == []


def test_a_collector_at_work_meanwhile_removes_nothing_that_is_needed() -> None:
    checkpoint = Checkpoint(STATES, keep=1, group_count=8)
    first = checkpoint.commit({"n": {k: k for k in range(100)}})
    model = checkpoint.model
    removed = []

    def go_on(done: int, total: int) -> None:
        # Every epoch rewrites everything, so that all older files become garbage.
        for _ in range(25):
            checkpoint.commit({"n": {k: -k for k in range(100)}}, base=True)
            removed.append(checkpoint.collector.after_epoch().objects_removed)

    dest = open_store("memory:")
    write_savepoint(checkpoint.store, first.number, dest.url, progress=go_on)
    assert state_of(open_savepoint(dest.url)) == {**model, "n": {k: k for k in range(100)}}
    assert sum(removed) == 0
    checkpoint.commit(base=True)
    assert checkpoint.collector.after_epoch().objects_removed > 0


def test_without_epochs_there_is_nothing_to_save() -> None:
    checkpoint = Checkpoint(STATES)
    with pytest.raises(StaleEpochError, match="no epoch is committed yet"):
        write_savepoint(checkpoint.store, None, open_store("memory:").url)
    with pytest.raises(RestoreError, match="no job"):
        write_savepoint(open_store("memory:"), None, open_store("memory:").url)


@pytest.mark.parametrize("seed", range(4))
def test_a_store_that_fails_now_and_then_gives_a_whole_savepoint_or_none(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = shop()
    dest = open_store("memory:")
    faulty = FaultyStore(dest, seed=seed, fault_rate=0.15)
    monkeypatch.setattr(saving, "open_store", lambda url: faulty)
    for _ in range(20):
        try:
            write_savepoint(checkpoint.store, None, dest.url)
        except Exception:
            assert not dest.exists("savepoint.json")
            dest.delete([found.path for found in dest.list()])
        else:
            savepoint = open_savepoint(dest.url)
            assert savepoint.verify() == []
            assert state_of(savepoint) == checkpoint.model
            return
    pytest.fail("no attempt got through")


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


def test_a_rocksdb_job_that_was_rescaled_has_a_savepoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0.1")
    group_of = key_hasher([pa.int64()])
    low = [k for k in range(100) if group_of([k]) % GROUP_COUNT < GROUP_COUNT // 2]
    job = ScopedJob(tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    job.lead(1, backend="rocksdb")
    # A file of the lower key groups in a base, then one of the upper ones.
    for keys in (low, set(range(100)) - set(low)):
        job.run([(k, 1) for k in keys])
        for _ in range(3):
            job.run()
            for slot in job.cluster.slots.values():
                slot.compactor.work()
    job.coordinator.rescale(2)
    job.run()
    files = [part.files[0] for part in job.newest.operators["alerts"].ranges]
    assert [len(file.objects) for file in files] == [2, 2]
    write_savepoint(job.store, job.newest.number, str(tmp_path / "sp"))
    rows = open_savepoint(str(tmp_path / "sp")).rows("alerts", "n")
    assert sum(batch.num_rows for batch in rows) == 100
