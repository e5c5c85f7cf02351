"""The epoch keeps what sources keep in Spark's folder, and the folder is laid out from it."""

from __future__ import annotations

import json

import msgspec
import pytest

from cairn.driver.coordinator.rewind import Stand, compare, settle
from cairn.errors import CorruptFileError, RestoreError
from cairn.storage import source_logs
from cairn.storage.manifest import Epoch, SourceLog, decode_record, encode_epoch
from cairn.storage.source_files import source_lines
from cairn.storage.source_logs import (
    advance,
    find_differing_file,
    log_of_files,
    read_lines,
    source_files,
)
from cairn.storage.spark_log import lay_out, move_logs
from cairn.storage.store import Store, open_store
from tests.unit.storage.spark_folders import (
    NEW,
    OLD,
    at,
    file_log,
    files_seen,
    log_line,
    spark_ran,
)


@pytest.fixture
def store() -> Store:
    return open_store("memory:")


def offset(last: int) -> str:
    return json.dumps({"logOffset": last})


def kept(store: Store, last: int, before: Epoch | None = None) -> Epoch:
    """The epoch after entry `last` of the list of files, each entry a batch."""
    epoch = at(last, offset(last))
    logs = {} if before is None else before.spark.logs
    spark = advance(logs, store, epoch.spark, checkpoint=store, term=7)
    return msgspec.structs.replace(epoch, spark=spark)


def ran(store: Store, last: int) -> Epoch:
    """Spark's folder and the newest epoch, after the batches of entries 0 to `last`."""
    spark_ran(store, last + 1, committed=last + 1, line='{{"logOffset":{0}}}')
    newest = None
    for number in range(last + 1):
        file_log(store, number, keep_from=number)
        newest = kept(store, number, newest)
    assert newest is not None
    return newest


def lines(store: Store, epoch: Epoch) -> list[str]:
    return read_lines(store, epoch.spark.logs[0])


@pytest.mark.parametrize("last", [0, 1, 8, 9, 10, 19, 25])
def test_an_epoch_keeps_the_list_of_files_of_its_batches(store: Store, last: int) -> None:
    newest = ran(store, last)
    assert lines(store, newest) == [log_line(number) for number in range(last + 1)]
    assert compare(store, newest) is Stand.EQUAL


def test_a_batch_reads_the_files_of_its_own_entry_only(store: Store) -> None:
    newest = ran(store, 24)
    store.delete([f"{OLD}/sources/0/{name}" for name in ("9.compact", "19.compact", "20")])
    file_log(store, 25, keep_from=25)
    assert lines(store, kept(store, 25, newest)) == [log_line(number) for number in range(26)]


def test_many_lines_go_into_a_few_objects_and_the_manifest_stays_small(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_logs, "LINES_BYTES_MAX", 300)
    newest, sizes = None, []
    for number in range(400):
        file_log(store, number, keep_from=number)
        newest = kept(store, number, newest)
        sizes.append(len(newest.spark.logs[0].chunks))
    assert newest is not None
    assert max(sizes) < 40
    assert len(encode_epoch(newest, None)) < 10_000
    assert lines(store, newest) == [log_line(number) for number in range(400)]
    store.delete_folder("spark")
    lay_out(newest.spark, NEW, source=store, target=store)
    assert files_seen(store) == list(range(400))


def test_what_is_kept_survives_the_manifest(store: Store) -> None:
    newest = ran(store, 3)
    log = SourceLog(files={"0": b"\x00v1\n{}"})
    spark = msgspec.structs.replace(newest.spark, logs={**newest.spark.logs, 1: log})
    newest = msgspec.structs.replace(newest, spark=spark)
    stored = decode_record(encode_epoch(newest, None), "epoch")
    assert stored.spark == newest.spark  # type: ignore[union-attr]


DAMAGE = {
    "cut to its head": lambda data: data.split(b"\n")[0],
    "empty": lambda data: b"",
    "gone": lambda data: None,
    "a bit flipped": lambda data: data.replace(b"/in/", b"/im/"),
    "another's content": lambda data: f"v1\n{log_line(0)}".encode(),
    "not text": lambda data: b"\xff" + data,
}


@pytest.mark.parametrize("last", [4, 9, 13])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_list_of_files_is_laid_out_again(store: Store, last: int, damage: str) -> None:
    newest = ran(store, last)
    names = [f"{last}.compact"] if last == 9 else [str(last)]
    names += ["9.compact"] if last > 9 else ["0"] if last < 9 else []
    for name in names:
        path = f"{OLD}/sources/0/{name}"
        whole = store.get(path)
        damaged = DAMAGE[damage](whole)
        if damaged == whole:
            continue
        store.delete([path]) if damaged is None else store.put(path, damaged)
        assert settle(newest, 9, store=store, sources=["a"]) == (NEW, Stand.DAMAGED)
        assert files_seen(store) == list(range(last + 1))
        store.put(path, whole)
    assert compare(store, newest) is Stand.EQUAL


def test_an_entry_that_no_epoch_knows_is_read_again_from_the_folder_of_files(store: Store) -> None:
    """It may be damaged: a copy of another entry would be read as new files."""
    newest = ran(store, 4)
    store.put(f"{OLD}/sources/0/5", f"v1\n{log_line(2)}".encode())
    assert settle(newest, 9, store=store, sources=["a"]) == (NEW, Stand.DAMAGED)
    assert files_seen(store) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["metadata", "commits/4", "offsets/3", "offsets/4"])
@pytest.mark.parametrize("data", [b"", b"v1", b"\xff\x00", b"{", None])
def test_a_damaged_file_of_spark_s_is_laid_out_again(
    store: Store, name: str, data: bytes | None
) -> None:
    newest = ran(store, 4)
    path = f"{OLD}/{name}"
    store.delete([path]) if data is None else store.put(path, data)
    settled = settle(newest, 9, store=store, sources=["a"])
    if name == "commits/4" and data is None:
        # As after a crash before Spark's own commit: the batch is skipped.
        assert settled == (OLD, Stand.BEHIND)
        return
    assert settled.folder == NEW and settled.stand in (Stand.DAMAGED, Stand.MISSING)
    assert (
        compare(
            store,
            msgspec.structs.replace(
                newest, spark=msgspec.structs.replace(newest.spark, folder=NEW)
            ),
        )
        is Stand.EQUAL
    )


def test_a_folder_that_was_laid_out_is_gone_on_with(store: Store) -> None:
    newest = ran(store, 13)
    lay_out(newest.spark, NEW, source=store, target=store)
    moved = msgspec.structs.replace(newest.spark, folder=NEW)
    assert compare(store, msgspec.structs.replace(newest, spark=moved)) is Stand.EQUAL
    store.put(f"{NEW}/sources/0/14", f"v1\n{log_line(14)}".encode())
    after = msgspec.structs.replace(moved, offsets=at(14, offset(14)).spark.offsets)
    after = advance(newest.spark.logs, store, after, checkpoint=store, term=7)
    assert find_differing_file(store, after, checkpoint=store) is None


def test_where_a_source_began_is_laid_out_again(store: Store) -> None:
    spark_ran(store, 3, committed=3)
    store.put(f"{OLD}/sources/0/0", b"\x00v1\n17")
    epoch = at(2, '{"n":2}')
    spark = advance({}, store, epoch.spark, checkpoint=store, term=7)
    assert spark.logs[0].files == {"0": b"\x00v1\n17"}
    newest = msgspec.structs.replace(epoch, spark=spark)
    assert compare(store, newest) is Stand.EQUAL
    store.put(f"{OLD}/sources/0/0", b"\x00v1\n18")
    assert find_differing_file(store, spark, checkpoint=store) == f"{OLD}/sources/0/0"
    assert settle(newest, 9, store=store, sources=["a"]) == (NEW, Stand.DAMAGED)
    assert store.get(f"{NEW}/sources/0/0") == b"\x00v1\n17"


def test_an_entry_without_lines_is_refused_before_its_batch_runs(store: Store) -> None:
    newest = ran(store, 4)
    store.put(f"{OLD}/sources/0/5", b"v1")
    with pytest.raises(RestoreError, match="is gone") as caught:
        kept(store, 5, newest)
    assert caught.value.file == f"{OLD}/sources/0/5"


def test_an_offset_that_goes_back_is_refused(store: Store) -> None:
    newest = ran(store, 4)
    with pytest.raises(RestoreError, match="goes back"):
        kept(store, 3, newest)


def test_a_damaged_object_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_logs, "LINES_BYTES_MAX", 100)
    newest = ran(store, 4)
    ref = newest.spark.logs[0].chunks[0]
    store.put(ref.path, store.get(ref.path).replace(b"/in/0", b"/in/9"))
    with pytest.raises(CorruptFileError, match=ref.path):
        source_files(store, newest.spark)


def test_a_list_that_older_epochs_did_not_keep_is_taken_over_whole(store: Store) -> None:
    file_log(store, 23, keep_from=19)
    newest = kept(store, 23)
    assert lines(store, newest) == [log_line(number) for number in range(24)]


@pytest.mark.parametrize("last", [3, 9, 14])
def test_what_a_savepoint_carries_becomes_what_its_first_epoch_keeps(
    store: Store, last: int
) -> None:
    newest = ran(store, last)
    other = open_store("memory:")
    files = {**source_files(store, newest.spark), "1/0": b"\x00v1\n17", "1/notes": b"else"}
    spark = at(last, offset(last), '{"n":2}').spark
    found = log_of_files(files, spark, checkpoint=other, term=1)
    assert read_lines(other, found[0]) == lines(store, newest)
    assert found[0].last == last
    assert found[1].files == {"0": b"\x00v1\n17"}


def test_what_is_kept_moves_with_its_source(store: Store) -> None:
    log = SourceLog(last=2, lines=["x"])
    spark = msgspec.structs.replace(
        at(2, offset(2), '{"t":1}', sources="files topic").spark, logs={0: log}
    )
    assert source_lines(spark.offsets) == [offset(2), '{"t":1}']
    assert move_logs(spark, ["topic", "files"]) == {1: log}
    assert move_logs(spark, ["files", "topic"]) == {0: log}
    assert move_logs(spark, ["files", "topic"], ["files"]) == {}
    assert move_logs(spark, ["topic"]) == {}
