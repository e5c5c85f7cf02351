"""verify also reads what lies beside the log: Spark's folder and notes for people."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from cairn.report.job_graph import JobGraph
from cairn.storage import source_logs
from cairn.storage.log import Log, create_or_open_job
from cairn.storage.manifest import Epoch
from cairn.storage.notes import SavepointNote, write_ending, write_graph, write_savepoint_note
from cairn.storage.paths import FAILURES_FOLDER, NOTE_FOLDERS
from cairn.storage.store import Store, open_store
from cairn.storage.verify import verify
from tests.unit.storage.spark_folders import NEW, OLD, file_log, log_line, spark_ran
from tests.unit.storage.test_source_logs import ran


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """A checkpoint with an epoch that has read five lists of files, the first in objects."""
    monkeypatch.setattr(source_logs, "LINES_BYTES_MAX", 200)
    store = open_store("memory:")
    create_or_open_job(store, "j", 8)
    log = Log(store)
    term = log.take_over(host="h", pid=1, wall_ms=1).term
    append(log, ran(store, 4), term)
    return store


def append(log: Log, epoch: Epoch, term: int) -> None:
    log.append(lambda number: msgspec.structs.replace(epoch, number=number, term=term))


def damaged(store: Store, **more: Store) -> list[str]:
    return sorted(damage.path for damage in verify(store, **more).damage)  # type: ignore[arg-type]


def test_a_whole_checkpoint_has_no_damage(store: Store) -> None:
    report = verify(store)
    assert report.ok and not report.orphans and not report.stale_notes, report
    assert report.files > 0


@pytest.mark.parametrize(
    "name",
    ["offsets/2", "offsets/4", "commits/4", "metadata", "sources/0/0", "sources/0/4"],
)
@pytest.mark.parametrize("data", [b"", b"v1", b"\xff", b'v1\n{}\n{"logOffset":77}'])
def test_a_damaged_file_of_spark_s_is_listed(store: Store, name: str, data: bytes) -> None:
    store.put(f"{OLD}/{name}", data)
    if name == "commits/4" and data.startswith(b"v1\n{}"):
        return  # It says all that Spark needs.
    if name == "offsets/2" and data.startswith(b"v1\n{}"):
        return  # No epoch that is kept was made from it.
    assert damaged(store) == [f"{OLD}/{name}"]


@pytest.mark.parametrize("name", ["offsets/4", "metadata", "sources/0/2", "sources/0/4"])
def test_a_file_of_spark_s_that_is_gone_is_listed(store: Store, name: str) -> None:
    store.delete([f"{OLD}/{name}"])
    assert damaged(store) == [f"{OLD}/{name}"]


def test_a_job_that_runs_on_is_no_damage(store: Store) -> None:
    spark_ran(store, 24, committed=23, line='{{"logOffset":{0}}}')
    file_log(store, 23, keep_from=5)
    assert verify(store).ok
    store.delete([f"{OLD}/sources/0/{number}" for number in range(19)])
    assert verify(store).ok
    lines = "\n".join(["v1", *(log_line(number) for number in range(1, 20))])
    store.put(f"{OLD}/sources/0/19.compact", lines.encode())
    assert damaged(store) == [f"{OLD}/sources/0/19.compact"]


@pytest.mark.parametrize("name", ["9.compact", "11", "13"])
def test_the_entry_of_a_list_that_is_gone_is_named(store: Store, name: str) -> None:
    log = Log(store)
    append(log, msgspec.structs.replace(ran(store, 13), parent=None), log.newest_number() or 0)
    store.delete([f"{OLD}/sources/0/{number}" for number in range(9)])
    assert verify(store).ok
    store.delete([f"{OLD}/sources/0/{name}"])
    assert damaged(store) == [f"{OLD}/sources/0/{name}"]


def test_a_list_that_no_epoch_keeps_must_be_whole(store: Store) -> None:
    log = Log(store)
    newest = log.newest_epoch()
    assert newest is not None
    before = msgspec.structs.replace(newest.spark, logs={})
    append(log, msgspec.structs.replace(newest, parent=None, spark=before), newest.term)
    assert verify(store).ok
    store.delete([f"{OLD}/sources/0/2"])
    assert damaged(store) == [f"{OLD}/sources/0/4"]


def test_spark_s_folder_may_be_elsewhere(store: Store) -> None:
    other = open_store("memory:")
    for found in store.list(OLD):
        other.put(found.path, store.get(found.path))
    store.delete_folder("spark")
    assert verify(store).ok, "it may be laid out from the epoch alone"
    assert verify(store, spark_store=other).ok
    other.put(f"{OLD}/sources/0/1", b"v1")
    assert damaged(store, spark_store=other) == [f"{OLD}/sources/0/1"]


def test_a_damaged_object_with_lines_is_listed(store: Store) -> None:
    (path,) = {ref.path for ref in chunks(store)}
    store.put(path, store.get(path)[:-1])
    assert path in damaged(store)
    store.delete([path])
    assert path in damaged(store)


def chunks(store: Store) -> list[source_logs.FileRef]:
    newest = Log(store).newest_epoch()
    assert newest is not None
    return newest.spark.logs[0].chunks


def test_notes_that_cannot_be_read_are_listed(store: Store) -> None:
    write_graph(store, 1, JobGraph(job="j"))
    failure = {"kind": "EpochError", "epoch": 2, "message": "m", "wall_ms": 1}
    store.put(f"{FAILURES_FOLDER}/1-1.json", json.dumps(failure).encode())
    assert verify(store).ok
    notes = [
        "endings/000000000001.json",
        "failures/1-2.json",
        "graph/000000000002.json",
        "group/000000000002.json",
        "restarts/1-2.json",
        "savepoints/1-x.json",
    ]
    assert {note.partition("/")[0] for note in notes} == set(NOTE_FOLDERS)
    for path in notes:
        store.put(path, b'{"cut": ')
    assert damaged(store) == notes
    for path in notes:
        store.put(path, b'{"of": "something else"}')
    assert damaged(store) == notes


def test_a_checkpoint_whose_run_has_ended_has_no_damage(store: Store) -> None:
    write_ending(store, 1, "failed", ValueError("x"))
    assert verify(store).ok


def test_a_note_of_a_savepoint_that_is_not_there_is_stale(store: Store, tmp_path: Path) -> None:
    url = str(tmp_path / "gone")
    write_savepoint_note(store, SavepointNote(id="a", url=url, epoch=2, created_ms=3, bytes=4))
    report = verify(store)
    assert report.ok
    (stale,) = report.stale_notes
    assert stale.path == "savepoints/0000000000003-a.json"
    assert f"no savepoint at {url}" in stale.what
    open_store(url).put("savepoint.json", b"junk")
    assert "damaged" in verify(store).stale_notes[0].what


def test_spark_s_folder_of_an_older_term_is_left_alone(store: Store) -> None:
    store.put(f"{NEW}/offsets/0", b"junk")
    assert verify(store).ok
