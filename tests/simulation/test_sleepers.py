"""A driver that sleeps until its records are retired wakes up and publishes nothing.

Whatever it looks for in the log may be gone by then: a newer leader has committed, retired and
removed. And a store that ignores conditions, with which none of this holds, is refused.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cairn.driver.coordinator.guarantees import Guarantee
from cairn.errors import CommitConflictError, CommitError, CommitUnknownError, EpochError
from cairn.storage.log import Log, record_path
from cairn.storage.manifest import Epoch
from cairn.testing import call_at_points
from cairn.testing.faulty_store import UnconditionalStore
from tests.simulation.test_guarantees import published
from tests.simulation.world import ConcurrentQueryError, Driver, World

GUARANTEES = ["exactly-once", "at-least-once", "at-most-once"]
BETWEEN_BATCHES = "between two batches"


def led(world: World, guarantee: Guarantee, every: int = 1) -> Driver:
    driver = Driver(world, guarantee=guarantee, checkpoint_every=every, retained_epochs=1)
    driver.start()
    return driver


def retire(world: World, guarantee: Guarantee, number: int) -> Driver:
    """A new driver leads for so long that the record behind a number is gone."""
    new = led(world, guarantee)
    while world.store.exists(record_path(number + 1)):
        new.run_batch(1)
    return new


@pytest.mark.parametrize(
    ("asleep_at", "every"),
    [(BETWEEN_BATCHES, 1), ("driver.epoch.begun", 2), ("driver.pack.written", 1)],
)
@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_driver_that_slept_past_retention_publishes_nothing(
    guarantee: Guarantee, asleep_at: str, every: int, tmp_path: Path
) -> None:
    world = World(21, tmp_path)
    old = led(world, guarantee, every)
    for _ in range(2 * every):
        old.run_batch(4)
    last = old.coordinator.log.last
    assert last is not None
    others: list[Driver] = []
    before: Counter[int] = Counter()

    def sleep(point: str) -> None:
        if point == asleep_at and not others:
            others.append(retire(world, guarantee, last))
            before.update(published(world))

    sleep(BETWEEN_BATCHES)
    with (
        call_at_points(sleep),
        pytest.raises((CommitConflictError, CommitUnknownError, EpochError, ConcurrentQueryError)),
    ):
        for _ in range(every):
            old.run_batch(4)
    (new,) = others
    assert published(world) == before, "the old driver published something"
    new.run_batch(4)
    if guarantee == "exactly-once":
        world.check_all()
    if guarantee == "at-most-once":
        assert set(published(world).values()) == {1}


def test_a_store_that_ignores_conditions_is_refused_before_anything_else_is_written(
    tmp_path: Path,
) -> None:
    world = World(22, tmp_path)
    world.store = UnconditionalStore(world.store)
    driver = Driver(world)
    with pytest.raises(CommitError, match="does not keep put-if-absent") as refused:
        driver.start()
    assert world.store.url in str(refused.value) and "next: use a store" in str(refused.value)
    assert {found.path for found in world.store.list()} == {"job.json", record_path(1)}


def test_a_checkpoint_on_a_store_that_keeps_conditions_again_goes_on(tmp_path: Path) -> None:
    world = World(22, tmp_path)
    first = Driver(world)
    first.start()
    first.run_batch()
    kept = world.store
    world.store = UnconditionalStore(kept)
    with pytest.raises(CommitError):
        Driver(world).start()
    world.store = kept
    after = Driver(world)
    after.start()
    after.run_batch()
    world.check_all()
    assert [type(r) for r in Log(kept).records()][-1] is Epoch
