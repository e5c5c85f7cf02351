"""After a rollback the job goes on from the restored epoch, under new numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.errors import CommitConflictError
from cairn.storage.log import Log, new_nonce
from cairn.storage.manifest import Epoch, Restore
from tests.simulation.ledger import Model
from tests.simulation.world import Driver, World, end_of, stored_state


def model_of(world: World, epoch: Epoch) -> Model:
    model = Model()
    for row in world.rows(0, end_of(epoch.spark.offsets)):
        model.process(row)
    return model


@pytest.mark.parametrize("back", [1, 2, 4])
@pytest.mark.parametrize("parallelism", [2, 3])
def test_a_job_rolled_back_goes_on_from_the_restored_epoch(
    back: int, parallelism: int, tmp_path: Path
) -> None:
    world = World(21, tmp_path)
    first = Driver(world, parallelism=2, retained_epochs=10)
    first.start()
    for _ in range(6):
        first.run_batch(7)
    epochs = list(Log(world.store).lineage())
    target = epochs[back]
    operator = Log(world.store)
    operator.append(
        lambda number: Restore(
            number=number, term=number, nonce=new_nonce(), wall_ms=0, epoch=target.number
        )
    )
    second = Driver(world, parallelism=parallelism, retained_epochs=10)
    second.start()
    assert second.coordinator.newest == target
    assert second.folder != target.spark.folder, "Spark's log is ahead of the restored epoch"
    for rows in (7, 0, 5):
        second.run_batch(rows)
        newest = world.newest()
        assert newest is not None
        assert newest.number > epochs[0].number, "an epoch number was used again"
        assert stored_state(world.store, world.graph(), newest) == model_of(world, newest).state()
    world.check_log()
    with pytest.raises(CommitConflictError):
        first.run_batch(7)
