"""Commits of files: files half written, and lists that name whole epochs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cairn.errors import CommitError
from cairn.sinks import list_published
from cairn.storage.hdfs_store import HdfsStore
from cairn.testing import SimulatedCrash, call_at_points
from tests.places import PLACES
from tests.places.stage import Stage
from tests.unit.sinks.files.folders import Folder


@pytest.mark.parametrize("name", [name for name in PLACES if name.startswith("files")])
def test_recovery_removes_what_a_slot_killed_in_the_middle_of_a_file_left(
    name: str, tmp_path: Path
) -> None:
    place = Stage(PLACES[name](tmp_path))
    kept = place.prepared(5, (1, "a"))

    def killed(*_: Any) -> None:
        raise SimulatedCrash("in the middle of a file")

    store = place.slot._store  # type: ignore[attr-defined]
    with contextlib.ExitStack() as patches:
        # The file is written, and the process gone before it has its name.
        if isinstance(store, HdfsStore):
            patches.enter_context(mock.patch.object(store._client, "rename", killed))
            patches.enter_context(mock.patch.object(store._client, "delete", killed))
        else:
            patches.enter_context(mock.patch("os.replace", killed))
            patches.enter_context(mock.patch("os.unlink", killed))
        for epoch in (2, 5):
            with contextlib.suppress(SimulatedCrash):
                place.prepare(epoch, (2, "b"))
    for path in place.place.scratch.iterdir():
        path.unlink()  # A slot's scratch goes with it.
    left = place.leftovers()
    place.driver.recover(5)
    # One of epoch 5 may be at work.
    assert sum("/.part-" in path for path in left) == (0 if place.place.is_far else 2)
    assert sum("/.part-" in path for path in place.leftovers()) == (0 if place.place.is_far else 1)
    place.driver.commit(5, [kept])
    place.driver.recover(6)
    assert place.leftovers() == []
    place.assert_sees((1, "a"))
    place.close_all()
    place.place.close()


def test_the_list_of_an_epoch_names_its_files(tmp_path: Path) -> None:
    place = Stage(PLACES["files"](tmp_path))
    prepared = [place.prepared(2, (s, "x"), subtask=s) for s in range(2)]
    place.driver.commit(2, prepared)
    (listed,) = (tmp_path / "out").glob("_cairn/job/out/epochs/*.json")
    names = {file["name"] for file in json.loads(listed.read_text())["files"]}
    assert names == {file.name for file in (tmp_path / "out").glob("*.parquet")}
    assert listed.name == "000000000002.json"


@pytest.mark.parametrize("name", [name for name in PLACES if name.startswith("files")])
def test_whoever_reads_what_is_published_sees_whole_epochs(name: str, tmp_path: Path) -> None:
    """Also of a folder without a list, whose plain readers see files come one by one."""
    place = Stage(PLACES[name](tmp_path))
    prepared = [place.prepared(2, (s, "x"), subtask=s) for s in range(3)]
    found: list[int] = []
    with call_at_points(lambda _: found.append(len(list_published(place.driver.path)))):
        place.driver.commit(2, prepared)
    assert found and set(found) <= {0, 3}
    assert len(list_published(place.driver.path)) == 3
    place.place.close()


def test_no_file_of_an_epoch_is_listed_before_all_are_in_place(tmp_path: Path) -> None:
    place = Stage(PLACES["files"](tmp_path))
    prepared = [place.prepared(2, (s, "x"), subtask=s) for s in range(2)]
    staged = sorted((tmp_path / "out").glob("_cairn/job/out/staged/*"))
    staged[1].unlink()
    with pytest.raises(CommitError, match="1 of its files are gone"):
        place.driver.commit(2, prepared)
    assert list((tmp_path / "out").glob("_cairn/job/out/epochs/*")) == []


@pytest.mark.parametrize("after", [{}, {"listed": True}, {"partition_by": "k"}, {"format": "csv"}])
@pytest.mark.parametrize("before", [{}, {"format": "json", "partition_by": "s"}])
def test_an_epoch_is_published_in_the_format_and_folders_it_was_prepared_with(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    folder = Folder(tmp_path)
    prepared = folder.prepared(2, (1, "a"), (2, "b"), **before)
    later = folder.sink(**after)
    later.commit(2, prepared)
    later.commit(2, prepared)
    later.commit(3, folder.prepared(3, (3, "c"), **after))
    later.recover(4)
    assert sorted(folder.rows()) == [(1, "a"), (2, "b"), (3, "c")]
    assert len(folder.data()) == len(folder.names())
