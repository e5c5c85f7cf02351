"""Savepoints made of state that subtasks have, that all of them share, and that loops send back."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from msgspec.structs import replace

from cairn import PlanError, SavepointWriter, state
from cairn.key_groups import groups_of, key_groups
from cairn.snapshots import EpochReader, Savepoint
from cairn.snapshots.columns import StateColumns
from cairn.snapshots.destination import Destination, StateWriter
from cairn.snapshots.load import load_savepoint, open_job
from cairn.snapshots.savepoint import SavedOperator, make_saved_state
from cairn.storage.manifest import Scope
from cairn.storage.store import open_store
from tests.unit.slot.scoped_job import GROUP_COUNT, ScopedJob, feed
from tests.unit.snapshots.checkpoints import mapped
from tests.unit.snapshots.writing import table, written

# Of subtasks, and shared by them


@pytest.fixture
def scoped(tmp_path: Path) -> ScopedJob:
    job = ScopedJob(tmp_path)
    job.lead(2)
    feed(job, 0, 7)
    job.run([], [("low", 3), ("high", 9)])
    return job


def started(savepoint: Savepoint, folder: Path, parallelism: int) -> ScopedJob:
    """A job with state of every scope that goes on from a savepoint."""
    other = ScopedJob(folder)
    open_job(other.store, "scoped", GROUP_COUNT, savepoint)

    def load(coordinator: Any) -> None:
        term = coordinator.term
        given = {"number": term + 1, "term": term, "parallelism": parallelism}
        coordinator.adopt(load_savepoint(savepoint, other.store, spark_folder="spark", **given))

    other.lead(parallelism, adopt=load)
    feed(other, 0, 0)
    return other


@pytest.mark.parametrize("parallelism", [2, 3])
def test_lists_and_broadcast_state_are_corrected(
    scoped: ScopedJob, tmp_path: Path, parallelism: int
) -> None:
    before = scoped.lists("own")
    writer = SavepointWriter.of(None, scoped.store.url)
    items = {"subtask": "int", "position": "bigint", "value": "bigint"}
    writer.patch("notes", "own", table(items, (1, 0, 100), (1, 1, 101)))
    rules = {"key": "string", "value": "bigint"}
    writer.patch("alerts", "rules", table(rules, ("low", None), ("high", 10), ("new", 1)))
    job = started(written(writer, tmp_path), tmp_path, parallelism)
    assert [v for each in job.lists("own") for v in each] == [*before[0], 100, 101]
    assert job.rules() == {"high": 10, "new": 1}
    assert job.replicas() == [job.rules()] * parallelism


def test_items_that_all_subtasks_were_handed_stay_one_item(
    scoped: ScopedJob, tmp_path: Path
) -> None:
    scoped.coordinator.subtasks.rescale(3)
    feed(scoped, 0, 0)
    (united,) = {tuple(each) for each in scoped.lists("all")}
    writer = SavepointWriter.of(None, scoped.store.url)
    writer.patch("notes", "own", table({"subtask": "int", "position": "int", "value": "int"},
                                       (4, 0, 100)))  # fmt: skip
    new = written(writer, tmp_path)
    assert new.info.operators["notes"].parallelism == 5, "a list of the fifth subtask was given"
    job = started(new, tmp_path, 2)
    assert job.lists("all") == [list(united)] * 2


def test_lists_are_where_subtasks_look_for_them_among_other_key_groups(
    scoped: ScopedJob, tmp_path: Path
) -> None:
    writer = SavepointWriter.of(None, scoped.store.url).max_parallelism(100)
    new = written(writer, tmp_path)
    for batch in new.rows("notes", "own"):
        for group, subtask in zip(batch["group"], batch["key"], strict=True):
            assert group.as_py() == groups_of(subtask.as_py(), 2, 100).start
    back = written(SavepointWriter.of(None, new.url).max_parallelism(GROUP_COUNT), tmp_path, "b")
    job = started(back, tmp_path, 2)
    assert job.lists("own") == scoped.lists("own") and job.rules() == scoped.rules()


def test_fewer_key_groups_than_lists_are_refused(scoped: ScopedJob) -> None:
    with pytest.raises(PlanError, match="2 subtasks"):
        SavepointWriter.of(None, scoped.store.url).max_parallelism(1)


def test_lists_without_subtasks_are_handed_out_to_all(tmp_path: Path) -> None:
    writer = SavepointWriter.empty("scoped", max_parallelism=GROUP_COUNT)
    writer.declare("notes", states={
        "own": state.OperatorList("long"), "all": state.OperatorList("long", redistribute="union"),
    })  # fmt: skip
    writer.declare("alerts", keys="k long", states={
        "n": state.Value("long"), "rules": state.Broadcast("string", "long"),
    })  # fmt: skip
    items = table({"position": "int", "value": "int"}, *((n, n * 10) for n in range(6)))
    writer.put("notes", "own", items).put("notes", "all", items)
    writer.put("alerts", "rules", table({"key": "string", "value": "long"}, ("low", 3)))
    writer.put("alerts", "n", table({"k": "long", "value": "long"}, (1, 41)))
    job = started(written(writer, tmp_path), tmp_path, 2)
    assert job.lists("own") == [[0, 10, 20], [30, 40, 50]]
    assert job.lists("all") == [[0, 10, 20, 30, 40, 50]] * 2
    assert [row[3] for row in job.run([(1, 5)])] == ["low=3"]
    assert rows_of_epoch(job, "alerts", "n") == {1: 42}


def rows_of_epoch(job: ScopedJob, uid: str, name: str) -> dict[Any, Any]:
    with EpochReader(job.store, job.newest) as reader:
        batches = list(reader.rows(uid, name))
    return {
        k: v
        for b in batches
        for k, v in zip(*(b[c].to_pylist() for c in ("key", "value")), strict=True)
    }


# Loops


@pytest.mark.parametrize("keys", [("k",), ()])
def test_records_of_a_loop_go_where_their_operator_is(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    """Kept with all of their order, moved with the operator, and never written by hand."""
    scope: Scope = "keyed" if keys else "subtask"
    key_types = {"k": "bigint"} if keys else {"subtask": "int"}
    rows = [(k, n, {"k": k}) for n, k in enumerate([0, 1, 2, 1, 0])]
    decl = mapped("bigint", "struct<k:bigint>")
    columns = StateColumns("records", decl, key_types)
    owners = pa.array([k for k, _, _ in rows], columns.key_type)
    old = (
        key_groups(owners, columns.key_type, 8)
        if keys
        else [groups_of(k, 3, 8).start for k, _, _ in rows]
    )
    arrays = [pa.array(old, pa.int32()), owners, pa.array([n for _, n, _ in rows])]
    arrays.append(pa.array([v for _, _, v in rows], columns.schema.field("value").type))
    batch = pa.RecordBatch.from_arrays(arrays, schema=columns.schema)
    batch = batch.take(pc.sort_indices(batch["group"]))

    store = open_store(str(tmp_path / "old"))
    dest = Destination(store, "id", 3)
    writer = StateWriter(dest.put_file, "loop:op", columns, str(tmp_path))
    writer.write(batch)
    own = SavedOperator(uid="op", function_version="", key_types=key_types, states={}, scope=scope)
    loop = SavedOperator(
        uid="loop:op",
        function_version="",
        key_types=key_types,
        states={"records": make_saved_state(decl, writer.finish())},
        scope="feedback",
        parallelism=3,
    )
    made = SavepointWriter.empty("j", max_parallelism=8)
    info = made.write(str(tmp_path / "empty"))
    dest.finish(replace(info, operators={"op": own, "loop:op": loop}))

    edit = SavepointWriter.of(None, store.url).max_parallelism(20).rename("op", "moved")
    new = written(edit, tmp_path)
    (found,) = new.rows("loop:moved", "records")
    group_of = dict(zip(found["key"].to_pylist(), found["group"].to_pylist(), strict=True))
    if keys:
        groups = key_groups(pa.array([0, 1, 2]), pa.int64(), 20)
        assert group_of == dict(enumerate(groups.tolist()))
    else:
        assert group_of == {k: groups_of(k, 3, 20).start for k in range(3)}
    by_entry = sorted(zip(*(found[n].to_pylist() for n in ("entry", "key")), strict=True))
    assert by_entry == [(n, k) for k, n, _ in rows]
    with pytest.raises(PlanError, match="cannot be written"):
        edit.put("loop", "records", table({"k": "bigint"}))
    gone = SavepointWriter.of(None, store.url).remove("op")
    assert written(gone, tmp_path, "gone").info.operators == {}
    with pytest.raises(PlanError, match="subtasks") if not keys else nullcontext():
        SavepointWriter.of(None, store.url).max_parallelism(2)
