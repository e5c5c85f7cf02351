"""Rows of tables become rows of state: keys, times and stamps; what does not fit is refused."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn import QueryError, SavepointWriter, StateSchemaError, state
from cairn.functions import EVENT_TIMERS
from cairn.snapshots.shape import times
from cairn.snapshots.table_rows import one_batch
from cairn.storage.store import open_store
from tests.unit.slot.ttl_job import TtlJob
from tests.unit.snapshots.checkpoints import UID
from tests.unit.snapshots.writing import rows_of, table, written


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


def test_timers_of_a_key_are_replaced_or_deleted(saved: str, tmp_path: Path) -> None:
    times = {"k": "bigint", "time": "timestamp"}
    first, second = (dt.datetime(1970, 1, 1, 0, 0, at, tzinfo=dt.UTC) for at in (1, 2))
    writer = SavepointWriter.of(None, saved)
    writer.put(UID, EVENT_TIMERS, table(times, (1, first), (1, second), (2, first), (3, first)))
    writer.patch(UID, EVENT_TIMERS, table(times, (1, second), (2, None)))
    new = written(writer.max_parallelism(3), tmp_path)
    assert rows_of(new, EVENT_TIMERS) == {1: {2000: True}, 3: {1000: True}}
    assert new.info.timers is None


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


@pytest.mark.parametrize(
    ("name", "columns", "found"),
    [
        ("total", {"k": "bigint"}, "no column 'value'"),
        ("total", {"key": "bigint", "value": "double"}, "no column 'k'"),
        ("total", {"k": "string", "value": "double"}, "k string, declared as bigint"),
        ("total", {"k": "bigint", "value": "string"}, "value string, declared as double"),
        ("total", {"k": "bigint", "value": "bigint"}, "value bigint, declared as double"),
        ("total", {"k": "bigint", "value": "double", "v": "int"}, "an unknown column 'v'"),
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


def test_a_timer_that_is_never_reached_is_refused(tmp_path: Path) -> None:
    writer = SavepointWriter.empty("shop").declare(
        "op", keys="k long", states={"v": state.Value("long")}
    )
    at = pa.array([2**62], pa.timestamp("us", "UTC"))
    writer.put("op", EVENT_TIMERS, pa.table({"k": [1], "time": at}))
    with pytest.raises(StateSchemaError, match=r"out of range[\s\S]*9999"):
        writer.write(str(tmp_path / "saved"))


def test_rows_too_many_for_one_batch_are_refused() -> None:
    class Halves:
        nbytes = 3 << 30

        def combine_chunks(self) -> pa.Table:
            return pa.Table.from_batches([pa.record_batch({"a": [n]}) for n in (1, 2)])

    with pytest.raises(StateSchemaError, match=r"too large[\s\S]*Spark session"):
        one_batch(Halves())


def test_a_time_that_no_table_can_show_is_not_shown_as_another() -> None:
    assert times(pa.array([1, None])).cast(pa.int64()).to_pylist() == [1000, None]
    with pytest.raises(QueryError, match="out of the range"):
        times(pa.array([2**63 - 1]))
