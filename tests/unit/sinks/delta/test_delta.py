"""What is special to Delta tables; the rest is the contract of all sinks."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import logging
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake
from deltalake.exceptions import CommitFailedError
from hypothesis import given
from hypothesis import strategies as st

from cairn.errors import CommitError, EpochError, PlanError
from cairn.sinks import Delta
from cairn.sinks.base import Committable, SinkContext, attempt_of
from cairn.sinks.delta.files import statistics
from cairn.testing import told_of_passes
from cairn.types import parse_schema
from tests.s3 import s3_server

KS = parse_schema("k long, s string")
MERGE = {"mode": "merge", "key": "k"}
MODES = pytest.mark.parametrize("settings", [{}, MERGE], ids=["append", "merge"])


def opened(path: Any, schema: pa.Schema = KS, **settings: Any) -> Delta:
    sink = Delta(str(path), **settings)
    sink.open(SinkContext("job", "j", "out", schema))
    return sink


def prepared(sink: Delta, epoch: int, *rows: Any, **where: Any) -> Committable:
    writer = sink.writer(epoch, where.get("subtask", 0), where.get("attempt", 0))
    schema = sink.context.schema
    named = [dict(zip(schema.names, row, strict=True)) for row in rows]
    writer.write(pa.RecordBatch.from_pylist(named, schema))
    committable = writer.prepare()
    assert committable is not None
    return committable


def published(sink: Delta, epoch: int, *rows: Any) -> None:
    sink.commit(epoch, [prepared(sink, epoch, *rows)])


def table(path: Any) -> pa.Table:
    return pa.table(DeltaTable(str(path)).to_pyarrow_table())


def seen(path: Any) -> list[tuple[Any, ...]]:
    return sorted((tuple(row.values()) for row in table(path).to_pylist()), key=str)


# Types


def test_rows_of_every_type_come_back_equal(tmp_path: Path) -> None:
    schema = parse_schema(
        "b boolean, y byte, h short, i int, l long, f float, d double, m decimal(20,4), "
        "t string, x binary, day date, ts timestamp, ntz timestamp_ntz, "
        "n struct<a:int,b:array<string>>, p map<string,long>"
    )
    at = dt.datetime(2026, 1, 2, 3, 4, 5, 678901)
    row = (
        True, -1, -2, -3, -4, 0.5, float("inf"), decimal.Decimal("-12.3400"), "é", b"\x00\xff",
        dt.date(1969, 1, 1), at.replace(tzinfo=dt.UTC), at,
        {"a": 1, "b": ["x", None]}, [("k", 1)],
    )  # fmt: skip
    nothing = (None,) * len(row)
    sink = opened(tmp_path, schema)
    published(sink, 2, row, nothing)
    found = table(tmp_path)
    assert [tuple(r.values()) for r in found.to_pylist()] == [row, nothing]
    assert found.schema.equals(schema)
    merged = opened(tmp_path / "merged", schema, mode="merge", key="l")
    published(merged, 2, row)
    assert [tuple(r.values()) for r in table(tmp_path / "merged").to_pylist()] == [row]


def test_partitions_are_read_back_from_the_log(tmp_path: Path) -> None:
    schema = parse_schema("k long, day date, s string, i int, b boolean")
    values = [
        (dt.date(2026, 1, 1), "a/b=c %é", -7, True),
        (dt.date(2026, 1, 2), None, None, False),
        (None, "x", 0, None),
    ]
    rows = [(k, *values[k % 3]) for k in range(30)]
    sink = opened(tmp_path, schema, partition_by=["day", "s", "i", "b"])
    committable = prepared(sink, 2, *rows)
    sink.commit(2, [committable])
    assert seen(tmp_path) == sorted(rows, key=str)
    assert len(committable["files"]) == 3
    read = DeltaTable(str(tmp_path)).to_pyarrow_table(filters=[("day", "=", dt.date(2026, 1, 1))])
    assert sorted(pa.table(read)["k"].to_pylist()) == list(range(0, 30, 3))


def test_many_values_of_many_partition_columns_are_kept_apart(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(20)]
    schema = parse_schema("k long, " + ", ".join(f"{name} long" for name in names))
    rows = [(k, *(k * (i + 1) for i in range(20))) for k in range(20)]
    published(opened(tmp_path, schema, partition_by=names), 2, *rows)
    assert seen(tmp_path) == sorted(rows, key=str)


def test_an_empty_text_as_a_partition_is_null_as_delta_has_it(tmp_path: Path) -> None:
    published(opened(tmp_path, partition_by="s"), 2, (1, ""))
    assert seen(tmp_path) == [(1, None)]


@given(st.lists(st.one_of(st.none(), st.datetimes(dt.datetime(1900, 1, 1)))))
def test_the_bounds_of_a_file_hold_for_times_of_microseconds(values: list[Any]) -> None:
    rows = pa.table({"t": pa.array(values, pa.timestamp("us"))})
    found = json.loads(statistics(rows))
    times = [value for value in values if value is not None]
    assert found["nullCount"]["t"] == len(values) - len(times)
    if times:
        low, high = (found[name]["t"] for name in ("minValues", "maxValues"))
        assert dt.datetime.fromisoformat(low) <= min(times)
        assert dt.datetime.fromisoformat(high) >= max(times)


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_times_and_dates_at_the_end_of_the_calendar_and_beyond_have_no_bounds(
    tmp_path: Path, zone: str | None
) -> None:
    beyond = pa.array([2**31 - 1], pa.int32()).cast(pa.date32())
    last = pa.array([dt.datetime.max], pa.timestamp("us")).cast(pa.timestamp("us", zone))
    rows = pa.table({"t": last, "day": beyond})
    found = json.loads(statistics(rows))
    assert found["minValues"] == found["maxValues"] == {}
    assert found["nullCount"] == {"t": 0, "day": 0}
    sink = opened(tmp_path, rows.schema)
    writer = sink.writer(2, 0, 0)
    writer.write(rows.to_batches()[0])
    sink.commit(2, [writer.prepare()])
    assert table(tmp_path).equals(rows)


def test_a_partition_of_a_date_that_no_reader_can_read_is_refused_in_the_slot(
    tmp_path: Path,
) -> None:
    sink = opened(tmp_path, parse_schema("k long, day date"), partition_by="day")
    day = pa.array([2932897 + 30], pa.int32()).cast(pa.date32())
    writer = sink.writer(2, 0, 0)
    writer.write(pa.RecordBatch.from_arrays([pa.array([1]), day], schema=sink.context.schema))
    with pytest.raises(EpochError, match="10000-01-31 is no value of a partition"):
        writer.prepare()


def test_values_that_json_cannot_hold_have_no_bounds() -> None:
    rows = pa.table(
        {"nan": [1.0, float("nan")], "inf": [1.0, float("inf")], "long": ["a", "b" * 99]}
    )
    found = json.loads(statistics(rows))
    assert found["numRecords"] == 2 and found["minValues"] == found["maxValues"] == {}


def test_a_filter_finds_rows_by_the_bounds_of_files(tmp_path: Path) -> None:
    schema = parse_schema("k long, ts timestamp, s string")
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    rows = [(k, start + dt.timedelta(microseconds=1001 * k), f"s{k}") for k in range(20)]
    sink = opened(tmp_path, schema)
    for epoch, row in enumerate(rows):
        published(sink, epoch, row)
    dataset = DeltaTable(str(tmp_path)).to_pyarrow_dataset()
    for k, ts, s in rows:
        for column, value in (("k", k), ("ts", ts), ("s", s)):
            found = dataset.to_table(filter=pa.compute.field(column) == pa.scalar(value))
            assert found["k"].to_pylist() == [k]


# Merging


def test_a_merge_changes_the_stream_s_columns_and_no_others(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"k": [1, 2], "s": ["a", "b"], "note": ["n", "m"]}))
    published(opened(tmp_path, **MERGE), 2, (2, "new"), (3, "c"))
    assert seen(tmp_path) == [(1, "a", "n"), (2, "new", "m"), (3, "c", None)]


def test_the_last_row_of_a_key_wins_whatever_the_order_of_committables(tmp_path: Path) -> None:
    sink = opened(tmp_path, buffer_bytes_max=1, **MERGE)
    late = prepared(sink, 2, (1, "later"), (1, "last"), attempt=attempt_of(0, 1))
    early = prepared(sink, 2, (1, "first"), (2, "x"), attempt=attempt_of(1, 0))
    sink.commit(2, [late, early])
    assert seen(tmp_path) == [(1, "last"), (2, "x")]


def test_keys_may_be_several_columns_with_odd_names(tmp_path: Path) -> None:
    schema = pa.schema([("A key", pa.int64()), ('b"é', pa.string()), ("Value", pa.int64())])
    sink = opened(tmp_path, schema, mode="merge", key=["A key", 'b"é'])
    published(sink, 2, (1, "x", 1), (1, "y", 1))
    published(sink, 3, (1, "y", 2))
    assert seen(tmp_path) == [(1, "x", 1), (1, "y", 2)]


def test_rows_that_are_all_key_are_kept_once(tmp_path: Path) -> None:
    sink = opened(tmp_path, mode="merge", key=["k", "s"])
    published(sink, 2, (1, "x"))
    published(sink, 3, (1, "x"), (2, "x"))
    assert seen(tmp_path) == [(1, "x"), (2, "x")]


def test_a_merge_that_changes_nothing_is_marked_all_the_same(tmp_path: Path) -> None:
    """So it can be committed again, after what was prepared is gone."""
    sink = opened(tmp_path, mode="merge", key=["k", "s"])
    published(sink, 2, (1, "x"))
    committables = [prepared(sink, 3, (1, "x"))]
    sink.commit(3, committables)
    version = DeltaTable(str(tmp_path)).version()
    sink.commit(3, committables)
    opened(tmp_path, mode="merge", key=["k", "s"]).commit(3, committables)
    assert DeltaTable(str(tmp_path)).version() == version
    assert seen(tmp_path) == [(1, "x")]
    assert sink.store.list(f"_cairn/{sink.home}/") == []


def test_a_merge_that_changes_nothing_is_not_marked_when_a_new_driver_has_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = opened(tmp_path, mode="merge", key=["k", "s"])
    new = opened(tmp_path, mode="merge", key=["k", "s"])
    published(old, 2, (1, "x"))
    committables = [prepared(old, 3, (1, "x"))]
    publish = old._publish

    def overtaken(*given: Any) -> None:
        publish(*given)
        new.recover(4)

    monkeypatch.setattr(old, "_publish", overtaken)
    with pytest.raises(CommitError, match="cleared"):
        old.commit(3, committables)
    published(new, 5, (2, "y"))
    assert seen(tmp_path) == [(1, "x"), (2, "y")]


def test_a_row_without_its_key_is_refused_in_the_slot(tmp_path: Path) -> None:
    with pytest.raises(EpochError, match="column 'k' is in the key"):
        prepared(opened(tmp_path, **MERGE), 2, (1, "x"), (None, "y"))


def test_merged_partitions_stay_where_they_belong(tmp_path: Path) -> None:
    sink = opened(tmp_path, partition_by="s", **MERGE)
    published(sink, 2, (1, "x"), (2, "y"))
    published(sink, 3, (1, "y"))
    assert seen(tmp_path) == [(1, "y"), (2, "y")]


# Commits


@MODES
def test_a_commit_whose_answer_was_lost_is_not_done_again(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = opened(tmp_path, **settings)
    published(sink, 2, (1, "a"))
    publish = sink._publish

    def lost(*given: Any) -> None:
        publish(*given)
        raise OSError("the connection broke")

    committable = prepared(sink, 3, (2, "b"))
    monkeypatch.setattr(sink, "_publish", lost)
    with pytest.raises(OSError, match="broke"):
        sink.commit(3, [committable])
    monkeypatch.undo()
    version = DeltaTable(str(tmp_path)).version()
    sink.commit(3, [committable])
    assert DeltaTable(str(tmp_path)).version() == version
    assert seen(tmp_path) == [(1, "a"), (2, "b")]


@MODES
def test_what_a_driver_published_as_it_died_is_not_taken_for_abandoned(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody commits it again: it published before its epoch was in the log."""
    sink = opened(tmp_path, **settings)
    committable = prepared(sink, 3, (2, "b"))
    prepared(sink, 3, (3, "abandoned"), subtask=1)
    monkeypatch.setattr(sink.store, "delete", lambda paths: None)
    sink.commit(3, [committable])
    new = opened(tmp_path, **settings)
    assert len(new.store.list(f"_cairn/{new.home}/")) == 2
    new.recover(4)
    assert seen(tmp_path) == [(2, "b")]
    assert new.store.list(f"_cairn/{new.home}/") == []


@MODES
def test_an_epoch_is_one_version_of_the_table(tmp_path: Path, settings: dict[str, Any]) -> None:
    sink = opened(tmp_path, **settings)
    before = DeltaTable(str(tmp_path)).version()
    sink.commit(2, [prepared(sink, 2, (s, "x"), subtask=s) for s in range(4)])
    sink.commit(3, [])
    assert DeltaTable(str(tmp_path)).version() == before + 1
    assert table(tmp_path).num_rows == 4


@MODES
def test_a_driver_in_between_with_the_same_epoch_wins_and_the_other_finds_its_mark(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Both have looked and found nothing; the slower one is refused by the log."""
    sink, other = opened(tmp_path, **settings), opened(tmp_path, **settings)
    committables = [prepared(sink, 2, (1, "a"))]
    with told_of_passes(once(lambda: other.commit(2, committables))):
        sink.commit(2, committables)
    assert seen(tmp_path) == [(1, "a")]
    assert [e["operation"] for e in DeltaTable(str(tmp_path)).history()].count("CREATE TABLE") == 1


@MODES
def test_another_writer_in_between_keeps_its_rows(tmp_path: Path, settings: dict[str, Any]) -> None:
    sink = opened(tmp_path, **settings)
    theirs = pa.Table.from_pylist([{"k": 9, "s": "theirs"}], KS)
    with told_of_passes(once(lambda: write_deltalake(str(tmp_path), theirs, mode="append"))):
        published(sink, 2, (1, "a"))
    assert seen(tmp_path) == [(1, "a"), (9, "theirs")]


@MODES
def test_a_new_driver_that_recovers_in_between_leaves_nothing_to_commit(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The old one has looked and found its files; they are gone when it commits."""
    old, new = opened(tmp_path, **settings), opened(tmp_path, **settings)
    published(old, 2, (1, "a"))
    committables = [prepared(old, 3, (2, "b"))]
    with told_of_passes(once(lambda: new.recover(4))), pytest.raises(CommitError, match="cleared"):
        old.commit(3, committables)
    assert seen(tmp_path) == [(1, "a")]
    published(new, 5, (3, "c"))
    assert seen(tmp_path) == [(1, "a"), (3, "c")]


CHANGED = pytest.mark.parametrize(
    ("before", "after"), [({}, MERGE), (MERGE, {})], ids=["append first", "merge first"]
)


@CHANGED
def test_what_was_prepared_in_the_other_mode_is_not_committed_and_can_be_later(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    old = opened(tmp_path, **before)
    committables = [prepared(old, 2, (1, "a"))]
    mode = before.get("mode", "append")
    with pytest.raises(CommitError, match=f"start the job with mode='{mode}' once more"):
        opened(tmp_path, **after).commit(2, committables)
    assert seen(tmp_path) == []
    old.commit(2, committables)
    changed = opened(tmp_path, **after)
    changed.commit(2, committables)
    published(changed, 3, (2, "b"))
    assert seen(tmp_path) == [(1, "a"), (2, "b")]


@CHANGED
def test_what_was_abandoned_in_the_other_mode_is_removed(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    prepared(opened(tmp_path, **before), 2, (1, "abandoned"))
    changed = opened(tmp_path, **after)
    changed.recover(3)
    assert changed.store.list(f"_cairn/{changed.home}/") == []
    assert list(tmp_path.glob("part-*")) == []


@MODES
def test_a_column_that_another_writer_drops_meanwhile_is_not_lost_silently(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    sink = opened(tmp_path, **settings)
    published(sink, 2, (1, "a"))
    committables = [prepared(sink, 3, (2, "b"))]

    def overwrite() -> None:
        theirs = pa.table({"k": [9]})
        write_deltalake(str(tmp_path), theirs, mode="overwrite", schema_mode="overwrite")

    with (
        told_of_passes(once(overwrite)),
        pytest.raises(CommitError, match=r"the table was changed(.|\n)*no column 's'"),
    ):
        sink.commit(3, committables)
    assert seen(tmp_path) == [(9,)]
    opened(tmp_path, merge_schema=True, **settings)
    sink.commit(3, committables)
    assert seen(tmp_path) == [(2, "b"), (9, None)]


@MODES
def test_a_column_that_another_writer_adds_meanwhile_is_null(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    sink = opened(tmp_path, **settings)
    published(sink, 2, (1, "a"))
    theirs = pa.table({"k": [9], "s": ["x"], "more": [0.5]})
    write_deltalake(str(tmp_path), theirs, mode="append", schema_mode="merge")
    published(sink, 3, (2, "b"))
    assert seen(tmp_path) == [(1, "a", None), (2, "b", None), (9, "x", 0.5)]


def test_files_in_partitions_that_the_table_has_no_more_are_refused(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    committables = [prepared(sink, 2, (1, "a"))]
    write_deltalake(
        str(tmp_path),
        pa.Table.from_pylist([{"k": 9, "s": "x"}], KS),
        mode="overwrite",
        schema_mode="overwrite",
        partition_by=["s"],
    )
    for driver in (sink, opened(tmp_path)):
        with pytest.raises(CommitError, match="in partitions by nothing, the table has them by s"):
            driver.commit(2, committables)
    assert seen(tmp_path) == [(9, "x")]


def test_an_older_epoch_that_is_taken_for_published_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = opened(tmp_path)
    committables = [prepared(sink, 2, (1, "a"))]
    published(sink, 3, (2, "b"))
    with caplog.at_level(logging.WARNING, "cairn"):
        sink.commit(2, committables)
    assert "has epoch 3 already, so epoch 2 is taken for published" in caplog.text
    assert seen(tmp_path) == [(2, "b")]


@MODES
def test_another_path_than_it_was_prepared_in_is_named_as_a_cause(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    committables = [prepared(opened(tmp_path / "old", **settings), 2, (1, "a"))]
    with pytest.raises(CommitError, match=r"new(.|\n)*not there(.|\n)*path is a new one"):
        opened(tmp_path / "new", **settings).commit(2, committables)


def test_a_commit_of_files_that_are_gone_is_refused(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    committables = [prepared(sink, 2, (s, "x"), subtask=s) for s in range(3)]
    (tmp_path / committables[1]["files"][0]["name"]).unlink()
    with pytest.raises(CommitError, match="1 of 3 prepared files are not there"):
        sink.commit(2, committables)
    assert seen(tmp_path) == []


def test_a_table_that_conflicts_for_ever_fails_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = opened(tmp_path)

    def conflict(*given: Any) -> None:
        raise CommitFailedError("somebody was first")

    monkeypatch.setattr(sink, "_publish", conflict)
    with pytest.raises(CommitFailedError):
        published(sink, 2, (1, "a"))


def once(work: Callable[[], Any]) -> Callable[[str], None]:
    """Work to be done at the first pass of a crash point, just before the log is written."""
    done: list[str] = []

    def told(point: str) -> None:
        if not done:
            done.append(point)
            work()

    return told


# The log grows old


@MODES
def test_marks_outlive_checkpoints_of_the_log(tmp_path: Path, settings: dict[str, Any]) -> None:
    DeltaTable.create(str(tmp_path), schema=KS, configuration={"delta.checkpointInterval": "2"})
    sink = opened(tmp_path, **settings)
    committables = {epoch: [prepared(sink, epoch, (epoch, "x"))] for epoch in range(2, 9)}
    for epoch, prepared_then in committables.items():
        sink.commit(epoch, prepared_then)
    assert list(tmp_path.glob("_delta_log/*.checkpoint.parquet"))
    for path in tmp_path.glob("_delta_log/0000000000000000000[0-3].json"):
        path.unlink()
    opened(tmp_path, **settings).commit(8, committables[8])
    sink.commit(3, committables[3])
    assert [row[0] for row in seen(tmp_path)] == list(range(2, 9))


@MODES
def test_a_vacuum_touches_nothing_that_is_published(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    sink = opened(tmp_path, **settings)
    for epoch in range(2, 6):
        published(sink, epoch, (epoch, "x"))
    DeltaTable(str(tmp_path)).vacuum(0, dry_run=False, enforce_retention_duration=False)
    assert [row[0] for row in seen(tmp_path)] == [2, 3, 4, 5]


def test_a_vacuum_with_the_usual_retention_leaves_what_is_prepared(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    committable = prepared(sink, 2, (1, "x"))
    DeltaTable(str(tmp_path)).vacuum(dry_run=False)
    sink.commit(2, [committable])
    assert seen(tmp_path) == [(1, "x")]


def test_files_that_the_table_has_compacted_stay_for_readers_of_older_versions(
    tmp_path: Path,
) -> None:
    sink = opened(tmp_path)
    committables = {epoch: [prepared(sink, epoch, (epoch, "x"))] for epoch in (2, 3)}
    for epoch, prepared_then in committables.items():
        sink.commit(epoch, prepared_then)
    version = DeltaTable(str(tmp_path)).version()
    DeltaTable(str(tmp_path)).optimize.compact()
    sink.commit(3, committables[3])
    prepared(sink, 4, (4, "abandoned"))
    opened(tmp_path).recover(5)
    assert seen(tmp_path) == [(2, "x"), (3, "x")]
    old = DeltaTable(str(tmp_path), version=version).to_pyarrow_table()
    assert sorted(pa.table(old)["k"].to_pylist()) == [2, 3]


def test_a_file_that_was_compacted_before_its_note_was_removed_stays_for_older_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that publishes before the record died; nobody commits its epoch again."""
    sink = opened(tmp_path)
    published(sink, 2, (2, "x"))
    committable = prepared(sink, 3, (3, "x"))
    monkeypatch.setattr(sink.store, "delete", lambda paths: None)
    sink.commit(3, [committable])
    prepared(sink, 4, (4, "abandoned"))
    version = DeltaTable(str(tmp_path)).version()
    DeltaTable(str(tmp_path)).optimize.compact()
    new = opened(tmp_path)
    new.recover(5)
    old = DeltaTable(str(tmp_path), version=version).to_pyarrow_table()
    assert sorted(pa.table(old)["k"].to_pylist()) == [2, 3]
    assert new.store.list(f"_cairn/{new.home}/") == []
    assert list(tmp_path.glob("part-000000000004-*")) == []


# Tables of others, and settings that do not fit


def test_a_table_that_is_there_is_appended_to(tmp_path: Path) -> None:
    theirs = pa.table({"extra": [0.5], "s": ["theirs"], "k": [9]})
    write_deltalake(str(tmp_path), theirs, partition_by=["s"])
    published(opened(tmp_path, create=False), 2, (1, "a"), (2, "b"))
    found = sorted((row["k"], row["s"], row["extra"]) for row in table(tmp_path).to_pylist())
    assert found == [(1, "a", None), (2, "b", None), (9, "theirs", 0.5)]


def test_a_column_that_is_missing_is_added_when_asked_for(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"k": [9]}))
    with pytest.raises(PlanError, match=r"no column 's'(.|\n)*merge_schema=True"):
        opened(tmp_path)
    published(opened(tmp_path, merge_schema=True), 2, (1, "a"))
    assert seen(tmp_path) == [(1, "a"), (9, None)]


def test_drivers_that_add_a_column_at_once_all_start(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"k": [9]}))
    start = threading.Barrier(4)
    sinks: list[Delta] = []

    def work() -> None:
        start.wait()
        sinks.append(opened(tmp_path, merge_schema=True))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sinks) == 4
    published(sinks[0], 2, (1, "a"))
    assert seen(tmp_path) == [(1, "a"), (9, None)]


def test_a_type_that_delta_does_not_have_is_refused(tmp_path: Path) -> None:
    schema = parse_schema("k long, i interval day to second")
    with pytest.raises(PlanError, match="column 'i' has type duration"):
        opened(tmp_path / "t", schema)
    write_deltalake(str(tmp_path / "t"), pa.table({"k": [9]}))
    with pytest.raises(PlanError, match="column 'i' has type duration"):
        opened(tmp_path / "t", schema, merge_schema=True)


def test_a_column_of_another_type_is_refused(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"k": ["text"], "s": ["x"]}))
    with pytest.raises(PlanError, match=r"'k' of the table has another type(.|\n)*found: string"):
        opened(tmp_path)


def test_a_missing_table_is_refused_when_it_is_not_ours_to_create(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"there is no Delta table(.|\n)*create=True"):
        opened(tmp_path / "t", create=False)


def test_a_null_for_a_column_that_is_never_null_fails_in_the_slot(tmp_path: Path) -> None:
    fields = [pa.field("k", pa.int64(), nullable=False), pa.field("s", pa.string())]
    DeltaTable.create(str(tmp_path), schema=pa.schema(fields))
    sink = opened(tmp_path)
    published(sink, 2, (1, None))
    with pytest.raises(EpochError, match="column 'k' is NOT NULL in the table"):
        prepared(sink, 3, (None, "x"))


def test_a_column_that_is_never_null_and_not_in_the_stream_is_refused(tmp_path: Path) -> None:
    more = pa.field("must", pa.int64(), nullable=False)
    DeltaTable.create(str(tmp_path), schema=KS.append(more))
    with pytest.raises(PlanError, match="'must' of the table is NOT NULL"):
        opened(tmp_path)


def test_a_table_with_constraints_takes_no_files_but_merges(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"k": [1], "s": ["x"]}))
    DeltaTable(str(tmp_path)).alter.add_constraint({"positive": "k > 0"})
    with pytest.raises(PlanError, match=r"delta.constraints.positive"):
        opened(tmp_path)
    merging = opened(tmp_path, **MERGE)
    published(merging, 2, (2, "y"))
    assert seen(tmp_path) == [(1, "x"), (2, "y")]


def test_a_table_that_takes_no_changes_is_not_merged_into(tmp_path: Path) -> None:
    DeltaTable.create(str(tmp_path), schema=KS, configuration={"delta.appendOnly": "true"})
    with pytest.raises(PlanError, match=r"delta\.appendOnly"):
        opened(tmp_path, **MERGE)
    published(opened(tmp_path), 2, (1, "a"))


def test_a_feature_that_no_commit_could_be_written_with_is_refused_at_once(tmp_path: Path) -> None:
    DeltaTable.create(str(tmp_path), schema=KS)
    DeltaTable(str(tmp_path)).alter.add_feature(
        TableFeatures.RowTracking, allow_protocol_versions_increase=True
    )
    with pytest.raises(PlanError, match=r"rowTracking(.|\n)*sinks\.Spark"):
        opened(tmp_path)


def test_other_partitions_than_the_table_s_are_refused(tmp_path: Path) -> None:
    opened(tmp_path, partition_by="s")
    assert opened(tmp_path).partitions == ("s",)
    with pytest.raises(PlanError, match="partitioned by other columns"):
        opened(tmp_path, partition_by="k")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "upsert"}, "unknown mode 'upsert'"),
        ({"mode": "merge"}, "go together"),
        ({"key": "k"}, "go together"),
        ({"compression": "rar"}, "unknown compression"),
        ({"partition_by": "nix"}, "names no column of the stream: 'nix'"),
        ({"partition_by": ["k", "s"]}, "every column is in partition_by"),
        ({"mode": "merge", "key": "nix"}, "names no column of the stream: 'nix'"),
        ({"storage_options": {"AWS_REGION": "env:CAIRN_NOT_SET"}}, "CAIRN_NOT_SET"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        opened(tmp_path, **settings)


@pytest.mark.parametrize("kind", ["double", "decimal(5,2)", "timestamp", "binary", "array<int>"])
def test_a_partition_that_would_not_come_back_equal_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(PlanError, match="'v' has type"):
        opened(tmp_path, parse_schema(f"k long, v {kind}"), partition_by="v")


def test_without_the_package_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(PlanError, match=r"cairn-state\[delta\]"):
        opened(tmp_path)


def test_a_secret_from_the_environment_is_not_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_TEST_SECRET", "hush")
    sink = opened(tmp_path, storage_options={"AWS_SECRET_ACCESS_KEY": "env:CAIRN_TEST_SECRET"})
    assert b"hush" not in pickle.dumps(sink)


def test_a_path_may_have_odd_characters(tmp_path: Path) -> None:
    path = tmp_path / "a b#cé"
    published(opened(f"file://{path}"), 2, (1, "a"))
    published(opened(path), 3, (2, "b"))
    assert seen(path) == [(1, "a"), (2, "b")]
    with pytest.raises(PlanError, match="holds a '%'"):
        Delta(str(tmp_path / "a%20b"))


def test_a_table_in_a_bucket_is_written_with_the_options_that_were_given() -> None:
    with s3_server() as s3:
        for settings in ({}, MERGE):
            url = f"{s3.url}/{len(settings)}"
            given: dict[str, Any] = {"storage_options": s3.env, **settings}
            sink, other = opened(url, **given), opened(url, **given)
            committables = [prepared(sink, 2, (1, "a"))]
            prepared(sink, 2, (1, "b"), subtask=1)
            with told_of_passes(once(lambda o=other, c=committables: o.commit(2, c))):
                sink.commit(2, committables)
            sink.recover(3)
            read = DeltaTable(url, storage_options=s3.env).to_pyarrow_table()
            assert pa.table(read).to_pylist() == [{"k": 1, "s": "a"}]
            assert sink.store.list(f"_cairn/{sink.home}/") == []
