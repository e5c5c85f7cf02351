"""Tables of others and settings that do not fit: what is taken, added or refused."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake

from cairn.errors import EpochError, PlanError
from cairn.sinks import Delta
from cairn.testing import call_at_points
from cairn.types import parse_schema
from tests.at_once import at_once
from tests.s3 import s3_server
from tests.unit.sinks.delta.tables import (
    KS,
    MERGE,
    once,
    open_sink,
    prepared,
    published,
    read_rows,
    table,
)


def test_a_table_that_is_there_is_appended_to(tmp_path: Path) -> None:
    theirs = pa.table({"extra": [0.5], "s": ["theirs"], "k": [9]})
    write_deltalake(str(tmp_path), theirs, partition_by=["s"])
    published(open_sink(tmp_path, create=False), 2, (1, "a"), (2, "b"))
    found = sorted((row["k"], row["s"], row["extra"]) for row in table(tmp_path).to_pylist())
    assert found == [(1, "a", None), (2, "b", None), (9, "theirs", 0.5)]


def test_a_column_that_is_missing_is_added_when_asked_for(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"k": [9]}))
    with pytest.raises(PlanError, match=r"no column 's'(.|\n)*merge_schema=True"):
        open_sink(tmp_path)
    published(open_sink(tmp_path, merge_schema=True), 2, (1, "a"))
    assert read_rows(tmp_path) == [(1, "a"), (9, None)]


def test_drivers_that_add_a_column_at_once_all_start(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"k": [9]}))
    sinks: list[Delta] = []

    def work() -> None:
        sinks.append(open_sink(tmp_path, merge_schema=True))

    assert at_once(*[work] * 4) == []
    published(sinks[0], 2, (1, "a"))
    assert read_rows(tmp_path) == [(1, "a"), (9, None)]


def test_a_type_that_delta_does_not_have_is_refused(tmp_path: Path) -> None:
    schema = parse_schema("k long, i interval day to second")
    with pytest.raises(PlanError, match="column 'i' has type duration"):
        open_sink(tmp_path / "t", schema)
    write_deltalake(str(tmp_path / "t"), pa.table({"k": [9]}))
    with pytest.raises(PlanError, match="column 'i' has type duration"):
        open_sink(tmp_path / "t", schema, merge_schema=True)


def test_a_column_of_another_type_is_refused(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"k": ["text"], "s": ["x"]}))
    with pytest.raises(PlanError, match=r"'k' of the table has another type(.|\n)*found: string"):
        open_sink(tmp_path)


def test_a_missing_table_is_refused_when_it_is_not_ours_to_create(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no Delta table(.|\n)*create=True"):
        open_sink(tmp_path / "t", create=False)


def test_a_null_for_a_column_that_is_never_null_fails_in_the_slot(tmp_path: Path) -> None:
    fields = [pa.field("k", pa.int64(), nullable=False), pa.field("s", pa.string())]
    DeltaTable.create(str(tmp_path), schema=pa.schema(fields))
    sink = open_sink(tmp_path)
    published(sink, 2, (1, None))
    with pytest.raises(EpochError, match="column 'k' is NOT NULL in the table"):
        prepared(sink, 3, (None, "x"))


def test_a_column_that_is_never_null_and_not_in_the_stream_is_refused(tmp_path: Path) -> None:
    more = pa.field("must", pa.int64(), nullable=False)
    DeltaTable.create(str(tmp_path), schema=KS.append(more))
    with pytest.raises(PlanError, match="'must' of the table is NOT NULL"):
        open_sink(tmp_path)


def test_a_table_with_constraints_takes_no_files_but_merges(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"k": [1], "s": ["x"]}))
    DeltaTable(str(tmp_path)).alter.add_constraint({"positive": "k > 0"})
    with pytest.raises(PlanError, match=r"delta.constraints.positive"):
        open_sink(tmp_path)
    merging = open_sink(tmp_path, **MERGE)
    published(merging, 2, (2, "y"))
    assert read_rows(tmp_path) == [(1, "x"), (2, "y")]


def test_a_table_that_takes_no_changes_is_not_merged_into(tmp_path: Path) -> None:
    DeltaTable.create(str(tmp_path), schema=KS, configuration={"delta.appendOnly": "true"})
    with pytest.raises(PlanError, match=r"delta\.appendOnly"):
        open_sink(tmp_path, **MERGE)
    published(open_sink(tmp_path), 2, (1, "a"))


def test_a_feature_that_no_commit_could_be_written_with_is_refused_at_once(tmp_path: Path) -> None:
    DeltaTable.create(str(tmp_path), schema=KS)
    DeltaTable(str(tmp_path)).alter.add_feature(
        TableFeatures.RowTracking, allow_protocol_versions_increase=True
    )
    with pytest.raises(PlanError, match=r"rowTracking(.|\n)*sinks\.Spark"):
        open_sink(tmp_path)


def test_other_partitions_than_the_table_s_are_refused(tmp_path: Path) -> None:
    open_sink(tmp_path, partition_by="s")
    assert open_sink(tmp_path).partitions == ("s",)
    with pytest.raises(PlanError, match="partitioned by other columns"):
        open_sink(tmp_path, partition_by="k")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "upsert"}, "unknown mode 'upsert'"),
        ({"mode": "merge"}, "go together"),
        ({"key": "k"}, "go together"),
        ({"compression": "rar"}, "unknown compression"),
        ({"partition_by": "nix"}, "names 'nix', which is not a column"),
        ({"partition_by": ["k", "s"]}, "every column is in partition_by"),
        ({"mode": "merge", "key": "nix"}, "names 'nix', which is not a column"),
        ({"storage_options": {"AWS_REGION": "env:CAIRN_NOT_SET"}}, "CAIRN_NOT_SET"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        open_sink(tmp_path, **settings)


@pytest.mark.parametrize("kind", ["double", "decimal(5,2)", "timestamp", "binary", "array<int>"])
def test_a_partition_that_would_not_come_back_equal_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(PlanError, match="'v' has type"):
        open_sink(tmp_path, parse_schema(f"k long, v {kind}"), partition_by="v")


def test_without_the_package_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(PlanError, match=r"cairn-state\[delta\]"):
        open_sink(tmp_path)


def test_a_secret_from_the_environment_is_not_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_TEST_SECRET", "hush")
    sink = open_sink(tmp_path, storage_options={"AWS_SECRET_ACCESS_KEY": "env:CAIRN_TEST_SECRET"})
    assert b"hush" not in pickle.dumps(sink)


def test_a_path_may_have_odd_characters(tmp_path: Path) -> None:
    path = tmp_path / "a b#cé"
    published(open_sink(f"file://{path}"), 2, (1, "a"))
    published(open_sink(path), 3, (2, "b"))
    assert read_rows(path) == [(1, "a"), (2, "b")]
    with pytest.raises(PlanError, match="has a '%'"):
        Delta(str(tmp_path / "a%20b"))


def test_a_table_in_a_bucket_is_written_with_the_options_that_were_given() -> None:
    with s3_server() as s3:
        for settings in ({}, MERGE):
            url = f"{s3.url}/{len(settings)}"
            given: dict[str, Any] = {"storage_options": s3.env, **settings}
            sink, other = open_sink(url, **given), open_sink(url, **given)
            committables = [prepared(sink, 2, (1, "a"))]
            prepared(sink, 2, (1, "b"), subtask=1)
            with call_at_points(once(lambda o=other, c=committables: o.commit(2, c))):
                sink.commit(2, committables)
            sink.recover(3)
            read = DeltaTable(url, storage_options=s3.env).to_pyarrow_table()
            assert pa.table(read).to_pylist() == [{"k": 1, "s": "a"}]
            assert sink.store.list(f"_cairn/{sink.home}/") == []
