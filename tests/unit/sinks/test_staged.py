"""Rows that ride in the epoch: in the checkpoint until they are published, and not after."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cairn.errors import CommitError, CorruptFileError
from cairn.sinks import Foreach, PublishedEpoch
from cairn.sinks.base import Execution
from cairn.sinks.staged import Staged, StagedFile
from cairn.storage.store import open_store
from cairn.testing import Fault, FaultyStore, SimulatedCrash, simulated_crash
from tests.places.base import batch, context, prepared


class Noted(Staged):
    """Notes what it is to publish."""

    def __init__(self) -> None:
        self.published: list[tuple[str, list[Any]]] = []

    def publish(self, epoch: PublishedEpoch, files: Sequence[StagedFile]) -> None:
        rows = [
            tuple(row.values()) for f in files for b in self.batches(f) for row in b.to_pylist()
        ]
        self.published.append((epoch.key, rows))


def open_sink(folder: Path, sink: Staged | None = None) -> Any:
    sink = sink or Noted()
    sink.open(context(folder, "job", "out", None))
    return sink


def there(folder: Path) -> list[str]:
    return [found.path for found in open_store(str(folder / "checkpoint")).list()]


def test_rows_wait_in_the_checkpoint_and_leave_a_mark(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    found = prepared(sink, 7, (1, "a"), (2, "b"), subtask=3)
    (path,) = there(tmp_path)
    assert path.startswith("wal/job/out/staged/000000000007-0000000-0000000-00003-00000-")
    sink.commit(7, [found])
    assert sink.published == [("job/out/7/0", [(1, "a"), (2, "b")])]
    assert there(tmp_path) == ["wal/job/out/published/000000000007-00000"]


def test_rows_come_in_order_of_round_and_subtask(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    places = [(1, 0), (0, 1), (0, 0), (1, 1)]
    found = [prepared(sink, 2, (n, "x"), subtask=subtask, round=n) for n, subtask in places]
    sink.commit(2, found)
    assert [k for k, _ in sink.published[0][1]] == [0, 0, 1, 1]


def test_parts_of_an_epoch_are_published_one_by_one_and_once(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    found = [prepared(sink, 2, (n, "x"), round=n) for n in range(2)]
    for part in (0, 0, 1, 1, 0):
        sink.commit(2, [found[part]], part)
    assert [key for key, _ in sink.published] == ["job/out/2/0", "job/out/2/1"]


def test_many_rows_are_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.sinks.staged.FILE_BYTES_TARGET", 1)
    monkeypatch.setattr("cairn.sinks.staged.GROUP_ROWS", 1)
    sink = open_sink(tmp_path)
    rows = [(n, "x") for n in range(12)]
    found = prepared(sink, 2, *rows)
    assert len(found["files"]) == len(there(tmp_path)) == 12
    sink.commit(2, [found])
    assert sink.published[0][1] == rows


def test_files_do_not_depend_on_how_rows_came_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.sinks.staged.GROUP_ROWS", 4)
    sink = open_sink(tmp_path)
    rows = [(n, "x" * n) for n in range(11)]
    one_by_one = prepared(sink, 2, *rows)
    for cuts in ([0, 11], [0, 3, 5, 11], [0, 4, 8, 11]):
        writer = sink.writer(2, 0, Execution(attempt=1))
        for start, end in itertools.pairwise(cuts):
            writer.write(batch(*rows[start:end]))
        assert writer.prepare() == one_by_one
    sink.commit(2, [one_by_one])
    assert sink.published[0][1] == rows


@pytest.mark.parametrize("gone", [0, 1])
def test_nothing_is_published_when_a_file_is_gone(tmp_path: Path, gone: int) -> None:
    seen: list[Any] = []
    sink = open_sink(tmp_path, Foreach(lambda row, epoch: seen.append(row)))
    found = [prepared(sink, 2, (s, "x"), subtask=s) for s in range(2)]
    sink._store.delete([sink.staging_path(found[gone]["files"][0]["name"])])
    for _ in range(2):
        with pytest.raises(CommitError, match="nothing is published"):
            sink.commit(2, found)
    assert seen == []


def test_what_is_recovered_away_cannot_be_committed(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    found = prepared(sink, 2, (1, "a"))
    later = prepared(sink, 5, (2, "b"))
    sink.recover(5)
    with pytest.raises(CommitError, match="missing"):
        sink.commit(2, [found])
    sink.commit(5, [later])
    assert [key for key, _ in sink.published] == ["job/out/5/0"]


def test_what_an_earlier_epoch_left_goes_with_the_next_one(tmp_path: Path) -> None:
    """A publication that was given up, an attempt that was not named: nobody restarts for it."""
    sink = open_sink(tmp_path)
    prepared(sink, 2, (1, "given up"))
    later = prepared(sink, 4, (2, "of a batch to come"))
    sink.commit(3, [prepared(sink, 3, (1, "a"))])
    sink.commit(4, [later])
    assert [key for key, _ in sink.published] == ["job/out/3/0", "job/out/4/0"]
    assert {path.split("/")[-2] for path in there(tmp_path)} == {"published"}


def test_a_staged_file_has_only_what_its_one_reader_needs(tmp_path: Path) -> None:
    prepared(open_sink(tmp_path), 2, (1, "a"))
    (path,) = there(tmp_path)
    group = pq.read_metadata(tmp_path / "checkpoint" / path).row_group(0)
    for column in (group.column(i) for i in range(group.num_columns)):
        assert column.statistics is None and not column.has_dictionary_page


def test_a_damaged_file_is_named_and_not_published(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    found = prepared(sink, 2, (1, "a"))
    (path,) = there(tmp_path)
    file = tmp_path / "checkpoint" / path
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptFileError, match=r"damaged(.|\n)*staged/0000"):
        sink.commit(2, [found])
    assert sink.published == []


def test_a_crash_before_the_mark_publishes_again_under_the_same_key(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    found = prepared(sink, 2, (1, "a"))
    with simulated_crash("driver.sink.unmarked"), pytest.raises(SimulatedCrash):
        sink.commit(2, [found])
    sink.commit(2, [found])
    assert sink.published == [("job/out/2/0", [(1, "a")])] * 2


@pytest.mark.parametrize("kind", ["before", "after"])
def test_files_whose_removal_failed_are_removed_by_the_next_try(tmp_path: Path, kind: Any) -> None:
    sink = open_sink(tmp_path)
    found = prepared(sink, 2, (1, "a"))
    sink._store = FaultyStore(sink._store, [Fault("delete", 1, kind)])
    with pytest.raises(OSError, match="injected"):
        sink.commit(2, [found])
    sink.commit(2, [found])
    assert len(sink.published) == 1
    assert there(tmp_path) == ["wal/job/out/published/000000000002-00000"]


def test_old_marks_go_and_what_they_stood_for_stays_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.sinks.staged.MARKS_KEPT", 3)
    sink = open_sink(tmp_path)
    first = prepared(sink, 2, (0, "x"))
    sink.commit(2, [first])
    for epoch in range(4, 40, 2):
        sink.commit(epoch, [prepared(sink, epoch, (epoch, "x"))])
        assert len(there(tmp_path)) <= 6
    # As after a rollback to the first of them.
    sink.commit(2, [first])
    assert len(sink.published) == 19


def test_the_key_of_an_epoch_survives_pickling_and_it_is_a_number() -> None:
    epoch = PublishedEpoch(7, 2, "job/out/7/2")
    again = pickle.loads(pickle.dumps(epoch))
    assert (again, again.batch, again.key) == (7, 2, "job/out/7/2")
    assert f"{again}" == repr(again) == "7" and again + 1 == 8


def test_a_batch_without_rows_is_no_row(tmp_path: Path) -> None:
    writer = open_sink(tmp_path).writer(2, 0, Execution())
    writer.write(batch((1, "a")).slice(0, 0))
    assert writer.prepare() is None
    assert there(tmp_path) == []
