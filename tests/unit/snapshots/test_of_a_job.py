"""Savepoints of a job that runs: the real coordinator and slots, with Spark played.

State of every kind comes from functions here, through overlays, deltas, merges and bases.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.errors import CommitError
from cairn.key_groups import key_group
from cairn.snapshots import EpochReader, diff_epochs, open_savepoint, published, write_savepoint
from cairn.snapshots.branch import branch
from cairn.storage.holds import find_holds
from cairn.storage.log import FIRST_NUMBER, Log, record_path
from cairn.storage.manifest import Epoch
from cairn.storage.store import open_store
from cairn.testing import SimulatedCrash, simulated_crash
from cairn.types import parse_type
from tests.marks import for_soak
from tests.simulation.world import Driver, World, stored_state
from tests.unit.snapshots.jobs import State, by_key, newest, start_from, take


def run_for(batches: int, folder: Path) -> World:
    """Run a job with 2, 3 and 1 subtasks, `batches` batches each."""
    world = World(11, folder)
    for parallelism in (2, 3, 1):
        driver = Driver(world, parallelism=parallelism)
        driver.start()
        for _ in range(batches):
            driver.run_batch()
    return world


@pytest.fixture
def young(tmp_path: Path) -> World:
    return run_for(1, tmp_path)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A job that has compacted its files meanwhile; tests only read it."""
    return run_for(14, tmp_path_factory.mktemp("world"))


@pytest.fixture
def unpublished(young: World, monkeypatch: pytest.MonkeyPatch) -> Epoch:
    """The newest epoch of a driver that was killed before its sinks published."""
    monkeypatch.setattr(published, "PATIENCE_S", 0.0)
    driver = Driver(young)
    driver.start()
    with simulated_crash("driver.manifest.written"), pytest.raises(SimulatedCrash):
        driver.run_batch()
    return newest(young)


def copy_epoch(how: str, world: World, epoch: int | None, dest: Path) -> None:
    if how == "savepoint":
        write_savepoint(world.store, epoch, str(dest))
    else:
        branch(world.store, epoch, str(dest))


COPIED = {"savepoint": {"savepoint.json"}, "branch": {"job.json", record_path(FIRST_NUMBER)}}
"""The last files that are written: a copy without them is not whole."""


def paths_in(folder: Path) -> set[str]:
    return {found.path for found in open_store(str(folder)).list()}


@pytest.mark.parametrize("how", ["savepoint", "branch"])
def test_an_epoch_that_was_not_published_is_not_copied(
    how: str, young: World, unpublished: Epoch, tmp_path: Path
) -> None:
    for asked in (None, unpublished.number):
        with pytest.raises(CommitError, match="is not known to be published") as failure:
            copy_epoch(how, young, asked, tmp_path / "copy")
        assert "next: start the job on this checkpoint once" in str(failure.value)
        assert "'seen'" in str(failure.value)
    assert find_holds(young.store).listing == []
    assert open_store(str(tmp_path / "copy")).list() == []


@pytest.mark.parametrize("how", ["savepoint", "branch"])
def test_the_epoch_before_one_that_was_not_published_is_copied(
    how: str, young: World, unpublished: Epoch, tmp_path: Path
) -> None:
    copy_epoch(how, young, unpublished.parent, tmp_path / "copy")
    assert COPIED[how] <= paths_in(tmp_path / "copy")


@pytest.mark.parametrize("how", ["savepoint", "branch"])
def test_after_a_start_has_published_the_epoch_it_is_copied(
    how: str, young: World, unpublished: Epoch, tmp_path: Path
) -> None:
    Driver(young).start()
    young.check_output()
    copy_epoch(how, young, unpublished.number, tmp_path / "copy")
    assert COPIED[how] <= paths_in(tmp_path / "copy")


@pytest.mark.parametrize("how", ["savepoint", "branch"])
def test_an_epoch_of_a_running_job_is_copied_once_it_is_published(
    how: str, young: World, unpublished: Epoch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "PATIENCE_S", 60.0)
    driver = Driver(young)
    monkeypatch.setattr(published.time, "sleep", lambda seconds: driver.start())
    copy_epoch(how, young, None, tmp_path / "copy")
    assert driver.coordinator.newest == unpublished
    assert COPIED[how] <= paths_in(tmp_path / "copy")


def test_an_epoch_is_read_as_slots_restore_it(world: World) -> None:
    lineage = list(Log(world.store).lineage())
    assert len(lineage) > 1
    for epoch in lineage:
        with EpochReader(world.store, epoch) as reader:
            expected = stored_state(world.store, world.graph(), epoch)
            assert by_key(reader, list(epoch.operators)) == expected


@pytest.mark.parametrize("parallelism", [1, for_soak(2), 4, for_soak(8)])
def test_a_job_started_from_a_savepoint_goes_on_as_if_nothing_had_happened(
    parallelism: int, world: World, tmp_path: Path
) -> None:
    savepoint = take(world)
    rows = world.committed_rows()
    (tmp_path / "again").mkdir()
    again = World(world.seed, tmp_path / "again")
    again.store = start_from(savepoint, parallelism)
    loaded = newest(again)
    assert stored_state(again.store, again.graph(), loaded) == world.model(rows).state()
    driver = Driver(again, parallelism=parallelism)
    driver.start()
    for _ in range(12):
        driver.run_batch()
    assert again.committed_rows() == rows + 120
    found = stored_state(again.store, again.graph(), newest(again))
    assert found == again.model(rows + 120).state()


def test_every_key_lies_in_its_key_group(world: World) -> None:
    savepoint = take(world)
    seen: set[str] = set()
    for uid, operator in savepoint.info.operators.items():
        types = [parse_type(ddl) for ddl in operator.key_types.values()]
        for name, columns in savepoint.columns(uid).items():
            for batch in savepoint.rows(uid, name):
                groups = batch["group"].to_pylist()
                keys = [key for key, _, _ in columns.decode(batch)]
                parts = [[key] if len(types) == 1 else list(key) for key in keys]
                assert groups == [key_group(p, types, world.group_count) for p in parts]
                seen.add(uid)
    assert seen == set(savepoint.info.operators)


def test_a_savepoint_taken_while_the_job_runs_is_of_one_epoch(tmp_path: Path) -> None:
    world = run_for(14, tmp_path)
    driver = Driver(world, parallelism=2, retained_epochs=1)
    driver.start()
    driver.run_batch()
    world.rest()
    epoch = newest(world)
    expected = stored_state(world.store, world.graph(), epoch)

    def run_on(done: int, total: int) -> None:
        for _ in range(4):
            driver.run_batch()

    dest = open_store("memory:")
    info = write_savepoint(world.store, None, dest.url, progress=run_on)
    assert info.epoch == epoch.number
    assert by_key(open_savepoint(dest.url), list(epoch.operators)) == expected
    world.check_log()
    driver.run_batch()
    driver.run_batch()
    assert Log(world.store).oldest_kept() > epoch.number, "only the savepoint has held it"


def changes(before: State, after: State, uid: str, state: str) -> Iterator[tuple[Any, Any, Any]]:
    keys = before[uid].keys() | after[uid].keys()
    for key in keys:
        old, new = before[uid].get(key, {}).get(state), after[uid].get(key, {}).get(state)
        if old != new:
            yield key, old, new


def test_diff_finds_what_functions_have_changed(world: World) -> None:
    lineage = list(Log(world.store).lineage())
    first, last = lineage[-1], lineage[0]
    graph = world.graph()
    before = stored_state(world.store, graph, first)
    after = stored_state(world.store, graph, last)
    found = diff_epochs(world.store, first.number, last.number, limit=1 << 30)
    assert {diff.operator for diff in found} == set(after)
    for diff in found:
        expected = list(changes(before, after, diff.operator, diff.state))
        if diff.kind == "map":
            examples = diff.added_examples + diff.changed_examples + diff.removed_examples
            assert {example.key for example in examples} == {key for key, _, _ in expected}
        else:
            assert diff.added == sum(old is None for _, old, _ in expected)
            assert diff.removed == sum(new is None for _, _, new in expected)
            assert diff.added + diff.changed + diff.removed == len(expected)
