"""A savepoint becomes the first epoch of another checkpoint, at any parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.driver.coordinator.ranges import ranges_for
from cairn.errors import CorruptFileError
from cairn.key_groups import groups_of
from cairn.snapshots import EpochReader, load_savepoint
from cairn.storage.log import Log
from cairn.storage.manifest import EMPTY_VERSION, next_version
from cairn.storage.store import open_store
from cairn.storage.verify import verify
from tests.unit.snapshots import savepoints
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
from tests.unit.snapshots.savepoints import OBJECTS, SPARK_FOLDER, load, saved
from tests.unit.types.typed_values import typed

STATES = {**OBJECTS, "never": value("date")}


def shop(**more: Any) -> Checkpoint:
    checkpoint = savepoints.shop(STATES, **more)
    checkpoint.commit({"o": {1: {2}}})
    return checkpoint


@pytest.mark.parametrize("parallelism", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("where", ["memory:", "folder"])
def test_at_another_parallelism_every_value_is_equal(
    parallelism: int, where: str, tmp_path: Path
) -> None:
    checkpoint = shop(parallelism=2)
    savepoint = saved(checkpoint, url=str(tmp_path / "s") if where == "folder" else where)
    store, epoch = load(savepoint, parallelism)
    with EpochReader(store, epoch) as reader:
        assert state_of(reader) == checkpoint.model
    report = verify(store)
    assert report.ok, report.damage


@pytest.mark.parametrize("parallelism", [1, 3, 8, 11])
def test_every_key_group_is_in_one_base_of_the_subtask_that_owns_it(parallelism: int) -> None:
    checkpoint = shop()
    _, epoch = load(saved(checkpoint), parallelism)
    entry = epoch.operators[UID]
    owned = [groups_of(subtask, parallelism, 8) for subtask in range(parallelism)]
    assert [range(r.first_group, r.first_group + r.group_count) for r in entry.ranges] == owned
    assert ranges_for(entry, parallelism, 8) == entry.ranges
    for part in entry.ranges:
        assert len(part.files) == (part.state_entries > 0)
        for ref in part.files:
            assert (ref.kind, ref.first_group, ref.group_count) == (
                "base",
                part.first_group,
                part.group_count,
            )
            assert part.version == next_version(EMPTY_VERSION, ref.id)
        if not part.files:
            assert part.version == EMPTY_VERSION
    assert sum(part.state_entries for part in entry.ranges) == 59 + 8 + 38 + 1
    assert sum(part.state_bytes for part in entry.ranges) > 0


def test_the_epoch_says_what_the_savepoint_says() -> None:
    checkpoint = shop()
    before = checkpoint.newest
    assert before is not None
    _, epoch = load(saved(checkpoint), 2)
    assert (epoch.number, epoch.parent, epoch.committables) == (2, None, {})
    for name in ("now_ms", "watermarks", "watermark_ms", "passed_ms", "seen_ms", "timers"):
        assert getattr(epoch, name) == getattr(before, name), name
    assert epoch.spark.folder == SPARK_FOLDER
    assert (epoch.spark.batch_id, epoch.spark.offsets, epoch.spark.sources) == (
        before.spark.batch_id,
        before.spark.offsets,
        before.spark.sources,
    )
    entry, old = epoch.operators[UID], before.operators[UID]
    assert (entry.states, entry.key_types) == (old.states, old.key_types)
    assert entry.function_version == old.function_version


def test_a_job_goes_on_from_there() -> None:
    checkpoint = shop()
    store, _ = load(saved(checkpoint), 2)
    again = Checkpoint(STATES, store=store, parallelism=3)
    again.model = checkpoint.model
    epoch = again.commit({"n": {4: GONE, 100: 1}, "items": {1: ["a", "b", "c"]}})
    with EpochReader(store, epoch) as reader:
        assert state_of(reader) == again.model
    twice = saved(again)
    assert state_of(twice) == again.model


def test_an_epoch_without_state_is_loaded() -> None:
    checkpoint = Checkpoint(STATES)
    checkpoint.commit()
    store, epoch = load(saved(checkpoint), 4)
    assert [part.version for part in epoch.operators[UID].ranges] == [EMPTY_VERSION] * 4
    assert store.list("state") == []


def test_pieces_larger_than_a_batch_are_loaded_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.snapshots.reader.CHUNK_ROWS", 200)
    monkeypatch.setattr("cairn.snapshots.savepoint._READ_ROWS", 7)
    monkeypatch.setattr("cairn.snapshots.destination.FILE_ROWS", 400)
    monkeypatch.setattr("cairn.snapshots.destination.ROW_GROUP_ROWS", 50)
    checkpoint = Checkpoint(STATES, group_count=32)
    checkpoint.commit(
        {"n": {k: k for k in range(3000)}, "items": {k: ["x"] * (k % 3) for k in range(500)}}
    )
    store, epoch = load(saved(checkpoint), 5)
    with EpochReader(store, epoch) as reader:
        assert state_of(reader) == checkpoint.model


def test_equal_savepoints_give_equal_bases_however_they_were_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = shop()
    versions = []
    for rows in (10, 100_000):
        monkeypatch.setattr("cairn.snapshots.destination.FILE_ROWS", rows)
        monkeypatch.setattr("cairn.snapshots.reader.CHUNK_ROWS", rows)
        _, epoch = load(saved(checkpoint), 2)
        versions.append([part.version for part in epoch.operators[UID].ranges])
    assert versions[0] == versions[1]


@pytest.mark.parametrize("how", ["missing", "truncated", "changed"])
@pytest.mark.parametrize("where", ["memory:", "folder"])
def test_a_damaged_savepoint_gives_no_epoch(how: str, where: str, tmp_path: Path) -> None:
    savepoint = saved(shop(), url=str(tmp_path / "s") if where == "folder" else where)
    (file,) = savepoint.info.operators[UID].states["last"].files
    data = savepoint.store.get(file.path)
    if how == "missing":
        savepoint.store.delete([file.path])
    else:
        spoiled = data[:-1] if how == "truncated" else data[:9] + b"\xff" + data[10:]
        savepoint.store.put(file.path, spoiled)
    store = open_store("memory:")
    with pytest.raises(CorruptFileError, match=file.path):
        load(savepoint, 2, store)
    assert Log(store).newest_epoch() is None


def test_progress_ends_with_everything_done() -> None:
    counted: list[tuple[int, int]] = []
    load_savepoint(
        saved(shop()),
        open_store("memory:"),
        number=2,
        term=1,
        parallelism=3,
        spark_folder=SPARK_FOLDER,
        wall_ms=0,
        progress=lambda done, total: counted.append((done, total)),
    )
    assert counted == [(3, 8), (6, 8), (8, 8)]


@given(st.data())
def test_values_of_every_type_are_loaded(data: st.DataObject) -> None:
    declared, values = data.draw(typed)
    held = data.draw(st.lists(values, max_size=4))
    checkpoint = Checkpoint(
        {"v": value(declared), "l": listed(declared), "m": mapped("int", declared)}, group_count=4
    )
    many = dict.fromkeys(range(6), held)
    checkpoint.commit(
        {
            "v": dict(enumerate(held)),
            "l": many,
            "m": {k: dict(enumerate([None, *held])) for k in many},
        }
    )
    store, epoch = load(saved(checkpoint), 3)
    with EpochReader(store, epoch) as reader:
        assert same_state(state_of(reader), checkpoint.model)
