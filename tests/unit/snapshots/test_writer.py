"""Savepoints made of others and of tables, without Spark: every kind of state, kept or given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cairn import KeyGroupCountError, RestoreError, SavepointWriter, state
from cairn.cli import app
from cairn.snapshots import open_savepoint, write_savepoint
from cairn.snapshots.branch import branch
from cairn.snapshots.load import load_savepoint, open_job
from cairn.snapshots.tables import open_state
from cairn.storage.log import Log
from cairn.storage.notes import read_savepoint_notes
from cairn.storage.paths import SAVEPOINT_PATH, UNFINISHED_PATH
from cairn.storage.store import open_store
from cairn.testing import FaultyStore
from cairn.types.codec import codec
from tests.unit.snapshots.checkpoints import (
    UID,
    Checkpoint,
    listed,
    mapped,
    running,
    same_state,
    state_of,
    value,
)
from tests.unit.snapshots.writing import HELD, SHOP, check_groups, rows_of, table, totals, written
from tests.unit.types.typed_values import SCALARS, typed

# Kept as it was


def test_a_savepoint_that_is_only_copied_holds_the_same(saved: str, tmp_path: Path) -> None:
    old = open_savepoint(saved)
    new = written(SavepointWriter.of(None, saved), tmp_path)
    assert state_of(new) == HELD
    for name in ("offsets", "batch_id", "sources", "now_ms", "watermarks", "timers", "epoch"):
        assert getattr(new.info, name) == getattr(old.info, name)
    assert new.info.id != old.info.id
    assert [f.digest for f in new.info.files] == [f.digest for f in old.info.files]


def test_the_files_that_sources_have_read_are_taken_along(tmp_path: Path) -> None:
    checkpoint = Checkpoint(SHOP, offsets='v1\n{"batchTimestampMs":7}\n{"logOffset":0}')
    checkpoint.commit(HELD)
    url = checkpoint.store.url
    with pytest.raises(RestoreError, match="spark_checkpoint="):
        SavepointWriter.of(None, url).write(str(tmp_path / "lost"))
    assert open_store(str(tmp_path / "lost")).list() == []
    elsewhere = open_store("memory:")
    for store in (checkpoint.store, elsewhere):
        store.put("spark/000000000001/sources/0/0", f"v1\n{store.url}".encode())
    for spark_url in (None, elsewhere.url):
        writer = SavepointWriter.of(None, url, spark_checkpoint=spark_url)
        new = written(writer, tmp_path, f"from-{spark_url is None}")
        assert new.source_files() == {"0/0": f"v1\n{spark_url or url}".encode()}


@pytest.mark.parametrize("group_count", [1, 3, 8, 16, 100])
def test_all_state_of_keys_gets_other_key_groups(
    saved: str, tmp_path: Path, group_count: int
) -> None:
    writer = SavepointWriter.of(None, saved).max_parallelism(group_count)
    new = written(writer, tmp_path)
    assert new.info.max_parallelism == group_count
    assert state_of(new) == HELD


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_values_of_every_type_come_back_through_other_key_groups(data: st.DataObject) -> None:
    declared, values = data.draw(typed)
    held = data.draw(st.lists(values, max_size=5))
    states = {"v": value(declared), "l": listed(declared), "m": mapped("int", declared)}
    checkpoint = Checkpoint(states, group_count=4)
    checkpoint.commit(
        {"v": dict(enumerate(held)), "l": {0: held, 2: []}, "m": {1: dict(enumerate(held))}}
    )
    writer = SavepointWriter.of(None, checkpoint.store.url).max_parallelism(6)
    destination = open_store("memory:").url
    writer.write(destination)
    new = open_savepoint(destination)
    assert same_state(state_of(new), checkpoint.model)
    check_groups(new)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tables_of_every_type_are_put_as_they_are_read(data: st.DataObject) -> None:
    declared, values = data.draw(typed)
    key_type = data.draw(st.sampled_from(sorted(SCALARS)))
    some = st.lists(values.filter(lambda v: v is not None), min_size=1, max_size=4)
    held = data.draw(some)
    drawn = data.draw(st.lists(SCALARS[key_type], max_size=4))
    keys = list(dict.fromkeys(codec(key_type).normalise_key(key) for key in drawn))
    states = {"v": value(declared), "l": listed(declared), "m": mapped(key_type, declared)}
    checkpoint = Checkpoint(states, {"value": key_type}, group_count=4)
    checkpoint.commit(
        {
            "v": dict.fromkeys(keys, held[0]),
            "l": dict.fromkeys(keys, held),
            "m": {key: dict.fromkeys(keys, held[-1]) for key in keys},
        }
    )
    writer = SavepointWriter.empty("shop", max_parallelism=7)
    writer.declare(UID, keys=pa.schema([("value", codec(key_type).arrow)]), states={
        "v": state.Value(declared), "l": state.List(declared), "m": state.Map(key_type, declared),
    })  # fmt: skip
    with open_state(checkpoint.store.url) as source:
        for each in source.tables():
            rows = pa.Table.from_batches(each.batches(), schema=each.schema)
            writer.put(UID, each.state, rows)
    destination = open_store("memory:").url
    writer.write(destination)
    new = open_savepoint(destination)
    assert same_state(state_of(new), checkpoint.model)
    check_groups(new)


# Values


def test_one_value_is_corrected_and_all_others_are_kept(saved: str, tmp_path: Path) -> None:
    writer = SavepointWriter.of(None, saved)
    writer.patch(UID, "total", totals((2, 99.0), (7, 7.0), (None, 0.5)))
    new = written(writer, tmp_path)
    assert rows_of(new, "total") == {1: 1.5, 2: 99.0, 3: 3.5, 7: 7.0, None: 0.5}
    assert rows_of(new, "items") == HELD["items"] and rows_of(new, "seen") == HELD["seen"]
    assert state_of(open_savepoint(saved)) == HELD


def test_a_null_value_deletes(saved: str, tmp_path: Path) -> None:
    writer = SavepointWriter.of(None, saved)
    writer.patch(UID, "total", totals((2, None), (None, None), (77, None)))
    gone = table({"k": "bigint", "entry": "string", "value": "bigint"}, (1, "y", None))
    writer.patch(UID, "seen", gone)
    writer.patch(
        UID, "items", table({"k": "bigint", "position": "int", "value": "string"}, (2, None, None))
    )
    new = written(writer, tmp_path)
    assert rows_of(new, "total") == {1: 1.5, 3: 3.5}
    assert rows_of(new, "seen") == {1: {"x": 1}, 3: {"x": 3}}
    assert rows_of(new, "items") == {1: ["a", "b"]}


def test_the_last_correction_counts_and_what_is_put_replaces_all(
    saved: str, tmp_path: Path
) -> None:
    writer = SavepointWriter.of(None, saved)
    writer.patch(UID, "total", totals((1, 10.0), (2, 20.0))).patch(UID, "total", totals((1, 11.0)))
    assert rows_of(written(writer, tmp_path, "a"), "total") == HELD["total"] | {1: 11.0, 2: 20.0}
    writer.put(UID, "total", totals((5, 5.0), (6, 6.0))).patch(UID, "total", totals((6, None)))
    assert rows_of(written(writer, tmp_path, "b"), "total") == {5: 5.0}


def test_entries_of_maps_are_corrected_one_by_one(saved: str, tmp_path: Path) -> None:
    entries = {"key_group": "int", "k": "bigint", "entry": "string", "value": "bigint"}
    writer = SavepointWriter.of(None, saved)
    writer.patch(UID, "seen", table(entries, (77, 1, "y", 20), (77, 1, "z", 30), (77, 9, "x", 9)))
    new = written(writer.max_parallelism(5), tmp_path)
    assert rows_of(new, "seen") == {1: {"x": 1, "y": 20, "z": 30}, 3: {"x": 3}, 9: {"x": 9}}


def test_a_list_is_replaced_as_a_whole_in_the_order_of_positions(
    saved: str, tmp_path: Path
) -> None:
    items = {"k": "bigint", "position": "bigint", "value": "string"}
    writer = SavepointWriter.of(None, saved)
    writer.patch(UID, "items", table(items, (1, 7, "last"), (5, 0, "new"), (1, 2, "first")))
    new = written(writer, tmp_path)
    assert rows_of(new, "items") == {1: ["first", "last"], 2: ["c"], 5: ["new"]}


# The folder


def test_a_folder_that_holds_something_is_refused_and_left_alone(saved: str) -> None:
    before = [found.path for found in open_store(saved).list()]
    with pytest.raises(RestoreError, match="empty folder"):
        SavepointWriter.of(None, saved).write(saved)
    assert [found.path for found in open_store(saved).list()] == before


@pytest.mark.parametrize("seed", range(4))
def test_a_store_that_fails_now_and_then_gives_a_whole_savepoint_or_none(
    saved: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = open_store("memory:")
    faulty = FaultyStore(inner, seed=seed, fault_rate=0.15)
    monkeypatch.setattr("cairn.snapshots.writer.open_store", lambda url: faulty)
    writer = SavepointWriter.of(None, saved).max_parallelism(5)
    for _ in range(20):
        try:
            writer.write(inner.url)
        except Exception:
            assert not inner.exists(SAVEPOINT_PATH)
            inner.delete([found.path for found in inner.list()])
        else:
            assert state_of(open_savepoint(inner.url)) == HELD
            return
    pytest.fail("no attempt got through")


def test_a_savepoint_that_was_not_finished_is_refused(saved: str) -> None:
    inner = open_store("memory:")

    class Killed(BaseException): ...

    class Store(FaultyStore):
        def put(self, path: str, data: bytes) -> None:
            if path == SAVEPOINT_PATH:
                raise Killed
            super().put(path, data)

        def delete(self, paths: Any) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.snapshots.writer.open_store", lambda url: Store(inner))
        with pytest.raises(Killed):
            SavepointWriter.of(None, saved).write(inner.url)
    assert inner.exists(UNFINISHED_PATH)
    with pytest.raises(RestoreError, match="unfinished savepoint"):
        open_savepoint(inner.url)


def test_another_max_parallelism_is_refused_with_the_way_to_it(saved: str) -> None:
    with pytest.raises(KeyGroupCountError, match=r"SavepointWriter(.|\n)*max_parallelism\(16\)"):
        open_job(open_store("memory:"), "shop", 16, open_savepoint(saved))


def test_an_epoch_made_of_nothing_is_saved_branched_and_shown_like_any_other(
    tmp_path: Path,
) -> None:
    writer = SavepointWriter.empty("job", max_parallelism=4)
    writer.declare("op", keys="k long", states={"n": state.Value("long")})
    writer.put("op", "n", table({"k": "long", "value": "long"}, (1, 10), (2, 20)))
    made = written(writer, tmp_path)
    store = open_store(str(tmp_path / "checkpoint"))
    open_job(store, "job", 4, made)
    log = Log(store)
    term = log.take_over(host="", pid=0, wall_ms=0).term
    loaded = load_savepoint(
        made, store, number=2, term=term, parallelism=2, spark_folder="spark/000000000001-savepoint"
    )
    log.append(lambda number: loaded)
    write_savepoint(store, None, str(tmp_path / "again"))
    again = open_savepoint(str(tmp_path / "again"))
    assert state_of(again, "op") == state_of(made, "op") == {"n": {1: 10, 2: 20}}
    assert (again.info.batch_id, again.info.offsets) == (-1, "")
    branch(store, None, str(tmp_path / "branch"))
    newest = Log(open_store(str(tmp_path / "branch"))).newest_epoch()
    assert newest is not None and newest.spark.offsets == ""
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "checkpoint")])
    assert shown.exit_code == 0, shown.output


def test_the_savepoint_that_was_written_is_noted_and_no_other(tmp_path: Path) -> None:
    job = running(open_store(str(tmp_path / "ckpt")))
    info = SavepointWriter.of(None, str(tmp_path / "ckpt")).write(str(tmp_path / "saved"))
    (noted,) = read_savepoint_notes(job.store)
    url = open_store(str(tmp_path / "saved")).url
    assert (noted.id, noted.url, noted.bytes) == (info.id, url, info.bytes)
