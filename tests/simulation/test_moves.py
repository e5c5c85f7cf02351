"""A savepoint moves a job from any backend to any other."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cairn.backends.redis import backend as redis_backend
from cairn.snapshots.verify_redis import verify_redis
from cairn.storage.references import files_of
from tests.backends import SERVERS, backend_name
from tests.marks import for_soak
from tests.simulation import test_external
from tests.simulation.world import Driver, World
from tests.unit.snapshots.jobs import start_from, take

BACKENDS = ["heap", "rocksdb", *SERVERS]
TESTED = {("rocksdb", "postgres"), ("postgres", "redis"), ("redis", "heap"), ("heap", "redis")}
CASES = [
    pair if pair in TESTED else for_soak(*pair) for pair in itertools.permutations(BACKENDS, 2)
]
FORMATS = {"heap": "segment", "rocksdb": "rocksdb", "postgres": "postgres", "redis": "segment"}
"""The file format of bases, by backend."""


def run_batches(world: World, parallelism: int, count: int) -> None:
    driver = Driver(world, parallelism=parallelism)
    driver.start()
    for _ in range(count):
        driver.run_batch(9)


def check_bases(world: World, backend: str) -> None:
    """The newest epoch has bases, in the format of the backend."""
    newest = world.newest()
    assert newest is not None
    formats = {file.format for file in files_of(newest) if file.kind == "base"}
    assert formats == {FORMATS[backend]}
    if backend == "redis":
        assert verify_redis(world.store).groups > 0


@pytest.mark.parametrize(("source", "target"), CASES)
def test_a_savepoint_moves_a_job_between_backends(
    source: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0")
    monkeypatch.setattr(redis_backend, "APPLY_EPOCHS", 1)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    world = World(7, tmp_path / "a", backend=backend_name(source))
    run_batches(world, 2, 4)
    check_bases(world, source)
    savepoint = take(world)
    moved = World(7, tmp_path / "b", backend=backend_name(target))
    moved.clock = world.clock
    moved.store = start_from(savepoint, 3)
    run_batches(moved, 3, 4)
    check_bases(moved, target)
    test_external.check_all_kept(moved)
    assert verify_redis(moved.store).damage == []
