"""An epoch is one version of a Delta table, also when others commit; the rest is the contract."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

from cairn.errors import CommitError, EpochError
from cairn.testing import call_at_points
from cairn.types import parse_schema
from tests.unit.sinks.delta.tables import (
    KS,
    MERGE,
    MODES,
    once,
    open_sink,
    prepared,
    published,
    read_rows,
    table,
)

# Merging


def test_a_merge_changes_the_stream_s_columns_and_no_others(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"k": [1, 2], "s": ["a", "b"], "note": ["n", "m"]}))
    published(open_sink(tmp_path, **MERGE), 2, (2, "new"), (3, "c"))
    assert read_rows(tmp_path) == [(1, "a", "n"), (2, "new", "m"), (3, "c", None)]


def test_the_last_row_of_a_key_wins_whatever_the_order_of_committables(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, buffer_bytes_max=1, **MERGE)
    late = prepared(sink, 2, (1, "later"), (1, "last"), round=1)
    early = prepared(sink, 2, (1, "first"), (2, "x"), attempt=1)
    sink.commit(2, [late, early])
    assert read_rows(tmp_path) == [(1, "last"), (2, "x")]


def test_keys_may_be_several_columns_with_odd_names(tmp_path: Path) -> None:
    schema = pa.schema([("A key", pa.int64()), ('b"é', pa.string()), ("Value", pa.int64())])
    sink = open_sink(tmp_path, schema, mode="merge", key=["A key", 'b"é'])
    published(sink, 2, (1, "x", 1), (1, "y", 1))
    published(sink, 3, (1, "y", 2))
    assert read_rows(tmp_path) == [(1, "x", 1), (1, "y", 2)]


def test_rows_that_are_all_key_are_kept_once(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, mode="merge", key=["k", "s"])
    published(sink, 2, (1, "x"))
    published(sink, 3, (1, "x"), (2, "x"))
    assert read_rows(tmp_path) == [(1, "x"), (2, "x")]


def test_a_merge_that_changes_nothing_is_marked_all_the_same(tmp_path: Path) -> None:
    """So it can be committed again, after what was prepared is gone."""
    sink = open_sink(tmp_path, mode="merge", key=["k", "s"])
    published(sink, 2, (1, "x"))
    committables = [prepared(sink, 3, (1, "x"))]
    sink.commit(3, committables)
    version = DeltaTable(str(tmp_path)).version()
    sink.commit(3, committables)
    open_sink(tmp_path, mode="merge", key=["k", "s"]).commit(3, committables)
    assert DeltaTable(str(tmp_path)).version() == version
    assert read_rows(tmp_path) == [(1, "x")]
    assert sink.store.list(f"_cairn/{sink.home}/") == []


def test_a_merge_that_changes_nothing_is_not_marked_when_a_new_driver_has_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = open_sink(tmp_path, mode="merge", key=["k", "s"])
    new = open_sink(tmp_path, mode="merge", key=["k", "s"])
    published(old, 2, (1, "x"))
    committables = [prepared(old, 3, (1, "x"))]
    publish = old._publish

    def overtaken(*given: Any) -> None:
        publish(*given)
        new.recover(4)

    monkeypatch.setattr(old, "_publish", overtaken)
    with pytest.raises(CommitError, match="removed everything"):
        old.commit(3, committables)
    published(new, 5, (2, "y"))
    assert read_rows(tmp_path) == [(1, "x"), (2, "y")]


def test_a_row_without_its_key_is_refused_in_the_slot(tmp_path: Path) -> None:
    with pytest.raises(EpochError, match="column 'k' is in the key"):
        prepared(open_sink(tmp_path, **MERGE), 2, (1, "x"), (None, "y"))


def test_merged_partitions_stay_where_they_belong(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, partition_by="s", **MERGE)
    published(sink, 2, (1, "x"), (2, "y"))
    published(sink, 3, (1, "y"))
    assert read_rows(tmp_path) == [(1, "y"), (2, "y")]


# Commits


@MODES
def test_a_commit_whose_answer_was_lost_is_not_done_again(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = open_sink(tmp_path, **settings)
    published(sink, 2, (1, "a"))
    publish = sink._publish

    def publish_then_break(*given: Any) -> None:
        publish(*given)
        raise OSError("the connection broke")

    committable = prepared(sink, 3, (2, "b"))
    monkeypatch.setattr(sink, "_publish", publish_then_break)
    with pytest.raises(OSError, match="broke"):
        sink.commit(3, [committable])
    monkeypatch.undo()
    version = DeltaTable(str(tmp_path)).version()
    sink.commit(3, [committable])
    assert DeltaTable(str(tmp_path)).version() == version
    assert read_rows(tmp_path) == [(1, "a"), (2, "b")]


@MODES
def test_what_a_driver_published_as_it_died_is_not_taken_for_abandoned(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody commits it again: it published before its epoch was in the log."""
    sink = open_sink(tmp_path, **settings)
    committable = prepared(sink, 3, (2, "b"))
    prepared(sink, 3, (3, "abandoned"), subtask=1)
    monkeypatch.setattr(sink.store, "delete", lambda paths: None)
    sink.commit(3, [committable])
    new = open_sink(tmp_path, **settings)
    assert len(new.store.list(f"_cairn/{new.home}/")) == 2
    new.recover(4)
    assert read_rows(tmp_path) == [(2, "b")]
    assert new.store.list(f"_cairn/{new.home}/") == []


@MODES
def test_an_epoch_is_one_version_of_the_table(tmp_path: Path, settings: dict[str, Any]) -> None:
    sink = open_sink(tmp_path, **settings)
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
    sink, other = open_sink(tmp_path, **settings), open_sink(tmp_path, **settings)
    committables = [prepared(sink, 2, (1, "a"))]
    with call_at_points(once(lambda: other.commit(2, committables))):
        sink.commit(2, committables)
    assert read_rows(tmp_path) == [(1, "a")]
    assert [e["operation"] for e in DeltaTable(str(tmp_path)).history()].count("CREATE TABLE") == 1


@MODES
def test_another_writer_in_between_keeps_its_rows(tmp_path: Path, settings: dict[str, Any]) -> None:
    sink = open_sink(tmp_path, **settings)
    theirs = pa.Table.from_pylist([{"k": 9, "s": "theirs"}], KS)
    with call_at_points(once(lambda: write_deltalake(str(tmp_path), theirs, mode="append"))):
        published(sink, 2, (1, "a"))
    assert read_rows(tmp_path) == [(1, "a"), (9, "theirs")]


@MODES
def test_a_new_driver_that_recovers_in_between_leaves_nothing_to_commit(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The old one has looked and found its files; they are gone when it commits."""
    old, new = open_sink(tmp_path, **settings), open_sink(tmp_path, **settings)
    published(old, 2, (1, "a"))
    committables = [prepared(old, 3, (2, "b"))]
    with call_at_points(once(lambda: new.recover(4))), pytest.raises(CommitError, match="removed"):
        old.commit(3, committables)
    assert read_rows(tmp_path) == [(1, "a")]
    published(new, 5, (3, "c"))
    assert read_rows(tmp_path) == [(1, "a"), (3, "c")]


CHANGED = pytest.mark.parametrize(
    ("before", "after"), [({}, MERGE), (MERGE, {})], ids=["append first", "merge first"]
)


@CHANGED
def test_an_epoch_is_published_in_the_mode_it_was_prepared_in(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    old = open_sink(tmp_path, **before)
    published(old, 2, (1, "first"))
    committables = [prepared(old, 3, (1, "a"), (1, "b"))]
    changed = open_sink(tmp_path, **after)
    changed.commit(3, committables)
    changed.commit(3, committables)
    changed.recover(4)
    expected = [(1, "b")] if before else [(1, "a"), (1, "b"), (1, "first")]
    assert read_rows(tmp_path) == expected
    published(changed, 5, (2, "c"))
    assert read_rows(tmp_path) == [*expected, (2, "c")]


def test_an_epoch_is_merged_by_the_key_it_was_prepared_with(tmp_path: Path) -> None:
    old = open_sink(tmp_path, **MERGE)
    published(old, 2, (1, "a"))
    committables = [prepared(old, 3, (1, "b"))]
    open_sink(tmp_path, mode="merge", key="s").commit(3, committables)
    assert read_rows(tmp_path) == [(1, "b")]


def test_an_epoch_to_merge_of_a_version_that_noted_no_key_waits_for_one(tmp_path: Path) -> None:
    old = open_sink(tmp_path, **MERGE)
    published(old, 2, (1, "a"))
    committable = prepared(old, 3, (1, "b"))
    del committable["key"], committable["columns"]
    with pytest.raises(CommitError, match="mode='merge' and that key once more"):
        open_sink(tmp_path).commit(3, [committable])
    assert read_rows(tmp_path) == [(1, "a")]
    old.commit(3, [committable])
    assert read_rows(tmp_path) == [(1, "b")]


@MODES
def test_a_column_of_the_program_before_that_the_table_lost_is_not_lost_silently(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    committables = [prepared(open_sink(tmp_path, **settings), 2, (1, "a"))]
    theirs = pa.table({"k": pa.array([], pa.int64())})
    write_deltalake(str(tmp_path), theirs, mode="overwrite", schema_mode="overwrite")
    later = open_sink(tmp_path, parse_schema("k long"), **settings)
    with pytest.raises(CommitError, match="with column 's', which the table no longer has"):
        later.commit(2, committables)
    open_sink(tmp_path, merge_schema=True, **settings)
    later.commit(2, committables)
    assert read_rows(tmp_path) == [(1, "a")]


@CHANGED
def test_what_was_abandoned_in_the_other_mode_is_removed(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    prepared(open_sink(tmp_path, **before), 2, (1, "abandoned"))
    changed = open_sink(tmp_path, **after)
    changed.recover(3)
    assert changed.store.list(f"_cairn/{changed.home}/") == []
    assert list(tmp_path.glob("part-*")) == []


@MODES
def test_a_column_that_another_writer_drops_meanwhile_is_not_lost_silently(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    sink = open_sink(tmp_path, **settings)
    published(sink, 2, (1, "a"))
    committables = [prepared(sink, 3, (2, "b"))]

    def overwrite() -> None:
        theirs = pa.table({"k": [9]})
        write_deltalake(str(tmp_path), theirs, mode="overwrite", schema_mode="overwrite")

    with (
        call_at_points(once(overwrite)),
        pytest.raises(CommitError, match=r"the table was changed(.|\n)*no column 's'"),
    ):
        sink.commit(3, committables)
    assert read_rows(tmp_path) == [(9,)]
    open_sink(tmp_path, merge_schema=True, **settings)
    sink.commit(3, committables)
    assert read_rows(tmp_path) == [(2, "b"), (9, None)]


@MODES
def test_a_column_that_another_writer_adds_meanwhile_is_null(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    sink = open_sink(tmp_path, **settings)
    published(sink, 2, (1, "a"))
    theirs = pa.table({"k": [9], "s": ["x"], "more": [0.5]})
    write_deltalake(str(tmp_path), theirs, mode="append", schema_mode="merge")
    published(sink, 3, (2, "b"))
    assert read_rows(tmp_path) == [(1, "a", None), (2, "b", None), (9, "x", 0.5)]


def test_files_in_partitions_that_the_table_has_no_more_are_refused(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    committables = [prepared(sink, 2, (1, "a"))]
    write_deltalake(
        str(tmp_path),
        pa.Table.from_pylist([{"k": 9, "s": "x"}], KS),
        mode="overwrite",
        schema_mode="overwrite",
        partition_by=["s"],
    )
    for driver in (sink, open_sink(tmp_path)):
        with pytest.raises(CommitError, match="in partitions by nothing, the table has them by s"):
            driver.commit(2, committables)
    assert read_rows(tmp_path) == [(9, "x")]


def test_an_older_epoch_that_is_taken_for_published_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = open_sink(tmp_path)
    committables = [prepared(sink, 2, (1, "a"))]
    published(sink, 3, (2, "b"))
    with caplog.at_level(logging.WARNING, "cairn"):
        sink.commit(2, committables)
    assert "already has epoch 3, so epoch 2 counts as published" in caplog.text
    assert read_rows(tmp_path) == [(2, "b")]


@MODES
def test_another_path_than_it_was_prepared_in_is_named_as_a_cause(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    committables = [prepared(open_sink(tmp_path / "old", **settings), 2, (1, "a"))]
    with pytest.raises(CommitError, match=r"new(.|\n)*missing(.|\n)*path has changed"):
        open_sink(tmp_path / "new", **settings).commit(2, committables)


def test_a_commit_of_files_that_are_gone_is_refused(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    committables = [prepared(sink, 2, (s, "x"), subtask=s) for s in range(3)]
    (tmp_path / committables[1]["files"][0]["name"]).unlink()
    with pytest.raises(CommitError, match="1 of 3 prepared files are missing"):
        sink.commit(2, committables)
    assert read_rows(tmp_path) == []


def test_a_table_that_conflicts_for_ever_fails_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = open_sink(tmp_path)

    def conflict(*given: Any) -> None:
        raise CommitFailedError("somebody was first")

    monkeypatch.setattr(sink, "_publish", conflict)
    with pytest.raises(CommitFailedError):
        published(sink, 2, (1, "a"))


# The log grows old


@MODES
def test_marks_outlive_checkpoints_of_the_log(tmp_path: Path, settings: dict[str, Any]) -> None:
    DeltaTable.create(str(tmp_path), schema=KS, configuration={"delta.checkpointInterval": "2"})
    sink = open_sink(tmp_path, **settings)
    committables = {epoch: [prepared(sink, epoch, (epoch, "x"))] for epoch in range(2, 9)}
    for epoch, prepared_then in committables.items():
        sink.commit(epoch, prepared_then)
    assert list(tmp_path.glob("_delta_log/*.checkpoint.parquet"))
    for path in tmp_path.glob("_delta_log/0000000000000000000[0-3].json"):
        path.unlink()
    open_sink(tmp_path, **settings).commit(8, committables[8])
    sink.commit(3, committables[3])
    assert [row[0] for row in read_rows(tmp_path)] == list(range(2, 9))
