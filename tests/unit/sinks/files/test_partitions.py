"""Folders by column values, and the files in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cairn.errors import PlanError
from cairn.sinks import Files, list_published
from cairn.sinks.base import Execution, SinkContext
from cairn.sinks.files import writer as file_writer
from cairn.sinks.files.partitions import Partitions, escape
from cairn.types import parse_schema
from tests.places.base import Row, batch
from tests.unit.sinks.files.folders import Folder

SCHEMA = parse_schema("a bigint, s string, yes boolean")


def split(rows: list[Row], *columns: str) -> dict[str, list[Row]]:
    arrays = [pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), SCHEMA, strict=True)]
    made = Partitions(columns, SCHEMA).split(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
    found = {folder: [tuple(row.values()) for row in rows.to_pylist()] for folder, rows in made}
    return found


def test_rows_of_a_folder_keep_their_order_and_lose_the_column() -> None:
    rows = [(n, "xyz"[n % 3], n % 2 == 0) for n in range(12)]
    assert split(rows, "s") == {f"s={s}": [(a, yes) for a, t, yes in rows if t == s] for s in "xyz"}
    assert split(rows, "yes", "s")["yes=true/s=z"] == [(2,), (8,)]


def test_null_and_the_empty_string_share_the_default_folder() -> None:
    found = split([(1, None, None), (2, "", True), (3, "a", None)], "s", "yes")
    default = "__HIVE_DEFAULT_PARTITION__"
    assert sorted(found) == sorted(
        [f"s={default}/yes={default}", f"s={default}/yes=true", f"s=a/yes={default}"]
    )


def test_null_and_empty_string_of_one_column_are_both_kept() -> None:
    made = Partitions(["s"], SCHEMA).split(
        pa.RecordBatch.from_pylist([{"a": 1, "s": None}, {"a": 2, "s": ""}], schema=SCHEMA)
    )
    assert sorted(r["a"] for _, rows in made for r in rows.to_pylist()) == [1, 2]


def test_names_are_escaped_as_spark_does() -> None:
    assert escape("a b+é~(){}") == "a b+é~()%7B}"
    assert escape("\"#%'*/:=?\\[]^\n\x7f") == "%22%23%25%27%2A%2F%3A%3D%3F%5C%5B%5D%5E%0A%7F"


@pytest.mark.parametrize(
    ("ddl", "columns", "why"),
    [
        ("a bigint, b string", ["c"], "the rows do not have this column\n  columns: a, b"),
        ("a bigint, b double", ["b"], "it is double"),
        ("a bigint, b array<int>", ["b"], "it is list"),
        ("a bigint, b binary", ["b"], "it is binary"),
        ("a bigint, b string", ["b", "a"], "nothing would be left"),
        ("a bigint, b string", ["b", "b"], "named twice"),
    ],
)
def test_columns_that_make_no_folders_are_refused(
    tmp_path: Path, ddl: str, columns: list[str], why: str
) -> None:
    sink = Files(str(tmp_path), partition_by=columns)
    with pytest.raises(PlanError, match=why):
        sink.open(SinkContext("job", "j", "out", parse_schema(ddl)))


# Files


def test_an_epoch_with_many_folders_has_one_file_in_each(tmp_path: Path) -> None:
    folder = Folder(tmp_path, partition_by="k", format="json")
    writer = folder.sink(in_slot=True).writer(2, 0, Execution())
    for n in range(3):
        writer.write(batch(*[(k, f"{n}") for k in range(500)]))
    committable = writer.prepare()
    assert committable is not None and len(committable["files"]) == 500
    assert all(file["rows"] == 3 for file in committable["files"])
    assert os.listdir(folder.scratch) == []
    folder.sink().commit(2, [committable])
    assert sorted(folder.rows()) == sorted((k, f"{n}") for k in range(500) for n in range(3))
    folder.sink().recover(3)


def test_more_rows_than_memory_holds_become_more_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "BUFFER_BYTES_MAX", 2000)
    monkeypatch.setattr(file_writer, "OPEN_MAX", 4)
    folder = Folder(tmp_path, partition_by="k", format="json")
    writer: Any = folder.sink(in_slot=True).writer(2, 0, Execution())
    rows = [(k, f"{n} {k}") for n in range(20) for k in range(30)]
    for start in range(0, len(rows), 30):
        writer.write(batch(*rows[start : start + 30]))
        assert len(writer._open) <= 4
        assert sum(writer._buffer_bytes.values()) <= 2000
    committable = writer.prepare()
    assert 30 < len(committable["files"]) < len(rows)
    folder.sink().commit(2, [committable])
    assert sorted(folder.rows()) == sorted(rows)


def test_a_buffered_row_does_not_keep_its_batch_in_memory(tmp_path: Path) -> None:
    """One cold row in each batch, while the hot ones are written."""
    folder = Folder(tmp_path, partition_by="k")
    writer = folder.sink(in_slot=True).writer(2, 0, Execution())
    before = pa.total_allocated_bytes()
    with mock.patch("cairn.sinks.files.writer.BUFFER_BYTES_MAX", 1 << 20):
        for n in range(20):
            writer.write(batch((n, "cold"), *[(1000, "x" * 5000)] * 200))
        assert len(writer._buffers) >= 20
        assert pa.total_allocated_bytes() - before < 4 << 20
    assert len(writer.prepare()["files"]) >= 21


def groups_of(folder: Folder, committable: dict[str, Any]) -> list[int]:
    """The rows in each group of the only file."""
    (file,) = committable["files"]
    stored = pq.ParquetFile(folder.path / folder.sink().staging_path(file["name"]))
    return [stored.metadata.row_group(i).num_rows for i in range(stored.num_row_groups)]


def test_small_batches_become_few_row_groups_and_equal_files(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    rows = batch(*[(n, "x") for n in range(70_000)])
    found = []
    for size in (1000, 7, 70_000):
        writer = folder.sink(in_slot=True).writer(2, 0, Execution())
        for start in range(0, len(rows), size):
            writer.write(rows.slice(start, size))
        found.append(writer.prepare())
    assert found[0] == found[1] == found[2]
    assert groups_of(folder, found[0]) == [65_536, 70_000 - 65_536]


def test_wide_rows_are_written_before_there_are_many(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    writer = folder.sink(in_slot=True).writer(2, 0, Execution())
    with mock.patch("cairn.sinks.files.writer.GROUP_BYTES", 50_000):
        for n in range(20):
            writer.write(batch((n, "x" * 10_000)))
    committable = writer.prepare()
    assert committable is not None and groups_of(folder, committable) == [5, 5, 5, 5]


def test_a_full_file_is_followed_by_another(tmp_path: Path) -> None:
    folder = Folder(tmp_path, format="csv", file_bytes_target=200)
    writer = folder.sink(in_slot=True).writer(2, 0, Execution())
    rows = [(n, "x" * 50) for n in range(10)]
    for row in rows:
        writer.write(batch(row))
    committable = writer.prepare()
    assert committable is not None
    assert [file["rows"] for file in committable["files"]] == [4, 4, 2]
    folder.sink().commit(2, [committable])
    assert folder.rows() == rows


@pytest.mark.parametrize("settings", [{}, {"partition_by": "k"}])
def test_a_full_disk_fails_the_attempt_and_leaves_nothing_local(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = Folder(tmp_path, **settings)
    slot = folder.sink(in_slot=True)

    def full(path: str, local_file: str) -> None:
        raise OSError(28, "No space left on device")

    slot._store.put_file = full  # type: ignore[method-assign]
    writer = slot.writer(2, 0, Execution())
    writer.write(batch((1, "a"), (2, "b")))
    with pytest.raises(OSError, match="No space left"):
        writer.prepare()
    writer.abort()
    assert os.listdir(folder.scratch) == [] and list_published(str(folder.path)) == []


def test_recovery_finds_staged_files_in_folders(tmp_path: Path) -> None:
    folder = Folder(tmp_path, partition_by="k")
    folder.prepared(2, (1, "a"))
    kept = folder.prepared(5, (1, "b"))
    driver = folder.sink()
    driver.recover(5)
    assert len(list(folder.path.rglob("part-*"))) == 1
    driver.commit(5, kept)
    assert folder.rows() == [(1, "b")]
