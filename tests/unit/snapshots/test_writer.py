"""Savepoints made of others and of tables, without Spark: every kind of state, kept or given."""

from __future__ import annotations

import datetime as dt
import gc
import operator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from cairn import (
    KeyedProcess,
    KeyGroupCountError,
    PlanError,
    QueryError,
    RestoreError,
    SavepointWriter,
    StateNotFoundError,
    StateSchemaError,
    state,
)
from cairn.cli import app
from cairn.codec import codec
from cairn.functions import EVENT_TIMERS, PROCESSING_TIMERS
from cairn.plan.keygroups import groups_of, key_groups
from cairn.snapshots import EpochReader, Savepoint, open_savepoint, write_savepoint
from cairn.snapshots.branch import branch
from cairn.snapshots.columns import StateColumns
from cairn.snapshots.destination import Destination, StateWriter
from cairn.snapshots.load import load_savepoint, open_job
from cairn.snapshots.savepoint import SAVEPOINT_PATH, UNFINISHED_PATH, SavedOperator, saved_state
from cairn.snapshots.shape import times
from cairn.snapshots.table_rows import one_batch
from cairn.snapshots.tables import open_state
from cairn.storage.log import Log
from cairn.storage.manifest import Scope, StateDecl
from cairn.storage.saved import saved_points
from cairn.storage.store import open_store
from cairn.testing import FaultyStore
from tests.unit.slot.scoped_job import GROUP_COUNT, ScopedJob
from tests.unit.slot.test_operator_lists import feed
from tests.unit.slot.ttl_job import TtlJob
from tests.unit.snapshots.checkpoints import (
    UID,
    Checkpoint,
    listed,
    mapped,
    same_state,
    state_of,
    value,
)
from tests.unit.snapshots.test_reading import go_on, running
from tests.unit.test_codec import SCALARS, typed

SHOP = {"total": value("double"), "items": listed("string"), "seen": mapped("string", "bigint")}
HELD: dict[str, dict[Any, Any]] = {
    "total": {1: 1.5, 2: 2.5, 3: 3.5, None: 4.5},
    "items": {1: ["a", "b"], 2: ["c"]},
    "seen": {1: {"x": 1, "y": 2}, 3: {"x": 3}},
}


@pytest.fixture
def shop() -> Checkpoint:
    checkpoint = Checkpoint(SHOP)
    checkpoint.commit(HELD)
    return checkpoint


@pytest.fixture
def saved(shop: Checkpoint, tmp_path: Path) -> str:
    write_savepoint(shop.store, None, str(tmp_path / "old"))
    return str(tmp_path / "old")


def table(ddl: dict[str, Any], *rows: tuple[Any, ...]) -> pa.Table:
    types = {name: codec(type).arrow for name, type in ddl.items()}
    dicts = [dict(zip(ddl, row, strict=True)) for row in rows]
    return pa.Table.from_pylist(dicts, schema=pa.schema(list(types.items())))


def totals(*rows: tuple[Any, Any]) -> pa.Table:
    return table({"k": "bigint", "value": "double"}, *rows)


def written(writer: SavepointWriter, folder: Path, name: str = "new") -> Savepoint:
    writer.write(str(folder / name))
    savepoint = open_savepoint(str(folder / name))
    assert savepoint.verify() == []
    check_groups(savepoint)
    return savepoint


def check_groups(savepoint: Savepoint) -> None:
    """Every row is in the group of its key; files ascend, and split no group."""
    for uid, saved in savepoint.info.operators.items():
        for name, held in saved.states.items():
            columns = savepoint.columns(uid)[name]
            last = -1
            for file in held.files:
                assert last < file.first_group <= file.last_group
                last = file.last_group
            batches = list(savepoint.rows(uid, name))
            assert sum(batch.num_rows for batch in batches) == held.rows
            for batch in batches:
                if saved.scope == "keyed":
                    count = savepoint.info.max_parallelism
                    expected = key_groups(batch["key"], columns.key_type, count)
                    assert batch["group"].to_pylist() == expected.tolist()


def rows_of(savepoint: Savepoint, name: str, uid: str = UID) -> Any:
    return state_of(savepoint, uid)[name]


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


def test_an_epoch_of_a_checkpoint_is_edited_like_a_savepoint_of_it(
    shop: Checkpoint, tmp_path: Path
) -> None:
    epoch = shop.newest
    assert epoch is not None
    shop.commit({"total": {1: 100.0}})
    writer = SavepointWriter.of(None, shop.store.url, epoch=epoch.number)
    new = written(writer.patch(UID, "total", totals((2, 20.0))), tmp_path)
    assert rows_of(new, "total") == HELD["total"] | {2: 20.0}
    assert new.info.epoch == epoch.number
    newest = written(SavepointWriter.of(None, shop.store.url), tmp_path, "newest")
    assert rows_of(newest, "total") == HELD["total"] | {1: 100.0}
    assert {found.path.split("/")[0] for found in new.store.list()} == {"savepoint.json", "state"}


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


def test_keys_that_are_equal_to_a_slot_are_one_key(tmp_path: Path) -> None:
    writer = SavepointWriter.empty("f", max_parallelism=4)
    writer.declare("op", keys="x double, y string", states={"n": state.Value("int")})
    columns = {"x": "double", "y": "string", "value": "int"}
    writer.put("op", "n", table(columns, (-0.0, "a", 1), (float("nan"), None, 2)))
    writer.patch("op", "n", table(columns, (0.0, "a", 3), (-float("nan"), None, 4)))
    new = written(writer, tmp_path)
    (zero, nan) = sorted(rows_of(new, "n", "op").items(), key=lambda row: row[1])
    assert (str(zero[0].x), zero[1], nan[1]) == ("0.0", 3, 4)
    again = [(0.0, "a", 3), (-0.0, "a", 4)]
    with pytest.raises(StateSchemaError, match="several times"):
        writer.put("op", "n", table(columns, *again)).write(str(tmp_path / "twice"))


# Operators


def test_state_moves_to_another_operator(saved: str, tmp_path: Path) -> None:
    writer = SavepointWriter.of(None, saved).rename(UID, "tally").remove("tally", "items")
    new = written(writer, tmp_path)
    assert list(new.info.operators) == ["tally"]
    assert state_of(new, "tally") == {name: HELD[name] for name in ("total", "seen")}
    assert new.info.timers is None, "who has which timers is to be found out"


def test_an_operator_is_left_out(saved: str, tmp_path: Path) -> None:
    assert written(SavepointWriter.of(None, saved).remove(UID), tmp_path).info.operators == {}


def test_a_state_that_is_declared_beside_others_leaves_them_alone(
    saved: str, tmp_path: Path
) -> None:
    writer = SavepointWriter.of(None, saved)
    writer.declare(UID, states={"more": state.Value("int"), "total": state.Value("double")})
    writer.put(UID, "more", table({"k": "bigint", "value": "int"}, (1, 1)))
    assert state_of(written(writer, tmp_path)) == HELD | {"more": {1: 1}}


def test_an_operator_gets_other_keys(saved: str, tmp_path: Path) -> None:
    writer = SavepointWriter.of(None, saved).remove(UID, "items").remove(UID, "seen")
    writer.declare(UID, keys="name string", states={"total": state.Value("double")})
    with pytest.raises(PlanError, match="declared anew"):
        writer.write(str(tmp_path / "early"))
    with pytest.raises(PlanError, match="put"):
        writer.patch(UID, "total", table({"name": "string", "value": "double"}))
    writer.put(UID, "total", table({"name": "string", "value": "double"}, ("one", 1.5)))
    new = written(writer, tmp_path)
    assert new.info.operators[UID].key_types == {"name": "string"}
    assert rows_of(new, "total") == {"one": 1.5}


def test_state_with_other_keys_is_not_lost_without_a_word(saved: str) -> None:
    with pytest.raises(PlanError, match=r"'items'(.|\n)*remove\('count', 'items'\)"):
        SavepointWriter.of(None, saved).declare(
            UID, keys="name string", states={"total": state.Value("double")}
        )


def test_unknown_names_are_refused_with_those_that_are_known(saved: str) -> None:
    writer = SavepointWriter.of(None, saved)
    for wrong in (
        lambda: writer.put("nobody", "total", totals()),
        lambda: writer.remove("nobody"),
        lambda: writer.rename("nobody", "x"),
    ):
        with pytest.raises(StateNotFoundError, match=f"'nobody'(.|\n)*{UID}"):
            wrong()
    with pytest.raises(StateNotFoundError, match=r"'sum'(.|\n)*total, items, seen"):
        writer.patch(UID, "sum", totals())
    with pytest.raises(PlanError, match="cannot be called"):
        writer.rename(UID, UID)


# From nothing


class Fraud(KeyedProcess[Any]):
    spent = state.Reducing("double", operator.add)
    days = state.Map("date", "double")
    last = state.List("string")

    def process(self, row: Any, ctx: Any) -> Any: ...

    def on_timer(self, time_ms: int, ctx: Any) -> Any: ...


def test_state_is_made_of_tables_alone(tmp_path: Path) -> None:
    writer = SavepointWriter.empty("fraud", max_parallelism=16)
    writer.declare("score", keys="user string", function=Fraud)
    writer.put("score", "spent", table({"user": "string", "value": "double"}, ("a", 1.0)))
    day = dt.date(2026, 1, 2)
    days = {"user": "string", "entry": "date", "value": "double"}
    writer.put("score", "days", table(days, ("a", day, 1.0)))
    at = dt.datetime(1970, 1, 1, 0, 0, 1, 500, tzinfo=dt.UTC)
    times = table({"user": "string", "time": "timestamp"}, ("a", at), ("a", at), ("b", at))
    writer.put("score", EVENT_TIMERS, times)
    new = written(writer, tmp_path)
    held = state_of(new, "score")
    assert held == {
        "spent": {"a": 1.0},
        "days": {"a": {day: 1.0}},
        "last": {},
        # Not earlier than it was said; and set twice it is one.
        EVENT_TIMERS: {"a": {1001: True}, "b": {1001: True}},
        PROCESSING_TIMERS: {},
    }
    info = new.info
    assert (info.job, info.max_parallelism, info.offsets, info.batch_id) == ("fraud", 16, "", -1)
    assert info.timers is None and info.sources == [] and info.now_ms > 1_700_000_000_000


def test_timers_of_a_key_are_replaced_or_deleted(saved: str, tmp_path: Path) -> None:
    times = {"k": "bigint", "time": "timestamp"}
    first, second = (dt.datetime(1970, 1, 1, 0, 0, at, tzinfo=dt.UTC) for at in (1, 2))
    writer = SavepointWriter.of(None, saved)
    writer.put(UID, EVENT_TIMERS, table(times, (1, first), (1, second), (2, first), (3, first)))
    writer.patch(UID, EVENT_TIMERS, table(times, (1, second), (2, None)))
    new = written(writer.max_parallelism(3), tmp_path)
    assert rows_of(new, EVENT_TIMERS) == {1: {2000: True}, 3: {1000: True}}
    assert new.info.timers is None


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
    scoped.coordinator.rescale(3)
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
        states={"records": saved_state(decl, writer.finish())},
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


# Time


def test_stamps_are_kept_and_given(tmp_path: Path) -> None:
    job = TtlJob(tmp_path, "1 minute")
    job.run((1, 10), (2, 20))
    job.run((1, 11), after_ms=1000)
    old_ms, new_ms = 1_000_000, 1_001_000
    at = dt.datetime.fromtimestamp(1000.5, dt.UTC)
    writer = SavepointWriter.of(None, job.store.url).max_parallelism(16)
    writer.patch("keep", "value", table({"k": "long", "value": "long"}, (3, 30)))
    entries = {"k": "long", "entry": "string", "value": "long", "written_at": "timestamp"}
    writer.patch("keep", "entries", table(entries, (2, "z", 1, at), (2, "y", 1, None)))
    items = {"k": "long", "position": "long", "value": "long", "written_at": "timestamp"}
    writer.patch("keep", "items", table(items, (2, 0, 5, at), (2, 1, 6, None)))
    new = written(writer, tmp_path)

    def stamps(name: str) -> dict[Any, Any]:
        return {
            tuple(row[n] for n in ("key", "entry") if n in row): row["at"]
            for batch in new.rows("keep", name)
            for row in batch.to_pylist()
        }

    assert new.info.now_ms == new_ms
    assert stamps("value") == {(1,): new_ms, (2,): old_ms, (3,): new_ms}
    assert stamps("entries") == {
        (1, "10"): old_ms, (1, "11"): new_ms, (2, "20"): old_ms, (2, "z"): 1_000_500,
        (2, "y"): new_ms,
    }  # fmt: skip
    assert stamps("items") == {(1,): [old_ms, new_ms], (2,): [1_000_500, new_ms]}


def test_what_expires_by_event_time_needs_a_watermark_or_to_say_when(tmp_path: Path) -> None:
    writer = SavepointWriter.empty("job").declare(
        "op", keys="k long", states={"v": state.Value("int", ttl=state.TTL("1 day", clock="event"))}
    )
    plain = {"k": "long", "value": "int"}
    with pytest.raises(StateSchemaError, match="written_at"):
        writer.put("op", "v", table(plain, (1, 1)))
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    writer.put("op", "v", table({**plain, "written_at": "timestamp"}, (1, 1, at), (2, 2, None)))
    with pytest.raises(StateSchemaError, match="written_at"):
        writer.write(str(tmp_path / "s"))


# What does not fit


@pytest.mark.parametrize(
    ("name", "columns", "found"),
    [
        ("total", {"k": "bigint"}, "no column 'value'"),
        ("total", {"key": "bigint", "value": "double"}, "no column 'k'"),
        ("total", {"k": "string", "value": "double"}, "k string, where it is bigint"),
        ("total", {"k": "bigint", "value": "string"}, "value string, where it is double"),
        ("total", {"k": "bigint", "value": "bigint"}, "value bigint, where it is double"),
        ("total", {"k": "bigint", "value": "double", "v": "int"}, "a column 'v'"),
        ("total", {"k": "bigint", "value": "double", "written_at": "timestamp"}, "'written_at'"),
        ("items", {"k": "bigint", "value": "string"}, "no column 'position'"),
        ("seen", {"k": "bigint", "value": "bigint"}, "no column 'entry'"),
        (EVENT_TIMERS, {"k": "bigint", "time": "bigint"}, "time bigint"),
    ],
)
def test_columns_that_do_not_fit_are_refused_at_once(
    saved: str, name: str, columns: dict[str, str], found: str
) -> None:
    for method in ("put", "patch"):
        with pytest.raises(StateSchemaError) as error:
            getattr(SavepointWriter.of(None, saved), method)(UID, name, table(columns))
        assert found in str(error.value)
        assert "expected: k bigint" in str(error.value) and "next: " in str(error.value)


LIST = {"k": "bigint", "position": "bigint", "value": "string"}
MAP = {"k": "bigint", "entry": "string", "value": "bigint"}


@pytest.mark.parametrize(
    ("name", "columns", "rows", "found"),
    [
        ("total", {"k": "bigint", "value": "double"}, [(1, 1.0), (1, 1.0)], "1 several times"),
        ("total", {"k": "bigint", "value": "double"}, [(1, None)], "no value at 1"),
        ("seen", MAP, [(1, "a", 1), (1, "a", 2)], "several times"),
        ("seen", MAP, [(1, None, 1)], "a null in column 'entry'"),
        ("items", LIST, [(1, 0, "a"), (1, 0, "b")], "position 0 of 1"),
        ("items", LIST, [(1, None, "a")], "position None of 1"),
        ("items", LIST, [(1, 0, None)], "no value at 1"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_left(
    saved: str, tmp_path: Path, name: str, columns: Any, rows: Any, found: str
) -> None:
    writer = SavepointWriter.of(None, saved).put(UID, name, table(columns, *rows))
    with pytest.raises(StateSchemaError) as error:
        writer.write(str(tmp_path / "new"))
    assert found in str(error.value)
    assert open_store(str(tmp_path / "new")).list() == []
    writer.put(UID, name, table(columns))
    assert rows_of(written(writer, tmp_path), name) == {}


def test_a_null_where_the_type_has_none_is_refused(tmp_path: Path) -> None:
    writer = SavepointWriter.empty("j").declare(
        "op", keys="k long", states={"v": state.Value("struct<a:int NOT NULL,b:string>")}
    )
    columns = {"k": "long", "value": "struct<a:int,b:string>"}
    writer.put("op", "v", table(columns, (1, {"a": 1, "b": None}), (2, {"a": None, "b": "x"})))
    with pytest.raises(StateSchemaError, match="NOT NULL"):
        writer.write(str(tmp_path / "a"))
    new = written(writer.put("op", "v", table(columns, (1, {"a": 1, "b": None}))), tmp_path)
    assert rows_of(new, "v", "op") == {1: (1, None)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": "k map<string,int>", "states": {"v": state.Value("int")}},
        {"keys": "k long", "states": {"v": state.OperatorList("int")}},
        {"states": {"v": state.Value("int")}},
        {"keys": "k long", "states": {"v": int}},
        {"keys": "k long", "function": int},
        {"keys": "k long", "function": type("F", (Fraud,), {"__init__": lambda self, x: None})},
        {"keys": "", "states": {"v": state.Value("int")}},
    ],
)  # fmt: skip
def test_declarations_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        SavepointWriter.empty("job").declare("op", **wrong)


@pytest.mark.parametrize("rows", [[(1, 2)], None, {"k": 1}])
def test_rows_that_are_no_table_are_refused(saved: str, rows: Any) -> None:
    with pytest.raises(PlanError, match="DataFrame or an Arrow table"):
        SavepointWriter.of(None, saved).put(UID, "total", rows)


# The folder


def test_a_folder_that_holds_something_is_refused_and_left_alone(saved: str) -> None:
    before = [found.path for found in open_store(saved).list()]
    with pytest.raises(RestoreError, match="empty folder"):
        SavepointWriter.of(None, saved).write(saved)
    assert [found.path for found in open_store(saved).list()] == before


@pytest.mark.parametrize("epoch", [1, 99])
def test_a_savepoint_is_of_one_epoch(saved: str, epoch: int) -> None:
    with pytest.raises(PlanError, match="of one epoch"):
        SavepointWriter.of(None, saved, epoch=epoch)


def test_what_is_neither_savepoint_nor_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RestoreError, match="no such folder"):
        SavepointWriter.of(None, str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()


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


def test_declarations_of_a_savepoint_are_those_of_the_job(tmp_path: Path) -> None:
    writer = SavepointWriter.empty("fraud").declare("score", keys="user string", function=Fraud())
    states = written(writer, tmp_path).info.operators["score"].states
    assert states["spent"].decl == StateDecl(kind="reducing", type="double")
    assert states[EVENT_TIMERS].decl == StateDecl(kind="map", type="boolean", entry_type="bigint")


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


def test_the_epoch_of_a_running_job_is_held_until_the_writer_is_gone(tmp_path: Path) -> None:
    job = running(open_store(str(tmp_path / "ckpt")))
    writer = SavepointWriter.of(None, str(tmp_path / "ckpt"))
    epoch = job.log.last
    go_on(job, 30)
    for name in ("once", "again"):
        assert writer.write(str(tmp_path / name)).epoch == epoch
    del writer
    gc.collect()
    assert not job.store.list("holds")


def test_the_savepoint_that_was_written_is_noted_and_no_other(tmp_path: Path) -> None:
    job = running(open_store(str(tmp_path / "ckpt")))
    info = SavepointWriter.of(None, str(tmp_path / "ckpt")).write(str(tmp_path / "saved"))
    (noted,) = saved_points(job.store)
    url = open_store(str(tmp_path / "saved")).url
    assert (noted["id"], noted["url"], noted["bytes"]) == (info.id, url, info.bytes)


@pytest.mark.parametrize("groups", [8.5, "8", True, 0])
def test_a_number_of_key_groups_is_a_whole_one(groups: Any) -> None:
    with pytest.raises(PlanError, match="max_parallelism must be"):
        SavepointWriter.empty("shop", max_parallelism=groups)


@pytest.mark.parametrize(
    ("uid", "keys", "name"),
    [
        ("a:b", "k long", "v"),
        ("", "k long", "v"),
        ("a/b", "k long", "v"),
        ("op", "a long, A long", "v"),
        ("op", "k long", "timers.event"),
        ("op", "k long", ""),
    ],
)
def test_what_no_job_can_have_is_not_declared(uid: str, keys: str, name: str) -> None:
    writer = SavepointWriter.empty("shop")
    with pytest.raises(PlanError):
        writer.declare(uid, keys=keys, states={name: state.Value("long")})


def test_a_timer_that_is_never_reached_is_refused(tmp_path: Path) -> None:
    writer = SavepointWriter.empty("shop").declare(
        "op", keys="k long", states={"v": state.Value("long")}
    )
    at = pa.array([2**62], pa.timestamp("us", "UTC"))
    writer.put("op", EVENT_TIMERS, pa.table({"k": [1], "time": at}))
    with pytest.raises(StateSchemaError, match=r"never reached[\s\S]*9999"):
        writer.write(str(tmp_path / "saved"))


def test_rows_too_many_for_one_batch_are_refused() -> None:
    class Halves:
        nbytes = 3 << 30

        def combine_chunks(self) -> pa.Table:
            return pa.Table.from_batches([pa.record_batch({"a": [n]}) for n in (1, 2)])

    with pytest.raises(StateSchemaError, match=r"too much[\s\S]*Spark session"):
        one_batch(Halves())


def test_a_time_that_no_table_can_show_is_not_shown_as_another() -> None:
    assert times(pa.array([1, None])).cast(pa.int64()).to_pylist() == [1000, None]
    with pytest.raises(QueryError, match="beyond all"):
        times(pa.array([2**63 - 1]))


def test_after_rows_that_are_refused_no_folder_of_state_is_left(tmp_path: Path) -> None:
    dest = Destination(open_store(str(tmp_path)), "an-id", 1)
    dest.store.put("state/op/v/part.parquet", b"by an executor")
    dest.undo()
    assert not list(tmp_path.iterdir())
