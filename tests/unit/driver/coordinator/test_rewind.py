"""Spark goes on right after the newest epoch, from its own folder or from one laid out anew."""

from __future__ import annotations

import json

import msgspec
import pytest

from cairn.driver.coordinator.rewind import Position, Stand, compare, give_up, settle, spark_folder
from cairn.errors import RestoreError
from cairn.storage.manifest import Epoch
from cairn.storage.source_files import source_lines
from cairn.storage.spark_log import read_offsets
from cairn.storage.store import Store, open_store
from tests.unit.driver.coordinator.manifests import epoch
from tests.unit.storage.spark_folders import (
    NEW,
    OLD,
    at,
    file_log,
    files_seen,
    paths,
    spark_ran,
)


@pytest.fixture
def store() -> Store:
    return open_store("memory:")


def settled(
    store: Store, newest: Epoch | None, *sources: str, reset: tuple[str, ...] = ()
) -> Position:
    return settle(newest, 9, store=store, sources=sources or ("a",), reset_sources=reset)


# Where Spark stands


def test_without_an_epoch_spark_starts_fresh_in_a_folder_of_the_term(store: Store) -> None:
    assert settled(store, None) == (NEW, Stand.FRESH)
    assert paths(store, NEW) == []
    assert spark_folder(9) == NEW


def test_a_batch_that_spark_will_run_again_is_behind(store: Store) -> None:
    spark_ran(store, 3, committed=2)
    assert settled(store, at(2, '{"n":2}')) == (OLD, Stand.BEHIND)


def test_a_batch_that_spark_has_committed_is_equal(store: Store) -> None:
    spark_ran(store, 3, committed=3)
    assert settled(store, at(2, '{"n":2}')) == (OLD, Stand.EQUAL)


def test_a_batch_planned_after_the_epoch_is_planned_again(store: Store) -> None:
    spark_ran(store, 4, committed=3)
    assert settled(store, at(2, '{"n":2}')) == (NEW, Stand.PLANNED)


@pytest.mark.parametrize("committed", [3, 4])
def test_batches_that_the_log_does_not_know_are_ahead(store: Store, committed: int) -> None:
    spark_ran(store, 5, committed=committed)
    assert settled(store, at(1, '{"n":1}')) == (NEW, Stand.AHEAD)


def test_other_offsets_of_the_batch_are_different(store: Store) -> None:
    spark_ran(store, 3, committed=2)
    assert settled(store, at(2, '{"n":77}')) == (NEW, Stand.DIFFERENT)


def test_a_batch_that_spark_does_not_know_is_missing(store: Store) -> None:
    assert settled(store, at(2, '{"n":2}')) == (NEW, Stand.MISSING)
    spark_ran(store, 2, committed=2)
    assert compare(store, at(2, '{"n":2}')) is Stand.MISSING


def test_the_old_folder_is_left_as_it_was(store: Store) -> None:
    spark_ran(store, 5, committed=5)
    store.put(f"{OLD}/sources/0/0", b"v1\nx")
    before = {found.path: store.get(found.path) for found in store.list(OLD)}
    settled(store, at(1, '{"n":1}'))
    assert {found.path: store.get(found.path) for found in store.list(OLD)} == before


def test_what_cannot_be_laid_out_is_refused(store: Store) -> None:
    newest = at(40, json.dumps({"logOffset": 12}))
    file_log(store, 11)
    with pytest.raises(RestoreError, match="every file would be read again") as caught:
        settled(store, newest)
    assert caught.value.file == f"{OLD}/sources/0/12"


def test_a_folder_that_was_laid_out_for_an_epoch_is_gone_on_with(store: Store) -> None:
    spark_ran(store, 5, committed=5)
    assert settled(store, at(2, '{"n":2}')).stand is Stand.AHEAD
    moved = epoch(6, folder=NEW, batch_id=2, offsets=at(2, '{"n":2}').spark.offsets)
    assert settle(moved, 11, store=store, sources=["a"]) == (NEW, Stand.EQUAL)


# Sources by name


def lines(store: Store, batch_id: int = 0) -> list[str]:
    return source_lines(read_offsets(store, NEW, batch_id))


def two(batch_id: int = 0) -> Epoch:
    """An epoch made from files, of which three were read, and a topic."""
    return at(batch_id, json.dumps({"logOffset": 2}), '{"t":{"0":7}}', sources="files topic")


def test_the_same_sources_in_the_same_order_go_on_in_spark_s_own_folder(store: Store) -> None:
    spark_ran(store, 3, committed=3)
    newest = at(2, '{"n":2}', sources="a")
    assert settled(store, newest, "a") == (OLD, Stand.EQUAL)


def test_an_epoch_that_does_not_know_its_sources_is_taken_to_have_the_same(store: Store) -> None:
    spark_ran(store, 3, committed=3)
    assert settled(store, at(2, '{"n":2}'), "a") == (OLD, Stand.EQUAL)


@pytest.mark.parametrize(
    ("sources", "files_at", "expected"),
    [
        ("topic files", 1, ["topic", "files"]),
        ("files topic more", 0, ["files", "topic", "-"]),
        ("more files topic", 1, ["-", "files", "topic"]),
        ("files", 0, ["files"]),
        ("topic more files", 2, ["topic", "-", "files"]),
    ],
    ids=["swapped", "added last", "added first", "dropped", "all at once"],
)
def test_sources_keep_their_positions_and_lists_by_name(
    store: Store, sources: str, files_at: int, expected: list[str]
) -> None:
    file_log(store, 5)
    store.put(f"{OLD}/sources/1/0", b"of the topic")
    assert settled(store, two(), *sources.split()) == (NEW, Stand.SOURCES)
    known = {"files": '{"logOffset": 2}', "topic": '{"t":{"0":7}}', "-": "-"}
    assert lines(store) == [known[name] for name in expected]
    assert files_seen(store, files_at) == [0, 1, 2]
    kept = {name.split("/")[0] for name in paths(store, f"{NEW}/sources")}
    assert kept == {str(at) for at, name in enumerate(expected) if name != "-"}
    if "topic" in expected:
        place = expected.index("topic")
        assert store.get(f"{NEW}/sources/{place}/0") == b"of the topic"
    assert store.get(f"{NEW}/commits/0").startswith(b"v1\n")


def test_spark_s_own_lines_of_the_offsets_are_kept(store: Store) -> None:
    file_log(store, 2)
    settled(store, two(4), "topic", "files")
    for batch_id in (3, 4):
        text = read_offsets(store, NEW, batch_id)
        assert text.split("\n")[:2] == two().spark.offsets.split("\n")[:2]


def test_a_source_that_is_reset_loses_its_position_and_its_list(store: Store) -> None:
    file_log(store, 5)
    reset = settled(store, two(), "files", "topic", reset=("files",))
    assert reset == (NEW, Stand.SOURCES)
    assert lines(store) == ["-", '{"t":{"0":7}}']
    assert paths(store, f"{NEW}/sources") == []


def test_the_list_of_a_source_that_is_reset_or_dropped_may_be_gone(store: Store) -> None:
    settled(store, two(), "files", "topic", reset=("files",))
    assert lines(store) == ["-", '{"t":{"0":7}}']
    settled(store, two(), "topic")
    assert lines(store) == ['{"t":{"0":7}}']


def test_where_no_source_keeps_a_position_the_folder_is_fresh(store: Store) -> None:
    file_log(store, 5)
    assert settled(store, two(), "other") == (NEW, Stand.SOURCES)
    assert settled(store, two(), "files", "topic", reset=("files", "topic")).folder == NEW
    assert paths(store, NEW) == []


def test_positions_that_cannot_be_told_apart_are_never_guessed(store: Store) -> None:
    """A source that is two inputs to Spark has two lines."""
    newest = at(2, '{"n":1}', '{"n":2}', sources="both")
    spark_ran(store, 1, committed=1)
    with pytest.raises(RestoreError, match="offsets with the sources both, more"):
        settled(store, newest, "both", "more")
    assert settled(store, newest, "both").stand is Stand.MISSING
    assert lines(store, 2) == ['{"n":1}', '{"n":2}']


# Nothing read yet


def unread(sources: str = "") -> Epoch:
    """Of a savepoint that was made of nothing."""
    made = epoch(2, folder=f"{OLD}-savepoint", batch_id=-1, offsets="")
    spark = msgspec.structs.replace(made.spark, sources=sources.split())
    return msgspec.structs.replace(made, spark=spark)


@pytest.mark.parametrize("reset", [(), ("a",)])
@pytest.mark.parametrize("sources", ["", "a"])
def test_an_epoch_from_before_the_first_batch_starts_every_source_at_its_beginning(
    store: Store, sources: str, reset: tuple[str, ...]
) -> None:
    made = unread(sources)
    assert settled(store, made, reset=reset) == (NEW, Stand.SOURCES)
    assert store.list() == [], "there is nothing to lay out"
    # Planned, and never committed: it is planned again, from the beginning.
    store.put(f"{NEW}/offsets/0", b'v1\n{}\n{"n":0}')
    assert settle(made, 11, store=store, sources=["a"]).folder == spark_folder(11)


def test_what_a_driver_has_planned_after_such_an_epoch_is_given_up(store: Store) -> None:
    made = unread()
    begun = give_up(made, 9, store=store, sources=["a"])
    assert begun == (NEW, Stand.GIVEN_UP) and store.list() == []
    store.put(f"{NEW}/offsets/0", b'v1\n{}\n{"n":0}')
    after = give_up(made, 11, store=store, sources=["a"])
    assert source_lines(read_offsets(store, after.folder, 0)) == ['{"n":0}']


# On the driver's disk


def test_a_folder_on_the_drivers_disk_is_written_from_the_epoch_at_every_start(
    store: Store,
) -> None:
    """Also if a folder of an earlier run is in the checkpoint: Spark cannot write to it."""
    spark_ran(store, 3, committed=3)
    newest = at(2, '{"n":2}')
    disk = open_store("memory:")
    before = store.list()
    position = settle(newest, 9, store=store, target=disk, sources=["a"])
    assert position == (NEW, Stand.ELSEWHERE)
    assert source_lines(read_offsets(disk, NEW, 2)) == ['{"n":2}']
    assert store.list() == before
