"""The list: entries, and who may make them."""

from __future__ import annotations

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cairn.errors import CommitError, CommitUnknownError, CorruptFileError, PlanError
from cairn.sinks import Files, list_published
from cairn.sinks.files import spark_list
from cairn.sinks.files.published import spark_url
from cairn.sinks.files.spark_list import Replacement, SparkList
from cairn.storage.store import open_store
from cairn.testing import Fault, FaultyStore
from tests.places.base import prepared
from tests.unit.sinks.files.folders import Folder


def make_list(path: Path) -> SparkList:
    return SparkList(open_store(str(path)), f"file://{path}")


def add(entries: SparkList, *names: str) -> None:
    entries.append(lambda _: Replacement([entries.line(name, 1) for name in names]))


def test_every_tenth_entry_names_all_files(tmp_path: Path) -> None:
    entries = make_list(tmp_path)
    for n in range(21):
        add(entries, f"f{n}")
    made = sorted(os.listdir(tmp_path / "_spark_metadata"))
    assert made == sorted([*map(str, range(9)), "9.compact", *map(str, range(10, 19)),
                              "19.compact", "20"])  # fmt: skip
    lines = (tmp_path / "_spark_metadata" / "19.compact").read_text().split("\n")
    assert lines[0] == "v1" and len(lines) == 21
    assert json.loads(lines[1]) | {"modificationTime": 0} == {
        "path": f"file://{tmp_path}/f0", "size": 1, "isDir": False, "modificationTime": 0,
        "blockReplication": 1, "blockSize": 33554432, "action": "add",
    }  # fmt: skip
    listing = entries.read()
    assert listing.next_number == 21
    assert [entries.name(file) for file in listing.files] == [f"f{n}" for n in range(21)]


def test_whoever_loses_an_entry_looks_again(tmp_path: Path) -> None:
    mine, other = make_list(tmp_path), make_list(tmp_path)
    asked = []

    def change(listing: object) -> Replacement:
        if not asked:
            add(other, "theirs")
        asked.append(listing)
        return Replacement([mine.line("mine", 1)])

    mine.append(change)
    assert len(asked) == 2
    assert [mine.name(file) for file in mine.read().files] == ["theirs", "mine"]


def test_an_entry_in_an_old_gap_does_not_count_as_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries before a `.compact` are removed; who slept that long must not fill the gap."""
    monkeypatch.setattr(spark_list, "KEPT_S", 0)
    mine, other = make_list(tmp_path), make_list(tmp_path)
    asked = []

    def change(listing: object) -> Replacement:
        if not asked:
            for n in range(35):
                add(other, f"f{n}")
            assert not (tmp_path / "_spark_metadata" / "0").exists()
        asked.append(listing)
        return Replacement([mine.line("mine", 1)])

    mine.append(change)
    assert "mine" in mine.read().names


def test_old_entries_are_removed_once_readers_are_past_them(tmp_path: Path) -> None:
    entries = make_list(tmp_path)
    for n in range(39):
        add(entries, f"f{n}")
    folder = tmp_path / "_spark_metadata"
    for entry in folder.iterdir():
        os.utime(entry, (1, 1))
    add(entries, "f39")
    numbers = sorted(int(entry.name.removesuffix(".compact")) for entry in folder.iterdir())
    assert numbers == list(range(19, 40))
    assert len(entries.read().files) == 40


@pytest.mark.parametrize("damage", ["", "v2", "v1\n{", 'v1\n{"path":1}'])
def test_a_damaged_entry_is_named(tmp_path: Path, damage: str) -> None:
    entries = make_list(tmp_path)
    add(entries, "a")
    add(entries, "b")
    (tmp_path / "_spark_metadata" / "1").write_text(damage)
    with pytest.raises(CorruptFileError, match="_spark_metadata/1"):
        entries.read()


def test_a_missing_entry_is_named(tmp_path: Path) -> None:
    entries = make_list(tmp_path)
    for name in "abc":
        add(entries, name)
    (tmp_path / "_spark_metadata" / "1").unlink()
    with pytest.raises(CorruptFileError, match="_spark_metadata/1"):
        entries.read()


@pytest.mark.parametrize("name", ["with space", "#1/%41?x", "é=ü/a+b&c", "a=%2F/x;y"])
def test_names_come_back_from_urls(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a #%b é"
    sink = Files(str(folder), listed=True)
    store = open_store(str(folder))
    entries = SparkList(store, spark_url(store))
    assert entries.name(entries.line(name, 1)) == name
    add(entries, name)
    assert list_published(str(folder)) == [f"{folder}/{name}"]
    assert sink.listed


# The list of a sink


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, listed=True)


def test_an_answer_that_was_lost_does_not_list_an_epoch_twice(folder: Folder) -> None:
    driver = folder.sink()
    rows = folder.prepared(2, (1, "a"))
    driver._store = FaultyStore(driver._store, [Fault("put_if_absent", 1, "after")])
    with pytest.raises(CommitUnknownError):
        driver.commit(2, rows)
    driver.commit(2, rows)
    assert folder.rows() == [(1, "a")]


def test_a_crash_between_list_and_mark_does_not_list_an_epoch_twice(folder: Folder) -> None:
    driver = folder.sink()
    rows = folder.prepared(2, (1, "a"))
    driver._store = FaultyStore(driver._store, [Fault("put", 1, "before")])
    with pytest.raises(OSError, match="injected"):
        driver.commit(2, rows)
    folder.sink().commit(2, rows)
    assert folder.rows() == [(1, "a")]


def test_another_job_goes_on_in_the_same_list(folder: Folder) -> None:
    folder.commit(folder.sink("job"), 5, (1, "a"))
    folder.commit(folder.sink("branch"), 5, (1, "a"))
    folder.commit(folder.sink("job"), 6, (2, "b"))
    assert folder.rows() == [(1, "a"), (1, "a"), (2, "b")]


def test_jobs_that_write_at_once_all_get_into_the_list(folder: Folder) -> None:
    def run(job_id: str) -> None:
        driver = folder.sink(job_id)
        for epoch in range(1, 9):
            folder.commit(driver, epoch, (epoch, job_id))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, "abcd"))
    rows = folder.rows()
    assert sorted(rows) == sorted((epoch, job) for epoch in range(1, 9) for job in "abcd")
    for job in "abcd":
        assert [epoch for epoch, of in rows if of == job] == list(range(1, 9))


def test_parts_of_an_epoch_are_listed_one_by_one(folder: Folder) -> None:
    driver, slot = folder.sink(), folder.sink(in_slot=True)
    parts = [prepared(slot, 2, (1, "a"), round=part) for part in range(3)]
    for part, committable in enumerate(parts):
        driver.commit(2, [committable], part)
        driver.commit(2, [committable], part)
        assert folder.rows() == [(1, "a")] * (part + 1)
    marks = sorted(os.listdir(folder.path / "_cairn/job/out/epochs"))
    assert marks == ["000000000002-1.json", "000000000002-2.json", "000000000002.json"]


def test_files_from_before_the_list_are_in_its_first_entry(folder: Folder) -> None:
    """Those of another writer, and those this job published by renames; staged ones not."""
    unlisted = folder.sink(listed=False)
    unlisted.commit(2, folder.prepared(2, (1, "a"), listed=False))
    folder.prepared(3, (7, "abandoned"), listed=False)
    (folder.path / "_SUCCESS").write_text("")
    abandoned = folder.prepared(4, (8, "abandoned"))
    driver = folder.sink()
    driver.recover(5)
    assert folder.rows() == [(1, "a")]
    folder.commit(driver, 6, (2, "b"))
    assert folder.rows() == [(1, "a"), (2, "b")]
    assert abandoned[0]["files"][0]["name"] not in folder.data()


def test_a_commit_of_what_was_recovered_away_publishes_nothing(folder: Folder) -> None:
    late = folder.prepared(3, (1, "a"), (2, "b"))
    driver = folder.sink()
    folder.commit(driver, 2, (0, "x"))
    driver.recover(4)
    with pytest.raises(CommitError, match="1 of its files are gone"):
        folder.sink().commit(3, late)
    # Also when a slot that was given up has written the very same file again.
    folder.prepared(3, (1, "a"), (2, "b"))
    with pytest.raises(CommitError, match="gone"):
        folder.sink().commit(3, late)
    assert folder.rows() == [(0, "x")]


def test_a_folder_with_a_list_is_not_written_without_it(folder: Folder) -> None:
    folder.commit(folder.sink(), 2, (1, "a"))
    with pytest.raises(PlanError, match="pass listed=True"):
        folder.sink(listed=False)


def test_a_job_that_began_before_the_list_goes_into_it(folder: Folder) -> None:
    older = folder.sink("older", listed=False)
    before = folder.prepared(2, (1, "a"), job_id="older", listed=False)
    after = folder.prepared(3, (3, "c"), job_id="older", listed=False)
    older.commit(2, before)
    folder.commit(folder.sink(), 2, (2, "b"))
    for _ in range(2):
        older.commit(3, after)
        older.commit(2, before)
    assert folder.rows() == [(1, "a"), (2, "b"), (3, "c")]


def test_what_was_staged_is_published_when_the_run_after_it_has_a_list(folder: Folder) -> None:
    folder.commit(folder.sink(), 2, (1, "a"))
    staged = folder.prepared(3, (2, "b"), listed=False)
    folder.sink().commit(3, staged)
    folder.sink().commit(3, staged)
    folder.sink().recover(4)
    assert folder.rows() == [(1, "a"), (2, "b")]


def test_object_stores_are_listed_unless_told_otherwise(tmp_path: Path) -> None:
    assert Files("s3://bucket/out").listed and not Files("s3://bucket/out", listed=False).listed
    assert not Files(str(tmp_path)).listed and Files(str(tmp_path), listed=True).listed


def test_a_sink_pickles_without_what_it_opened(folder: Folder) -> None:
    sink = folder.sink()
    again = pickle.loads(pickle.dumps(sink))
    assert vars(again).keys() == vars(Files("x")).keys()
