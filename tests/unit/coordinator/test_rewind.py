"""Spark resumes right after the newest epoch, from its own folder or from one laid out anew."""

from __future__ import annotations

import json

import pytest

from cairn.coordinator.rewind import (
    COMPACT_INTERVAL,
    Stand,
    compare,
    lay_out,
    read_offsets,
    same_offsets,
    settle,
    spark_folder,
)
from cairn.errors import RestoreError
from cairn.storage.manifest import Epoch
from cairn.storage.store import Store, open_store
from tests.unit.coordinator.manifests import epoch

OLD = "spark/000000000001"
NEW = "spark/000000000009"


@pytest.fixture
def store() -> Store:
    return open_store("memory:")


def offsets(*lines: str, clock: int = 0) -> str:
    return "\n".join(["v1", json.dumps({"batchTimestampMs": clock, "conf": {}}), *lines])


def at(batch_id: int, *lines: str) -> Epoch:
    return epoch(5, folder=OLD, batch_id=batch_id, offsets=offsets(*lines))


def spark_ran(store: Store, batches: int, *, committed: int, line: str = '{{"n":{0}}}') -> None:
    """Spark's folder after so many batches, of which the first few are committed."""
    store.put(f"{OLD}/metadata", b'{"id":"q"}')
    for batch in range(batches):
        store.put(f"{OLD}/offsets/{batch}", offsets(line.format(batch), clock=batch).encode())
    for batch in range(committed):
        store.put(f"{OLD}/commits/{batch}", b'v1\n{"nextBatchWatermarkMs":0}')


def paths(store: Store, folder: str) -> list[str]:
    return [found.path[len(folder) + 1 :] for found in store.list(folder)]


# Where Spark stands


def test_without_an_epoch_spark_starts_fresh_in_a_folder_of_the_term(store: Store) -> None:
    assert settle(store, None, 9) == (NEW, Stand.FRESH)
    assert paths(store, NEW) == []
    assert spark_folder(9) == NEW


def test_a_batch_that_spark_will_run_again_is_behind(store: Store) -> None:
    spark_ran(store, 3, committed=2)
    assert settle(store, at(2, '{"n":2}'), 9) == (OLD, Stand.BEHIND)


def test_a_batch_that_spark_has_committed_is_equal(store: Store) -> None:
    spark_ran(store, 3, committed=3)
    assert settle(store, at(2, '{"n":2}'), 9) == (OLD, Stand.EQUAL)


def test_a_batch_planned_after_the_epoch_changes_nothing(store: Store) -> None:
    spark_ran(store, 4, committed=3)
    assert settle(store, at(2, '{"n":2}'), 9) == (OLD, Stand.EQUAL)


@pytest.mark.parametrize("committed", [3, 4])
def test_batches_that_the_log_does_not_know_are_ahead(store: Store, committed: int) -> None:
    spark_ran(store, 5, committed=committed)
    assert settle(store, at(1, '{"n":1}'), 9) == (NEW, Stand.AHEAD)


def test_other_offsets_of_the_batch_are_different(store: Store) -> None:
    spark_ran(store, 3, committed=2)
    assert settle(store, at(2, '{"n":77}'), 9) == (NEW, Stand.DIFFERENT)


def test_a_batch_that_spark_does_not_know_is_missing(store: Store) -> None:
    assert settle(store, at(2, '{"n":2}'), 9) == (NEW, Stand.MISSING)
    spark_ran(store, 2, committed=2)
    assert compare(store, at(2, '{"n":2}')) is Stand.MISSING


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
    lay_out(newest, NEW, source=store, target=store)
    assert paths(store, NEW) == ["commits/2", "metadata", "offsets/1", "offsets/2"]
    assert read_offsets(store, NEW, 2) == newest.spark.offsets
    assert same_offsets(read_offsets(store, NEW, 1), newest.spark.offsets)
    assert store.get(f"{NEW}/metadata") == b'{"id":"q"}'
    assert store.get(f"{NEW}/commits/2").startswith(b"v1\n")


def test_the_first_batch_is_laid_out_without_one_before_it(store: Store) -> None:
    spark_ran(store, 2, committed=2)
    lay_out(at(0, '{"n":0}'), NEW, source=store, target=store)
    assert paths(store, NEW) == ["commits/0", "metadata", "offsets/0"]


def test_a_folder_is_laid_out_when_the_old_one_is_gone(store: Store) -> None:
    lay_out(at(2, '{"n":2}'), NEW, source=store, target=store)
    assert paths(store, NEW) == ["commits/2", "offsets/1", "offsets/2"]


def test_the_old_folder_is_left_as_it_was(store: Store) -> None:
    spark_ran(store, 5, committed=5)
    store.put(f"{OLD}/sources/0/0", b"v1\nx")
    before = {found.path: store.get(found.path) for found in store.list(OLD)}
    settle(store, at(1, '{"n":1}'), 9)
    assert {found.path: store.get(found.path) for found in store.list(OLD)} == before


def test_a_folder_laid_out_stands_equal_to_its_epoch(store: Store) -> None:
    spark_ran(store, 5, committed=5)
    lay_out(at(2, '{"n":2}'), NEW, source=store, target=store)
    moved = epoch(6, folder=NEW, batch_id=2, offsets=at(2, '{"n":2}').spark.offsets)
    assert compare(store, moved) is Stand.EQUAL


def test_what_other_sources_keep_is_copied_whole(store: Store) -> None:
    store.put(f"{OLD}/sources/0/0", b"v1\nrate start")
    store.put(f"{OLD}/sources/1/3", b"v1\nkafka")
    store.put(f"{OLD}/sources/1/notes", b"else")
    lay_out(at(2, "41", '{"topic":{"0":7}}'), NEW, source=store, target=store)
    assert store.get(f"{NEW}/sources/0/0") == b"v1\nrate start"
    assert store.get(f"{NEW}/sources/1/3") == b"v1\nkafka"
    assert store.get(f"{NEW}/sources/1/notes") == b"else"


# The file source's list of files seen


def line(batch: int) -> str:
    return json.dumps({"path": f"file:///in/{batch}", "timestamp": 1, "batchId": batch})


def file_log(store: Store, last: int, *, keep_from: int = 0) -> None:
    """What Spark has in sources/0 after entry `last`; older entries are cleaned up."""
    for entry in range(keep_from, last + 1):
        if (entry + 1) % COMPACT_INTERVAL == 0:
            lines = [line(each) for each in range(entry + 1)]
            store.put(f"{OLD}/sources/0/{entry}.compact", "\n".join(["v1", *lines]).encode())
        else:
            store.put(f"{OLD}/sources/0/{entry}", f"v1\n{line(entry)}".encode())


def files_seen(store: Store) -> list[int]:
    """The entries a new Spark would read: from the last compact file on."""
    names = paths(store, f"{NEW}/sources/0")
    numbers = sorted(int(name.split(".")[0]) for name in names)
    compacts = [int(name.split(".")[0]) for name in names if name.endswith(".compact")]
    start = max(compacts, default=0)
    assert numbers[numbers.index(start) :] == list(range(start, numbers[-1] + 1)), "a gap"
    seen = []
    for number in numbers:
        if number >= start:
            name = f"{number}.compact" if (number + 1) % COMPACT_INTERVAL == 0 else str(number)
            head, *lines = store.get(f"{NEW}/sources/0/{name}").decode().split("\n")
            assert head == "v1"
            seen += [json.loads(text)["batchId"] for text in lines if text]
    return sorted(seen)


@pytest.mark.parametrize("last", [0, 5, 8, 9, 10, 18, 19, 20, 23])
def test_the_list_of_files_is_cut_after_the_epoch(store: Store, last: int) -> None:
    file_log(store, 23)
    lay_out(at(40, json.dumps({"logOffset": last})), NEW, source=store, target=store)
    assert files_seen(store) == list(range(last + 1))
    numbers = [int(name.split(".")[0]) for name in paths(store, f"{NEW}/sources/0")]
    assert max(numbers) == last, "Spark would take later files for seen"


@pytest.mark.parametrize("last", [0, 8, 9, 10, 15])
def test_entries_that_spark_cleaned_up_are_found_in_a_later_compact_file(
    store: Store, last: int
) -> None:
    file_log(store, 23, keep_from=19)
    lay_out(at(40, json.dumps({"logOffset": last})), NEW, source=store, target=store)
    assert files_seen(store) == list(range(last + 1))


def test_a_list_of_files_that_is_gone_is_refused_before_files_are_read_again(
    store: Store,
) -> None:
    newest = at(40, json.dumps({"logOffset": 12}))
    with pytest.raises(RestoreError, match="list of files already read by source 0 is gone"):
        lay_out(newest, NEW, source=store, target=store)
    file_log(store, 11)
    with pytest.raises(RestoreError, match="read every file again") as caught:
        settle(store, newest, 9)
    assert caught.value.file == f"{OLD}/sources/0/12"


def test_a_list_with_a_gap_and_nothing_later_is_refused(store: Store) -> None:
    file_log(store, 12)
    store.delete([f"{OLD}/sources/0/11"])
    with pytest.raises(RestoreError, match="is gone"):
        lay_out(at(40, json.dumps({"logOffset": 12})), NEW, source=store, target=store)


def test_a_file_source_that_has_read_nothing_has_no_list(store: Store) -> None:
    file_log(store, 3)
    lay_out(at(1, json.dumps({"logOffset": -1})), NEW, source=store, target=store)
    assert paths(store, f"{NEW}/sources") == []


def test_a_source_without_an_offset_yet_keeps_its_list(store: Store) -> None:
    """Spark then reads those files as the source's first batch: none is lost."""
    file_log(store, 2)
    lay_out(at(1, "-"), NEW, source=store, target=store)
    assert files_seen(store) == [0, 1, 2]


def test_each_source_is_cut_by_its_own_offset(store: Store) -> None:
    file_log(store, 4)
    store.put(f"{OLD}/sources/1/0", b"v1\nother")
    lay_out(at(7, json.dumps({"logOffset": 1}), '{"n":1}'), NEW, source=store, target=store)
    assert paths(store, f"{NEW}/sources") == ["0/0", "0/1", "1/0"]


def test_hidden_checksum_files_are_not_copied(store: Store) -> None:
    store.put(f"{OLD}/sources/1/.0.crc", b"x")
    store.put(f"{OLD}/sources/1/0", b"v1\nother")
    lay_out(at(7, "-", '{"n":1}'), NEW, source=store, target=store)
    assert paths(store, f"{NEW}/sources") == ["1/0"]
