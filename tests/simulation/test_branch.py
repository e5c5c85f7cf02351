"""A branch of a running job and the job itself go on side by side, on shared files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cairn.backends.rocksdb.files import verify_rocksdb_base
from cairn.snapshots.branch import branch
from cairn.storage.holds import find_holds
from cairn.storage.log import Log
from cairn.storage.references import files_of
from cairn.storage.removal import delete_checkpoint
from cairn.storage.store import open_store
from cairn.storage.verify import verify
from tests.marks import for_soak, in_turn
from tests.simulation.test_rollback import model_of
from tests.simulation.world import Driver, World, stored_state


def check_state(world: World) -> None:
    newest = world.newest()
    assert newest is not None
    assert stored_state(world.store, world.graph(), newest) == model_of(world, newest).state()
    report = verify(world.store, checkers={"rocksdb": verify_rocksdb_base})
    assert report.ok, report.damage


def branched_world(world: World, folder: Path, back: int) -> World:
    """The branch's own outside world; input, clock and program are the same."""
    epoch = list(Log(world.store).lineage())[back]
    folder.mkdir()
    world.rest()
    info = branch(world.store, epoch.number, str(folder / "checkpoint"))
    other = World(world.seed, folder, backend=world.backend)
    other.clock = world.clock
    other.store = open_store(info.url)
    return other


@pytest.mark.parametrize(
    ("backend", "seed", "parallelism"), in_turn(["heap", "rocksdb"], [0, 1], [2, 3])
)
def test_parent_and_branch_diverge_and_each_keeps_its_state(
    backend: str, parallelism: int, seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    (tmp_path / "parent").mkdir()
    world = World(30 + seed, tmp_path / "parent", backend=backend)
    parent = Driver(world, parallelism=2, retained_epochs=4)
    parent.start()
    for _ in range(6):
        parent.run_batch(7)
    other = branched_world(world, tmp_path / "branch", back=chance.randrange(4))
    started = model_of(other, other.newest()).rows  # type: ignore[arg-type]
    child = Driver(other, parallelism=parallelism, retained_epochs=2)
    child.start()
    assert child.folder == "spark/000000000001", "Spark goes on right after the epoch"
    for step in range(40):
        if chance.random() < 0.6:
            parent.run_batch(chance.randrange(8))
        else:
            child.run_batch(chance.randrange(8))
        if step % 4 == 0:
            check_state(world)
            check_state(other)
    newest = other.newest()
    assert newest is not None and model_of(other, newest).rows > started
    delete_checkpoint(other.store)
    assert find_holds(world.store).holds == {}
    for _ in range(25):
        parent.run_batch(3)
    world.check_all()
    assert not verify(world.store).orphans, "what only the branch held is still there"


@pytest.mark.parametrize("backend", [for_soak("heap"), "rocksdb"])
def test_a_branch_compacts_the_parents_files_into_its_own(backend: str, tmp_path: Path) -> None:
    (tmp_path / "parent").mkdir()
    world = World(5, tmp_path / "parent", backend=backend)
    parent = Driver(world)
    parent.start()
    for _ in range(8):
        parent.run_batch(5)
    other = branched_world(world, tmp_path / "branch", back=0)
    child = Driver(other, retained_epochs=1)
    child.start()
    for _ in range(80):
        child.run_batch(5)
    newest = other.newest()
    assert newest is not None
    assert not [file for file in files_of(newest) if file.store], "it still needs the parent"
    check_state(other)
    assert find_holds(world.store).holds == {}
    delete_checkpoint(world.store)
    check_state(other)
