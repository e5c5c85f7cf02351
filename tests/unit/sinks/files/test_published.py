"""The published files of a folder, and their order."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from cairn.errors import CorruptFileError, PlanError
from cairn.sinks import Files, list_published
from cairn.sinks.files.published import spark_url
from cairn.storage.store import Store
from tests.places.base import prepared
from tests.places.files import BucketFilesPlace, read_rows
from tests.unit.sinks.files.folders import Folder


def test_a_folder_that_is_not_there_has_no_files(tmp_path: Path) -> None:
    assert list_published(str(tmp_path / "nothing")) == []
    assert not (tmp_path / "nothing").exists()


def test_epochs_come_in_their_order_from_all_jobs(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    first, second = folder.sink("z"), folder.sink("a")
    folder.commit(first, 9, (1, "z"))
    folder.commit(second, 2, (2, "a"))
    folder.commit(first, 10, (3, "z"))
    folder.commit(second, 100, (4, "a"))
    assert folder.rows() == [(1, "z"), (3, "z"), (2, "a"), (4, "a")]


def test_parts_come_in_their_order(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    slot, driver = folder.sink(in_slot=True), folder.sink()
    for part in range(12):
        driver.commit(2, [prepared(slot, 2, (part, "x"), round=part)], part)
    folder.commit(driver, 3, (12, "x"))
    assert [k for k, _ in folder.rows()] == list(range(13))


def test_files_without_their_mark_do_not_count(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    driver = folder.sink()
    folder.commit(driver, 2, (1, "a"))
    folder.commit(driver, 3, (2, "b"))
    (folder.path / "_cairn/job/out/epochs/000000000003.json").unlink()
    assert folder.rows() == [(1, "a")]


@pytest.mark.parametrize("damage", ["", "{}", '{"files":[{}]}', "[]", '{"files":[1]}'])
def test_a_damaged_mark_is_named(tmp_path: Path, damage: str) -> None:
    folder = Folder(tmp_path)
    folder.commit(folder.sink(), 2, (1, "a"))
    mark = folder.path / "_cairn/job/out/epochs/000000000002.json"
    assert json.loads(mark.read_text())["files"][0]["rows"] == 1
    mark.write_text(damage)
    with pytest.raises(CorruptFileError, match=mark.name):
        list_published(str(folder.path))


def test_a_path_may_have_any_characters(tmp_path: Path) -> None:
    odd = tmp_path / "a b#c%20é?&[x]"
    odd.mkdir()
    for settings in ({}, {"listed": True, "partition_by": "s"}):
        folder = Folder(odd, **settings)
        folder.commit(folder.sink(), 2 + len(settings), (1, "ü #%/"))
        assert len(folder.rows()) == (1 if not settings else 2)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/a b/ü", "s3a://bucket/a%20b/%C3%BC"),
        ("s3a://bucket/out/", "s3a://bucket/out"),
        ("gs://bucket/a=b#c", "gs://bucket/a%3Db%23c"),
        ("abfss://c@a.dfs.core.windows.net/ü", "abfss://c@a.dfs.core.windows.net/%C3%BC"),
        ("s3://bucket", "s3a://bucket"),
    ],
)
def test_in_the_list_a_bucket_has_the_name_spark_knows(url: str, expected: str) -> None:
    store = mock.Mock(spec=Store, url=url.rstrip("/"))
    assert spark_url(store) == expected


@pytest.mark.parametrize("scheme", ["az", "azure"])
def test_a_list_that_spark_could_not_follow_is_refused(scheme: str) -> None:
    with pytest.raises(PlanError, match="abfss://"):
        Files(f"{scheme}://container/out")


def test_files_in_a_bucket_are_listed_and_merged(tmp_path: Path) -> None:
    place = BucketFilesPlace(tmp_path)
    try:
        sink = Files(place.url, format="json", compact=True, compact_grace_s=0)
        sink.open(place.context(in_slot=True))
        for epoch in range(1, 13):
            if epoch == 10:
                sink._compacting().round()
            sink.commit(epoch, [prepared(sink, epoch, (epoch, "a"))])
        sink._compacting().round()
        names = [address.removeprefix(f"{place.url}/") for address in list_published(place.url)]
        rows = [row for name in names for row in read_rows(name, sink._store.get(name))]
        assert rows == [(n, "a") for n in range(1, 13)]
        assert len(names) == 4
        stored = [found.path for found in sink._store.list() if found.path.startswith("part-")]
        assert sorted(stored) == sorted(names)
    finally:
        place.close()
