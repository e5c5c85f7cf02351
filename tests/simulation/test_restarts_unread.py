"""A restart over a database reads no row of state before the first row of input is processed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn.backends.redis import backend as redis_backend
from cairn.backends.redis.database import RedisDatabase
from cairn.backends.versioned.database import VersionedDatabase
from cairn.slot.level import LevelRuntime
from cairn.snapshots.rollback import rollback
from cairn.storage.log import Log
from cairn.storage.references import files_of
from tests.backends import OUTSIDE, backend_name
from tests.simulation.world import Driver, World


class Reads:
    """Calls that read from a database, and whether they were made while an epoch began."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begins = 0
        self.early: list[str] = []
        self._is_early = False
        for database in (VersionedDatabase, RedisDatabase):
            for name in ("get_many", "scan", "read_pages"):
                self._watch(patch, database, name)
        begin = LevelRuntime.begin

        def noted(*args: Any) -> None:
            self.begins += 1
            self._is_early = True
            try:
                begin(*args)
            finally:
                self._is_early = False

        patch.setattr(LevelRuntime, "begin", noted)

    def _watch(self, patch: pytest.MonkeyPatch, database: Any, name: str) -> None:
        read = getattr(database, name)

        def noted(*args: Any) -> Any:
            if self._is_early:
                self.early.append(name)
            return read(*args)

        patch.setattr(database, name, noted)


@pytest.mark.parametrize("event", ["restart", "rollback", "rescale"])
@pytest.mark.parametrize("backend", OUTSIDE)
def test_deltas_after_the_base_are_applied_without_a_row_of_the_database(
    backend: str, event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0")
    monkeypatch.setattr(redis_backend, "APPLY_EPOCHS", 1)
    world = World(7, tmp_path, backend=backend_name(backend))
    first = Driver(world, retained_epochs=10)
    first.start()
    for _ in range(4):
        first.run_batch(9)
        for slot in first.cluster.slots.values():
            slot.compactor.work()
    # No base from here on, only deltas.
    monkeypatch.setenv("CAIRN_BASE_RATIO", "1000000")
    monkeypatch.setattr(redis_backend, "APPLY_EPOCHS", 1000)
    for _ in range(5):
        first.run_batch(9)
    if event == "rollback":
        world.rest()
        rollback(world.store, list(Log(world.store).lineage())[1].number)
    newest = world.newest()
    assert newest is not None
    assert {"base", "delta"} <= {file.kind for file in files_of(newest)}
    second = Driver(world, parallelism=3 if event == "rescale" else 2, retained_epochs=10)
    second.start()
    reads = Reads(monkeypatch)
    second.run_batch(9)
    assert reads.begins > 0 and reads.early == []
    for _ in range(12):
        second.run_batch(9)
    if event != "rollback":
        world.check_all()
    world.check_state()
