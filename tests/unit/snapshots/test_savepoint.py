"""A savepoint holds exactly its epoch, wherever it is moved; what is wrong with one is said."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import shutil
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.errors import CorruptFileError, RestoreError, StateNotFoundError
from cairn.snapshots import Savepoint, open_savepoint, write_savepoint
from cairn.storage.store import open_store
from cairn.types.codec import codec
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
from tests.unit.snapshots.savepoints import STATES, saved, shop
from tests.unit.types.typed_values import SCALARS, typed

# What is in it


def test_a_savepoint_holds_exactly_the_state_of_its_epoch() -> None:
    checkpoint = shop()
    savepoint = saved(checkpoint)
    assert state_of(savepoint) == checkpoint.model
    assert savepoint.verify() == []


def test_decimals_in_a_savepoint_have_the_sign_and_exponent_they_had_in_memory() -> None:
    checkpoint = Checkpoint({"d": value("decimal(10,2)")})
    given = ["-0.00", "0", "-0E+3", "-0.001", "1E+2", "-1.5"]
    checkpoint.commit({"d": {key: Decimal(text) for key, text in enumerate(given)}})
    held = state_of(saved(checkpoint))["d"]
    assert [str(held[key]) for key in range(len(given))] == [
        "0.00", "0.00", "0.00", "0.00", "100.00", "-1.50"
    ]  # fmt: skip
    assert list(map(str, checkpoint.model["d"].values())) == [str(held[k]) for k in range(6)]


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
    with pytest.raises(RestoreError, match="a checkpoint"):
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
