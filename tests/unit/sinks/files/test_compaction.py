"""Merging published files: no row twice, none missing, whatever dies when."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cairn.errors import CommitError, PlanError
from cairn.sinks import Files
from cairn.sinks.files import compaction
from cairn.sinks.files.published import parse_name
from cairn.storage.durable import temporary_path
from cairn.testing import Fault, FaultyStore, SimulatedCrash
from tests.unit.sinks.files.folders import Folder


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are many writes here, and no power cuts."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, listed=True, compact=True, compact_grace_s=0)


def with_merge_ready(folder: Folder) -> Files:
    """A driver with nine entries in the list and a merge that the next one can take."""
    driver = folder.sink()
    for epoch in range(1, 10):
        folder.commit(driver, epoch, (epoch, "a"))
    driver.close()
    driver._compacting().round()
    return driver


def merged(folder: Folder) -> list[str]:
    return [name for name in folder.names() if (p := parse_name(name)) and p.is_merged]


def plans(folder: Folder) -> list[str]:
    home = folder.path / "_cairn/job/out/merges"
    return os.listdir(home) if home.exists() else []


@pytest.mark.parametrize("settings", [
    {}, {"format": "json"}, {"format": "csv"}, {"format": "csv", "compression": "gzip"},
    {"format": "json", "compression": "gzip"}, {"format": "csv", "header": False},
], ids=str)  # fmt: skip
def test_small_files_become_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = Folder(tmp_path, listed=True, compact=True, compact_grace_s=0, **settings)
    if settings.get("header") is False:
        folder.rows = lambda: [  # type: ignore[method-assign]
            (int(k), s.strip('"'))
            for name in folder.names()
            for k, s in (line.split(",") for line in (folder.path / name).read_text().splitlines())
        ]
    driver = with_merge_ready(folder)
    assert folder.rows() == [(n, "a") for n in range(1, 10)] and merged(folder) == []
    folder.commit(driver, 10, (10, "a"))
    assert folder.rows() == [(n, "a") for n in range(1, 11)]
    assert len(folder.names()) == 2 and len(merged(folder)) == 1


def test_commits_start_merges_in_the_background(folder: Folder) -> None:
    driver = folder.sink()
    for epoch in range(1, 31):
        folder.commit(driver, epoch, (epoch, "a"))
        compactor = driver._compacting()
        if compactor._thread is not None:
            compactor._thread.join()
    driver.close()
    assert len(merged(folder)) >= 1 and len(folder.names()) < 30
    assert sorted(folder.rows()) == [(n, "a") for n in range(1, 31)]


def test_sources_stay_for_the_grace_period(folder: Folder) -> None:
    driver = with_merge_ready(folder)
    compactor = driver._compacting()
    compactor._grace_s = 60
    folder.commit(driver, 10, (10, "a"))
    compactor.round()
    assert len(folder.data()) == 11
    folder.sink(compact_grace_s=60).recover(11)
    assert len(folder.data()) == 11 and len(folder.rows()) == 10
    now_s = compactor.wall_clock()
    compactor.wall_clock = lambda: now_s + 61
    compactor.round()
    assert len(folder.data()) == 2 and plans(folder) == []
    assert len(folder.rows()) == 10


def test_merges_of_a_driver_that_died_are_removed(folder: Folder) -> None:
    with_merge_ready(folder)
    assert len(folder.data()) == 10 and len(plans(folder)) == 1
    folder.sink().recover(10)
    assert len(folder.data()) == 9 and plans(folder) == []
    assert folder.rows() == [(n, "a") for n in range(1, 10)]


def test_what_a_driver_killed_while_it_stored_a_merge_left_is_removed(folder: Folder) -> None:
    driver = folder.sink()
    for epoch in range(1, 10):
        folder.commit(driver, epoch, (epoch, "a"))
    driver.close()

    def killed(path: str, local_file: str) -> None:
        (folder.path / temporary_path(path)).write_bytes(b"half")
        raise SimulatedCrash("in the middle of a file")

    driver._store.put_file = killed  # type: ignore[method-assign]
    with pytest.raises(SimulatedCrash):
        driver._compacting().round()
    assert len(list(folder.path.rglob(".part-*"))) == 1
    folder.sink().recover(2)
    assert list(folder.path.rglob(".part-*")) == [] and plans(folder) == []
    assert folder.rows() == [(n, "a") for n in range(1, 10)]


def test_a_merge_that_another_driver_gave_up_is_not_published(folder: Folder) -> None:
    """The fenced driver has its merge ready and makes the next `.compact` entry."""
    fenced = with_merge_ready(folder)
    folder.sink().recover(10)
    for epoch in range(11, 22):
        folder.commit(fenced, epoch, (epoch, "a"))
    assert merged(folder) == []
    assert folder.rows() == [(n, "a") for n in (*range(1, 10), *range(11, 22))]


def test_a_merge_that_is_listed_while_it_is_given_up_stays(folder: Folder) -> None:
    """The entry is made after the plan is deleted, and before the file would be."""
    fenced = with_merge_ready(folder)
    late = folder.prepared(10, (10, "a"))
    newer = folder.sink()
    compactor = newer._compacting()
    revoke = compactor.revoke

    def revoke_then_listed(leftovers: Any) -> None:
        fenced_compactor = fenced._compacting()
        exists = fenced._store.exists
        seen = {fenced_compactor._ready[0].path: True}
        revoke(leftovers)
        # It had looked before.
        fenced._store.exists = lambda path: seen.get(path) or exists(path)  # type: ignore[method-assign]
        fenced.commit(10, late)

    compactor.revoke = revoke_then_listed  # type: ignore[method-assign]
    newer.recover(10)
    assert len(merged(folder)) == 1
    assert folder.rows() == [(n, "a") for n in range(1, 11)]


def test_files_without_a_mark_are_not_merged(folder: Folder) -> None:
    """A driver that listed them and hangs would not know that its epoch is published."""
    with_merge_ready(folder)
    folder.sink().recover(10)
    driver = folder.sink()
    (folder.path / "_cairn/job/out/epochs/000000000003.json").unlink()
    driver._compacting().round()
    (ready,) = driver._compacting()._ready
    assert [parse_name(name).epoch for name in ready.sources] == [1, 2, 4, 5, 6, 7, 8, 9]  # type: ignore[union-attr]


def trimmed(folder: Folder, driver: Files) -> list[int]:
    """Twenty epochs with the marks of the last three; returns those that have marks."""
    with mock.patch("cairn.sinks.files.sink.MARKS_KEPT", 3):
        for epoch in range(1, 21):
            folder.commit(driver, epoch, (epoch, "a"))
        driver.recover(21)
    driver.close()
    return sorted(int(m.stem) for m in (folder.path / "_cairn/job/out/epochs").iterdir())


def test_old_marks_are_removed_and_their_epochs_stay_published(folder: Folder) -> None:
    driver = folder.sink(compact=False)
    late = {epoch: folder.prepared(epoch, (epoch, "a")) for epoch in (1, 2, 20)}
    marks = trimmed(folder, driver)
    assert marks[-1] == 20 and len(marks) < 6
    for epoch, prepared in late.items():
        driver.commit(epoch, prepared)
        folder.sink().commit(epoch, prepared)
    assert folder.rows() == [(n, "a") for n in range(1, 21)]


def test_an_epoch_without_mark_that_was_merged_is_not_published_again(folder: Folder) -> None:
    """By a driver that slept, while its files are still there for readers."""
    late = folder.prepared(1, (1, "a"))
    trimmed(folder, folder.sink(compact=False))
    driver = folder.sink(compact_grace_s=1000)
    driver._compacting().round()
    (ready,) = driver._compacting()._ready
    assert len(ready.sources) == 20
    driver._compacting().close()
    for epoch in range(21, 31):
        folder.commit(driver, epoch, (epoch, "a"))
    assert len(merged(folder)) == 1 and late[0]["files"][0]["name"] in folder.data()
    folder.sink().commit(1, late)
    assert folder.rows() == [(n, "a") for n in range(1, 31)]


def test_only_files_of_this_job_are_merged(folder: Folder) -> None:
    for epoch in range(1, 5):
        folder.commit(folder.sink("other"), epoch, (epoch, "a"))
        folder.commit(folder.sink("job"), epoch, (epoch, "b"))
    driver = folder.sink()
    driver._compacting().round()
    assert driver._compacting()._ready == []


def test_files_of_other_schemas_stay_as_they_are(folder: Folder) -> None:
    with_merge_ready(folder)
    folder.sink().recover(10)
    other = folder.path / folder.names()[3]
    pq.write_table(pa.table({"z": [1.5]}), other)
    fresh = folder.sink()
    fresh._compacting()._content = lambda name, size: (  # type: ignore[method-assign]
        (folder.path / name).read_bytes()
    )
    fresh._compacting().round()
    assert fresh._compacting()._ready == [] and plans(folder) == []


def test_a_file_that_was_cut_short_is_not_merged(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    with_merge_ready(folder)
    folder.sink().recover(10)
    file = folder.path / folder.names()[3]
    file.write_bytes(file.read_bytes()[:-1])
    driver = folder.sink()
    with caplog.at_level("WARNING"):
        driver._compacting().round()
    assert driver._compacting()._ready == [] and plans(folder) == []
    assert file.name in caplog.text
    assert_others_are_merged(folder, driver, file.name)


def assert_others_are_merged(folder: Folder, driver: Files, left: str) -> None:
    """By the next round: a file that cannot be read stops no others."""
    driver._compacting().round()
    (ready,) = driver._compacting()._ready
    assert left not in ready.sources and len(ready.sources) == 8
    assert len(plans(folder)) == 1


def test_a_file_that_is_gone_stops_no_others(folder: Folder) -> None:
    with_merge_ready(folder)
    folder.sink().recover(10)
    file = folder.path / folder.names()[3]
    file.unlink()
    driver = folder.sink()
    driver._compacting().round()
    assert driver._compacting()._ready == [] and plans(folder) == []
    assert_others_are_merged(folder, driver, file.name)


def test_a_merge_that_cannot_be_stored_is_given_up_and_made_again(folder: Folder) -> None:
    with_merge_ready(folder)
    folder.sink().recover(10)
    driver = folder.sink()
    with mock.patch.object(driver._store, "put_file", side_effect=OSError(28, "full")):
        driver._compacting().round()
    assert driver._compacting()._ready == [] and plans(folder) == []
    driver._compacting().round()
    assert len(driver._compacting()._ready[0].sources) == 9


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"format": "json"}, {"format": "json", "compression": "gzip"}),
    ({"format": "json", "compression": "gzip"}, {"format": "json"}),
    ({"format": "csv"}, {"format": "csv", "compression": "gzip"}),
    ({"format": "parquet"}, {"format": "json"}),
    ({"format": "json"}, {"format": "csv"}),
    ({"format": "parquet"}, {"format": "parquet", "compression": "zstd"}),
]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=str)
def test_no_row_is_lost_when_the_settings_change_over_a_restart(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    rows = []
    epochs = iter(range(1, 100))
    for settings, count in ((before, 4), (after, 16), (before, 10)):
        folder = Folder(tmp_path, listed=True, compact=True, compact_grace_s=0, **settings)
        driver = folder.sink()
        for epoch in itertools.islice(epochs, count):
            folder.commit(driver, epoch, (epoch, "a"))
            rows.append((epoch, "a"))
            if epoch % 10 == 8:
                driver.close()
                driver._compacting().round()
        driver.close()
    assert len(merged(folder)) >= 1
    assert sorted(folder.rows()) == rows


def test_csv_with_and_without_a_header_is_not_merged(tmp_path: Path) -> None:
    """The first rows are equal, so nothing in the files distinguishes them from a header."""
    folder = Folder(tmp_path, listed=True, compact=True, format="csv")
    bare, headed = folder.sink(header=False), folder.sink()
    for epoch in range(1, 5):
        bare.commit(epoch, folder.prepared(epoch, (1, "a"), (epoch, "b"), header=False))
    for epoch in range(5, 10):
        folder.commit(headed, epoch, (epoch, "b"))
    for driver in (bare, headed):
        driver.close()
        driver._compacting().round()
        assert driver._compacting()._ready == []


def test_merges_are_listed_also_when_another_sink_makes_the_compact_entries(
    folder: Folder,
) -> None:
    mine, other = folder.sink(), folder.sink("other", compact=False)
    for epoch in range(1, 25):
        folder.commit(mine, epoch, (epoch, "a"))
        folder.commit(other, epoch, (epoch, "b"))
        if mine._compacting()._thread is not None:
            mine._compacting()._thread.join()
    mine.close()
    assert len(merged(folder)) >= 1
    assert sorted(folder.rows()) == sorted((n, s) for n in range(1, 25) for s in "ab")


def test_rows_are_written_again_a_few_times_only(folder: Folder) -> None:
    """Merged files are merged with their like, not each time with the newest."""
    driver = folder.sink()
    written = 0
    put_file = driver._store.put_file

    def counted(path: str, local: str) -> None:
        nonlocal written
        parsed = parse_name(path)
        assert parsed is not None and parsed.is_merged
        written += os.path.getsize(local)
        put_file(path, local)

    driver._store.put_file = counted  # type: ignore[method-assign]
    for epoch in range(1, 70):
        folder.commit(driver, epoch, *[(n, f"{epoch}") for n in range(50)])
        if epoch % 10 == 8:
            driver.close()
            driver._compacting().round()
    sizes = sum(os.path.getsize(folder.path / name) for name in folder.names())
    assert len(folder.rows()) == 69 * 50
    assert len(folder.names()) < 35
    assert written < 6 * sizes
    driver.close()


def test_compaction_needs_a_list(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="listed=True"):
        Files(str(tmp_path), compact=True)


def dying(folder: Folder, act: Callable[[Files], None]) -> Iterator[None]:
    """A driver dies after each call to the store in turn; then, whatever the test does."""
    pristine = folder.path.with_name("pristine")
    shutil.copytree(folder.path, pristine)
    for call in itertools.count(1):
        shutil.rmtree(folder.path)
        shutil.copytree(pristine, folder.path)
        driver = folder.sink()
        driver._compacting().round()
        store = driver._store = FaultyStore(driver._store, [Fault("*", call, "after")])
        driver._compacting()._store = driver._compacting()._list.store = store
        with contextlib.suppress(OSError, CommitError):
            act(driver)
        if not store.faults_seen:
            break
        yield
    assert call > 10


def test_a_recovery_that_dies_anywhere_is_completed_by_the_next(folder: Folder) -> None:
    with_merge_ready(folder)
    folder.prepared(8, (-8, "abandoned"))
    next_epoch = folder.prepared(10, (10, "a"))
    for _ in dying(folder, lambda driver: driver.recover(10)):
        assert folder.rows() == [(n, "a") for n in range(1, 10)]
        folder.sink().recover(10)
        assert plans(folder) == []
        folder.sink().commit(10, next_epoch)
        assert folder.rows() == [(n, "a") for n in range(1, 11)]
        assert sorted(folder.names()) == folder.data()


def test_a_commit_with_merges_that_dies_anywhere_is_completed_by_the_next(folder: Folder) -> None:
    with_merge_ready(folder)
    folder.sink().recover(10)
    for epoch in range(10, 19):
        folder.commit(folder.sink(), epoch, (epoch, "a"))
    last = folder.prepared(19, (19, "a"))
    for _ in dying(folder, lambda driver: driver.commit(19, last)):
        folder.sink().commit(19, last)
        folder.sink().recover(20)
        assert folder.rows() == [(n, "a") for n in range(1, 20)]
        folder.sink().recover(20)
        assert sorted(folder.names()) == folder.data()


@mock.patch.object(compaction, "MERGE_FILES_MIN", 3)
@pytest.mark.parametrize("seed", range(4))
def test_no_row_is_lost_or_doubled_under_faults_and_takeovers(tmp_path: Path, seed: int) -> None:
    """Drivers that fail anywhere, are followed by others, wake up, merge, and recover."""
    rng = random.Random(seed)
    folder = Folder(tmp_path, listed=True, compact=True, compact_grace_s=0, format="json",
                    partition_by=rng.choice([(), ("s",)]))  # fmt: skip

    def make() -> Files:
        driver = folder.sink()
        driver._store = FaultyStore(driver._store, seed=rng.randrange(1 << 30), fault_rate=0.03)
        # Rounds are made below, where the seed says.
        driver._compacting().consider = lambda: None  # type: ignore[method-assign]
        return driver

    drivers = [make()]
    expected: list[tuple[Any, ...]] = []
    log: list[tuple[int, Any]] = []

    def attempt(act: Any) -> bool:
        try:
            act()
            return True
        except Exception as error:
            assert not isinstance(error, AssertionError | TypeError)
            return False

    for epoch in range(1, 40):
        rows = [(epoch, rng.choice("ab")) for _ in range(2)]
        prepared = folder.prepared(epoch, *rows)
        log.append((epoch, prepared))
        expected += rows
        if rng.random() < 0.3:
            folder.prepared(epoch, (-epoch, "abandoned"))
        while not attempt(lambda: drivers[-1].commit(epoch, prepared)):  # noqa: B023
            if rng.random() < 0.4:
                drivers.append(make())
                while not attempt(lambda: drivers[-1].commit(*log[-1])):
                    pass
                attempt(lambda: drivers[-1].recover(log[-1][0] + 1))
            if rng.random() < 0.3:
                zombie = rng.choice(drivers)
                attempt(lambda: zombie.commit(*rng.choice(log)))  # noqa: B023
        worker = rng.choice(drivers[-2:])
        if rng.random() < 0.6:
            attempt(lambda: worker._compacting().round())  # noqa: B023
        if epoch % 4 == 0:
            assert sorted(folder.rows()) == sorted(expected), f"seed {seed}, epoch {epoch}"
    for driver in drivers:
        driver.close()
    last = folder.sink()
    last.recover(100)
    last._compacting().round()
    last._compacting()._ready.clear()
    folder.sink().recover(100)
    assert sorted(folder.rows()) == sorted(expected)
    assert set(folder.data()) == set(folder.names())
