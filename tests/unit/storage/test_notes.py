"""Notes in a checkpoint: kept for people, never in the way of a job."""

from __future__ import annotations

import threading
from pathlib import Path

from cairn.errors import CommitConflictError, EpochError
from cairn.storage.failures import Failures, read_failures
from cairn.storage.notes import read_group, read_notes, write_group, write_note
from cairn.storage.paths import FAILURES_FOLDER, NOTE_FOLDERS
from cairn.storage.removal import delete_checkpoint
from cairn.storage.store import open_store
from cairn.testing.faulty_store import FaultyStore
from tests.unit.storage.leading import Driver, lay_spark_folder, new_store


def test_the_last_notes_are_kept_newest_first() -> None:
    store = open_store("memory:")
    for at in range(7):
        assert write_note(store, "graph", f"{at:03d}", {"at": at}, keep=3)
    assert [(name, note["at"]) for name, note in read_notes(store, "graph", dict)] == [
        ("006", 6), ("005", 5), ("004", 4),
    ]  # fmt: skip


def test_a_note_that_is_damaged_is_left_out() -> None:
    store = open_store("memory:")
    write_note(store, "graph", "1", {"fine": True}, keep=3)
    store.put("graph/2.json", b"{half")
    store.put("graph/3.json", b"[]")
    assert [name for name, _ in read_notes(store, "graph", dict)] == ["1"]


def test_a_store_that_is_away_is_no_failure_of_a_note() -> None:
    class Away(FaultyStore):
        def put(self, path: str, data: bytes) -> None:
            raise OSError("away")

        def list(self, prefix: str = "") -> list:  # type: ignore[type-arg]
            raise OSError("away")

    store = Away(open_store("memory:"))
    assert not write_note(store, "graph", "1", {}, keep=3)
    assert read_notes(store, "graph", dict) == []


def test_a_driver_that_was_fenced_leaves_no_note() -> None:
    store = open_store("memory:")
    Failures(store, "job").note_end(CommitConflictError("another driver is ahead"), 3)
    assert store.list(FAILURES_FOLDER) == []


def test_an_error_that_is_not_ours_is_told_with_its_traceback() -> None:
    store = open_store("memory:")
    try:
        raise ZeroDivisionError("nothing to share")
    except ZeroDivisionError as error:
        Failures(store, "job").note_end(error, 3)
    (found,) = read_failures(store)
    assert (found.kind, found.message, found.epoch) == (
        "ZeroDivisionError", "nothing to share", 3,
    )  # fmt: skip
    assert "test_notes.py" in found.traceback


def test_a_driver_without_a_group_removes_the_notes_of_earlier_ones_only() -> None:
    store = new_store()
    write_group(store, 12, "store:?lease=10s")
    write_group(store, 9, None)
    write_group(store, 12, None)
    assert read_group(store) == "store:?lease=10s"
    write_group(store, 13, None)
    assert read_group(store) is None


def test_notes_go_with_their_checkpoint(tmp_path: Path) -> None:
    store = new_store(str(tmp_path / "c"))
    Driver(store, folder=lay_spark_folder(store, 1)).epochs(2)
    for folder in NOTE_FOLDERS:
        write_note(store, folder, "1", {}, keep=3)
    delete_checkpoint(store)
    assert not (tmp_path / "c").exists()


def test_failures_that_come_faster_than_the_store_takes_them_are_all_kept() -> None:
    may_write = threading.Event()

    class Slow(FaultyStore):
        def put(self, path: str, data: bytes) -> None:
            may_write.wait(20)
            super().put(path, data)

    store = open_store("memory:")
    failures = Failures(Slow(store), "job")
    for attempt, cause in enumerate("AABCC", 1):
        failures.note(EpochError(cause), 1, attempt)
    may_write.set()
    failures.settle()
    found = [(each.message, each.attempts) for each in read_failures(store)]
    assert found == [("C", 5), ("B", 3), ("A", 2)]
