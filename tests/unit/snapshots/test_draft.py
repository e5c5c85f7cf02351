"""What a savepoint is to hold: operators and states declared, moved, removed; and of what epoch."""

from __future__ import annotations

import datetime as dt
import gc
import operator
from pathlib import Path
from typing import Any

import pytest

from cairn import KeyedProcess, PlanError, RestoreError, SavepointWriter, StateNotFoundError, state
from cairn.functions import EVENT_TIMERS, PROCESSING_TIMERS
from cairn.storage.manifest import StateDecl
from cairn.storage.store import open_store
from tests.unit.snapshots.checkpoints import UID, Checkpoint, go_on, running, state_of
from tests.unit.snapshots.writing import HELD, rows_of, table, totals, written


class Fraud(KeyedProcess[Any]):
    spent = state.Reducing("double", operator.add)
    days = state.Map("date", "double")
    last = state.List("string")

    def process(self, row: Any, ctx: Any) -> Any: ...

    def on_timer(self, time_ms: int, ctx: Any) -> Any: ...


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


@pytest.mark.parametrize("epoch", [1, 99])
def test_a_savepoint_is_of_one_epoch(saved: str, epoch: int) -> None:
    with pytest.raises(PlanError, match="has one epoch"):
        SavepointWriter.of(None, saved, epoch=epoch)


def test_what_is_neither_savepoint_nor_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RestoreError, match="no such folder"):
        SavepointWriter.of(None, str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()


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
    with pytest.raises(PlanError, match="declared again"):
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


def test_declarations_of_a_savepoint_are_those_of_the_job(tmp_path: Path) -> None:
    writer = SavepointWriter.empty("fraud").declare("score", keys="user string", function=Fraud())
    states = written(writer, tmp_path).info.operators["score"].states
    assert states["spent"].decl == StateDecl(kind="reducing", type="double")
    assert states[EVENT_TIMERS].decl == StateDecl(kind="map", type="boolean", entry_type="bigint")


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


@pytest.mark.parametrize("groups", [8.5, "8", True, 0])
def test_a_number_of_key_groups_is_a_whole_one(groups: Any) -> None:
    with pytest.raises(PlanError, match="max_parallelism must be"):
        SavepointWriter.empty("shop", max_parallelism=groups)


@pytest.mark.parametrize("rows", [[(1, 2)], None, {"k": 1}])
def test_rows_that_are_no_table_are_refused(saved: str, rows: Any) -> None:
    with pytest.raises(PlanError, match="DataFrame or an Arrow table"):
        SavepointWriter.of(None, saved).put(UID, "total", rows)
