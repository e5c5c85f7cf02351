"""State as DataFrames: of any epoch, of every type, while the job goes on."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import cairn
from cairn import QueryError, StaleEpochError, StateNotFoundError
from cairn.snapshots import write_savepoint
from cairn.snapshots.tables import open_state
from cairn.storage.log import Log
from cairn.storage.store import open_store
from tests.backends import backend_name
from tests.marks import for_soak
from tests.simulation.test_rollback import model_of
from tests.simulation.world import Driver, World
from tests.spark.live import Live
from tests.spark.support import epochs
from tests.unit.snapshots.checkpoints import GONE, UID, Checkpoint, listed, mapped, value

STATES = {
    "text": value("string"),
    "day": value("date"),
    "at": value("timestamp"),
    "local": value("timestamp_ntz"),
    "span": value("interval day to second"),
    "price": value("decimal(38,10)"),
    "number": value("double"),
    "data": value("binary"),
    "flag": value("boolean"),
    "nested": value("struct<a:int NOT NULL,b:array<string>,m:map<string,bigint>>"),
    "thing": value("object"),
    "items": listed("struct<x:int>"),
    "last": mapped("date", "double"),
    "timers.event": mapped("bigint", "boolean"),
    "none": value("int"),
}
KEYS = {"user": "string", "value": "bigint"}
NOON = dt.datetime(2024, 1, 31, 12, 30, 0, 7, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """State of every type, in two epochs, with nulls in the keys."""
    folder = tmp_path_factory.mktemp("odd") / "ckpt"
    made = Checkpoint(STATES, KEYS, store=open_store(str(folder)), group_count=16)
    key, other, none = ("ada", 1), ("☃", 2), (None, None)
    made.commit(
        {
            "text": {key: "a", other: "", none: "☃"},
            "day": {key: dt.date(1, 1, 1)},
            "at": {key: NOON},
            "local": {key: NOON.replace(tzinfo=None)},
            "span": {key: dt.timedelta(microseconds=-1)},
            "price": {key: Decimal("-1234567890.0123456789")},
            "number": {key: math.nan, other: -0.0, none: math.inf},
            "data": {key: b"\x00\xff"},
            "flag": {key: True, other: False},
            "nested": {key: (1, ["x", None], {"q": 2**60}), other: (2, None, None)},
            "thing": {key: {1}},
            "items": {key: [(1,), (None,)], other: [(3,)]},
            "last": {key: {dt.date(2024, 1, 1): 0.5, dt.date(2024, 1, 2): None}},
            "timers.event": {key: {5000: True}, none: {6000: True}},
        }
    )
    made.commit({"text": {key: "b", other: GONE}, "last": {key: {dt.date(2024, 1, 1): GONE}}})
    return made


def rows_of(frame: Any) -> list[str]:
    """As text, in an order of their own: NaN is equal to itself there."""
    return sorted(repr(row.asDict(recursive=True)) for row in frame.collect())


def test_a_state_of_any_type_comes_as_typed_columns(spark: Any, odd: Checkpoint) -> None:
    frames = {name: cairn.read_state(spark, odd.store.url, UID, name) for name in STATES}
    assert frames["text"].columns == ["key_group", "user", "key_value", "value"]
    assert dict(frames["text"].dtypes)["key_group"] == "int"
    assert dict(frames["nested"].dtypes)["value"] == (
        "struct<a:int,b:array<string>,m:map<string,bigint>>"
    )
    assert dict(frames["timers.event"].dtypes)["time"] == "timestamp"
    with open_state(odd.store) as source:
        for name, frame in frames.items():
            found = frame.collect()
            expected = [r for b in source.table(UID, name).batches() for r in b.to_pylist()]
            assert len(found) == len(expected), name
            names = ("key_group", "user", "key_value")
            keys = {tuple(row[each] for each in names) for row in found}
            assert keys == {tuple(row[each] for each in names) for row in expected}, name

    def of(name: str, column: str = "value") -> list[Any]:
        return [r[column] for r in frames[name].where("user = 'ada'").collect()]

    assert of("text") == ["b"]
    assert of("day") == [dt.date(1, 1, 1)]
    seconds = frames["at"].selectExpr("unix_micros(value) m").first()["m"]
    assert seconds == round(NOON.timestamp() * 1_000_000)
    assert of("local") == [NOON.replace(tzinfo=None)]
    assert of("span") == [dt.timedelta(microseconds=-1)]
    assert of("price") == [Decimal("-1234567890.0123456789")]
    assert math.isnan(of("number")[0])
    assert bytes(of("data")[0]) == b"\x00\xff"
    assert of("nested")[0].asDict() == {"a": 1, "b": ["x", None], "m": {"q": 2**60}}
    items = frames["items"].where("user = 'ada'").orderBy("position").collect()
    assert [(row.position, row.value.x) for row in items] == [(0, 1), (1, None)]
    assert of("last", "entry") == [dt.date(2024, 1, 2)]
    assert frames["none"].count() == 0


def test_a_savepoint_and_an_older_epoch_are_read_too(
    spark: Any, odd: Checkpoint, tmp_path: Path
) -> None:
    write_savepoint(odd.store, None, str(tmp_path / "saved"))
    for name in ("text", "items", "last"):
        newest = cairn.read_state(spark, odd.store.url, UID, name)
        saved = cairn.read_state(spark, str(tmp_path / "saved"), UID, name)
        assert rows_of(saved) == rows_of(newest)
    newest_number = Log(odd.store).newest_epoch().number
    older = cairn.read_state(spark, odd.store.url, UID, "text", epoch=newest_number - 1)
    assert {row.value for row in older.collect()} == {"a", "", "☃"}


def test_what_differs_between_two_epochs_is_a_row_each(spark: Any, odd: Checkpoint) -> None:
    newest = Log(odd.store).newest_epoch().number
    diff = cairn.diff_state(spark, odd.store.url, UID, "text", newest - 1, newest)
    assert diff.columns == ["change", "user", "value", "before", "after"]
    assert {tuple(row) for row in diff.collect()} == {
        ("changed", "ada", 1, "a", "b"),
        ("removed", "☃", 2, "", None),
    }
    back = cairn.diff_state(spark, odd.store.url, UID, "text", newest, newest - 1)
    assert {row.change for row in back.collect()} == {"changed", "added"}
    entries = cairn.diff_state(spark, odd.store.url, UID, "last", newest - 1, newest)
    (row,) = entries.collect()
    assert (row.change, row.entry, row.before, row.after) == (
        "removed",
        dt.date(2024, 1, 1),
        0.5,
        None,
    )
    same = cairn.diff_state(spark, odd.store.url, UID, "items", newest - 1, newest)
    assert same.count() == 0
    with pytest.raises(StateNotFoundError, match="found:"):
        cairn.diff_state(spark, odd.store.url, UID, "nope", newest - 1, newest)


@pytest.mark.parametrize("backend", ["postgres", for_soak("redis"), for_soak("rocksdb")])
def test_state_in_a_database_and_what_differs_come_as_columns(
    spark: Any, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0")
    world = World(7, tmp_path, backend=backend_name(backend))
    world.store = open_store(str(tmp_path / "checkpoint"))
    driver = Driver(world, parallelism=2, retained_epochs=10)
    driver.start()
    for _ in range(5):
        driver.run_batch(9)
    new, *_, old = Log(world.store).lineage()
    after, before = (
        {key: held["count"] for key, held in keys.items() if "count" in held}
        for keys in (model_of(world, epoch).state()["ledger"] for epoch in (new, old))
    )
    url = world.store.url
    for epoch, counts in ((new, after), (old, before)):
        frame = cairn.read_state(spark, url, "ledger", "count", epoch=epoch.number)
        assert {row.account: row.value for row in frame.collect()} == counts
    diff = cairn.diff_state(spark, url, "ledger", "count", old.number, new.number)
    assert {(row.account, row.before, row.after) for row in diff.collect()} == {
        (key, before.get(key), after.get(key))
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
    }


def test_what_is_not_there_is_said_at_once(spark: Any, odd: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(StateNotFoundError, match=r"count\.text"):
        cairn.read_state(spark, odd.store.url, UID, "nope")
    with pytest.raises(StaleEpochError):
        cairn.read_state(spark, odd.store.url, UID, "text", epoch=99)
    write_savepoint(odd.store, None, str(tmp_path / "saved"))
    with pytest.raises(QueryError, match="one epoch only"):
        cairn.diff_state(spark, str(tmp_path / "saved"), UID, "text", 3, 3)


def test_a_frame_shows_its_epoch_however_long_the_job_goes_on(spark: Any, tmp_path: Path) -> None:
    with Live(spark, tmp_path, retained_epochs=1) as live:
        number = live.feed(2).number
        names = ("count", "last", "by_size")
        frames = {
            name: cairn.read_state(spark, str(live.checkpoint), "ledger", name) for name in names
        }
        before = live.state()["ledger"]
        live.feed(2)
        assert epochs(live.checkpoint)[-1].number > number + 1
        counts = {row.account: row.value for row in frames["count"].collect()}
        assert counts == before["count"]
        last = [(r.account, r.position, r.value) for r in frames["last"].collect()]
        assert sorted(last) == sorted(
            (key, at, item) for key, held in before["last"].items() for at, item in enumerate(held)
        )
        sizes = [(r.account, r.entry, r.value) for r in frames["by_size"].collect()]
        assert sorted(sizes) == sorted(
            (key, *entry) for key, held in before["by_size"].items() for entry in held.items()
        )
        newest = live.feed(1).number
        diff = cairn.diff_state(spark, str(live.checkpoint), "ledger", "count", number, newest)
        after = live.state()["ledger"]["count"]
        assert {(row.account, row.before, row.after) for row in diff.collect()} == {
            (key, before["count"].get(key), now)
            for key, now in after.items()
            if before["count"].get(key) != now
        }
        holds = open_store(str(live.checkpoint)).list("holds")
        assert len(holds) == len(names) + 2, "each frame holds its epoch for itself"
