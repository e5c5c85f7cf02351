"""Spark's streaming checkpoint as others read it, and as it is laid out for Spark to go on."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from cairn.driver.coordinator.rewind import Stand, compare
from cairn.errors import RestoreError
from cairn.storage.seen_files import DEFAULT_INTERVAL, find_missing_file
from cairn.storage.source_files import source_lines
from cairn.storage.source_logs import for_setting, source_files
from cairn.storage.spark_log import (
    lay_out,
    lay_out_from,
    read_offsets,
    same_offsets,
)
from cairn.storage.store import Store, open_store
from tests.unit.driver.coordinator.manifests import epoch
from tests.unit.storage.spark_folders import (
    NEW,
    OLD,
    at,
    file_log,
    files_seen,
    offsets,
    paths,
    spark_interval,
    spark_ran,
)


@pytest.fixture
def store() -> Store:
    return open_store("memory:")


def test_offsets_are_the_same_whatever_clock_settings_and_spacing() -> None:
    left = offsets('{"a":{"0":1,"1":2}}', "-", clock=1)
    assert same_offsets(left, offsets('{"a": {"1": 2, "0": 1}}', "-", clock=2) + "\n")
    assert not same_offsets(left, offsets('{"a":{"0":1,"1":3}}', "-"))
    assert not same_offsets(left, offsets('{"a":{"0":1,"1":2}}'))
    assert not same_offsets(left, offsets("-", '{"a":{"0":1,"1":2}}'))


# What is laid out


def test_a_folder_is_laid_out_so_that_spark_resumes_after_the_epoch(store: Store) -> None:
    spark_ran(store, 5, committed=5)
    newest = at(2, '{"n":2}')
    lay_out(newest.spark, NEW, source=store, target=store)
    assert paths(store, NEW) == ["commits/2", "metadata", "offsets/1", "offsets/2"]
    assert read_offsets(store, NEW, 2) == newest.spark.offsets
    assert same_offsets(read_offsets(store, NEW, 1), newest.spark.offsets)
    assert store.get(f"{NEW}/metadata") == b'{"id":"q"}'
    assert store.get(f"{NEW}/commits/2").startswith(b"v1\n")


def test_the_first_batch_is_laid_out_without_one_before_it(store: Store) -> None:
    spark_ran(store, 2, committed=2)
    lay_out(at(0, '{"n":0}').spark, NEW, source=store, target=store)
    assert paths(store, NEW) == ["commits/0", "metadata", "offsets/0"]


def test_a_folder_is_laid_out_when_the_old_one_is_gone(store: Store) -> None:
    lay_out(at(2, '{"n":2}').spark, NEW, source=store, target=store)
    assert paths(store, NEW) == ["commits/2", "metadata", "offsets/1", "offsets/2"]
    # Spark refuses a folder with offsets and no name for the query.
    assert json.loads(store.get(f"{NEW}/metadata"))["id"]


def test_a_folder_laid_out_stands_equal_to_its_epoch(store: Store) -> None:
    spark_ran(store, 5, committed=5)
    lay_out(at(2, '{"n":2}').spark, NEW, source=store, target=store)
    moved = epoch(6, folder=NEW, batch_id=2, offsets=at(2, '{"n":2}').spark.offsets)
    assert compare(store, moved) is Stand.EQUAL


def test_what_other_sources_keep_is_copied_whole(store: Store) -> None:
    store.put(f"{OLD}/sources/0/0", b"v1\nrate start")
    store.put(f"{OLD}/sources/1/3", b"v1\nkafka")
    store.put(f"{OLD}/sources/1/notes", b"else")
    lay_out(at(2, "41", '{"topic":{"0":7}}').spark, NEW, source=store, target=store)
    assert store.get(f"{NEW}/sources/0/0") == b"v1\nrate start"
    assert store.get(f"{NEW}/sources/1/3") == b"v1\nkafka"
    assert store.get(f"{NEW}/sources/1/notes") == b"else"


# The file source's list of files seen


@pytest.mark.parametrize("last", [0, 5, 8, 9, 10, 18, 19, 20, 23])
def test_the_list_of_files_is_cut_after_the_epoch(store: Store, last: int) -> None:
    file_log(store, 23)
    lay_out(at(40, json.dumps({"logOffset": last})).spark, NEW, source=store, target=store)
    assert files_seen(store) == list(range(last + 1))
    numbers = [int(name.split(".")[0]) for name in paths(store, f"{NEW}/sources/0")]
    assert max(numbers) == last, "Spark would take later files for seen"


@pytest.mark.parametrize("last", [0, 8, 9, 10, 15])
def test_entries_that_spark_cleaned_up_are_found_in_a_later_compact_file(
    store: Store, last: int
) -> None:
    file_log(store, 23, keep_from=19)
    lay_out(at(40, json.dumps({"logOffset": last})).spark, NEW, source=store, target=store)
    assert files_seen(store) == list(range(last + 1))


INTERVALS = [1, 2, 3, 4, 7, 10, 25]


def cut(store: Store, last: int, setting: int | None = None) -> str:
    """The folder of a query that goes on after an entry."""
    folder = f"cut/{last}"
    position = at(40, json.dumps({"logOffset": last})).spark
    lay_out(position, folder, source=store, target=store, compact_interval=setting)
    return folder


@pytest.mark.parametrize("interval", INTERVALS)
def test_a_list_that_was_compacted_at_any_interval_is_cut(store: Store, interval: int) -> None:
    file_log(store, 60, interval=interval)
    for last in range(30):
        folder = cut(store, last)
        assert files_seen(store, folder=folder, setting=interval) == list(range(last + 1))
        if last >= 2 * interval:
            # It is not the setting that decides any more.
            assert files_seen(store, folder=folder, setting=5) == list(range(last + 1))


@pytest.mark.parametrize("interval", INTERVALS)
def test_entries_cleaned_up_at_any_interval_are_found_in_a_later_compact_file(
    store: Store, interval: int
) -> None:
    file_log(store, 80, interval=interval, keep_from=40)
    for last in range(0, 40, 3):
        folder = cut(store, last)
        assert files_seen(store, folder=folder, setting=interval) == list(range(last + 1))


@pytest.mark.parametrize(
    ("changed_at", "before", "after"),
    [(3, 10, 25), (3, 1, 10), (9, 10, 3), (9, 3, 10), (12, 10, 3), (12, 4, 2), (33, 10, 3)],
)
def test_a_list_whose_interval_was_changed_between_two_runs_is_cut(
    store: Store, changed_at: int, before: int, after: int
) -> None:
    compacts = [n for n in range(changed_at + 1) if (n + 1) % before == 0]
    file_log(store, changed_at, interval=before)
    file_log(store, 60, interval=spark_interval(after, compacts), first=changed_at + 1)
    for last in range(0, 50, 2):
        folder = cut(store, last, after)
        assert files_seen(store, folder=folder, setting=after) == list(range(last + 1))


@pytest.mark.parametrize("setting", [1, 3, 10, 50])
def test_a_list_that_a_savepoint_carries_is_laid_out_for_the_session_that_starts_from_it(
    store: Store, setting: int
) -> None:
    file_log(store, 40, interval=4)
    store.put(f"{OLD}/sources/1/0", b"v1\nother")
    for last in range(0, 30, 2):
        position = at(40, json.dumps({"logOffset": last}), "41").spark
        carried = for_setting(source_files(store, position), position, setting)
        folder = f"loaded/{last}"
        lay_out_from(position, carried, folder, store)
        assert files_seen(store, folder=folder, setting=setting) == list(range(last + 1))
        assert store.get(f"{folder}/sources/1/0") == b"v1\nother"


@pytest.mark.parametrize("last", [19, 25, 47, 59])
def test_a_list_that_was_cut_is_cut_again(store: Store, last: int) -> None:
    """Spark goes on in the folder that was laid out, and the job is rolled back there too."""
    file_log(store, 23)
    folder = cut(store, 20)
    compacts = [n for n in range(21) if f"{n}.compact" in paths(store, f"{folder}/sources/0")]
    assert spark_interval(DEFAULT_INTERVAL, compacts) == DEFAULT_INTERVAL
    file_log(store, 60, folder=folder, first=21)
    position = msgspec.structs.replace(at(40, json.dumps({"logOffset": last})).spark, folder=folder)
    lay_out(position, "again", source=store, target=store)
    assert files_seen(store, folder="again") == list(range(last + 1))


def test_a_list_of_files_that_is_gone_is_refused_before_files_are_read_again(
    store: Store,
) -> None:
    newest = at(40, json.dumps({"logOffset": 12}))
    with pytest.raises(RestoreError, match="list of files already read by source 0 is gone"):
        lay_out(newest.spark, NEW, source=store, target=store)
    assert paths(store, NEW) == []


def test_a_list_with_a_gap_and_nothing_later_is_refused(store: Store) -> None:
    file_log(store, 12)
    store.delete([f"{OLD}/sources/0/11"])
    with pytest.raises(RestoreError, match="is gone"):
        lay_out(at(40, json.dumps({"logOffset": 12})).spark, NEW, source=store, target=store)


def test_a_file_source_that_has_read_nothing_has_no_list(store: Store) -> None:
    file_log(store, 3)
    lay_out(at(1, json.dumps({"logOffset": -1})).spark, NEW, source=store, target=store)
    assert paths(store, f"{NEW}/sources") == []


def test_a_source_without_an_offset_yet_keeps_its_list(store: Store) -> None:
    """Spark then reads those files as the source's first batch: none is lost."""
    file_log(store, 2)
    lay_out(at(1, "-").spark, NEW, source=store, target=store)
    assert files_seen(store) == [0, 1, 2]


def test_each_source_is_cut_by_its_own_offset(store: Store) -> None:
    file_log(store, 4)
    store.put(f"{OLD}/sources/1/0", b"v1\nother")
    lay_out(at(7, json.dumps({"logOffset": 1}), '{"n":1}').spark, NEW, source=store, target=store)
    assert paths(store, f"{NEW}/sources") == ["0/0", "0/1", "1/0"]


def test_hidden_checksum_files_are_not_copied(store: Store) -> None:
    store.put(f"{OLD}/sources/1/.0.crc", b"x")
    store.put(f"{OLD}/sources/1/0", b"v1\nother")
    lay_out(at(7, "-", '{"n":1}').spark, NEW, source=store, target=store)
    assert paths(store, f"{NEW}/sources") == ["1/0"]


# From one store to another


def test_a_folder_in_another_store_resumes_at_the_same_place(store: Store) -> None:
    other = open_store("memory:")
    spark_ran(store, 5, committed=5)
    file_log(store, 5)
    newest = at(2, json.dumps({"logOffset": 1}))
    before = paths(store, "spark")
    lay_out(newest.spark, NEW, source=store, target=other)
    assert read_offsets(other, NEW, 2) == newest.spark.offsets
    assert files_seen(other) == [0, 1]
    assert paths(store, "spark") == before


def test_a_folder_in_another_store_is_a_query_of_its_own(tmp_path: Path) -> None:
    store, other = open_store(str(tmp_path / "a")), open_store(str(tmp_path / "b"))
    spark_ran(store, 2, committed=2)
    lay_out(at(1, '{"n":1}').spark, NEW, source=store, target=other)
    assert json.loads(other.get(f"{NEW}/metadata"))["id"] != "q"
    assert compare(other, epoch(5, folder=NEW, batch_id=1, offsets=offsets('{"n":1}'))) is (
        Stand.EQUAL
    )


def test_files_of_sources_carried_elsewhere_give_the_same_folder(store: Store) -> None:
    """As a savepoint does: the files travel as bytes, the position in its manifest."""
    file_log(store, 23, keep_from=19)
    store.put(f"{OLD}/sources/1/0", b"v1\nother")
    newest = at(40, json.dumps({"logOffset": 12}), "41", sources="files rate")
    carried = source_files(store, newest.spark)
    assert {name.split("/")[0] for name in carried} == {"0", "1"}
    lay_out(newest.spark, "direct", source=store, target=store)
    other = open_store("memory:")
    position = lay_out_from(newest.spark, carried, NEW, other)
    assert (position.folder, position.sources) == (NEW, ["files", "rate"])
    assert position.offsets == newest.spark.offsets
    assert paths(other, f"{NEW}/sources") == paths(store, "direct/sources")
    assert files_seen(other) == list(range(13))


def test_a_list_that_is_gone_names_the_source(store: Store) -> None:
    newest = at(4, '{"n":1}', json.dumps({"logOffset": 3}), sources="rate files")
    with pytest.raises(RestoreError, match=r"read by source 1 \('files'\) is gone"):
        source_files(store, newest.spark)
    assert source_files(store, newest.spark, only=[0]) == {}


def test_lines_of_sources_follow_two_of_spark_s_own() -> None:
    assert source_lines(offsets("-", '{"n":1}') + "\n") == ["-", '{"n":1}']


@pytest.mark.parametrize("setting", [1, 2, 3, 5, 10, 15, 20, 40])
def test_a_list_that_spark_reads_is_not_laid_out_again(setting: int) -> None:
    """With one compact file left, Spark takes an interval that may not be the setting."""
    for only in range(1, 40):
        interval = spark_interval(setting, [only])
        for last in range(only, only + interval):
            names = {f"{only}.compact", *(str(number) for number in range(only + 1, last + 1))}
            assert find_missing_file(names, last, setting) is None
