"""What each guarantee lets a crash do, and nothing more.

Every row of the input has a number, which its output carries: so it can be told which were
lost and which came twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.driver.coordinator.guarantees import Guarantee
from cairn.errors import CommitConflictError
from cairn.snapshots.rollback import rollback
from cairn.testing import SimulatedCrash, call_at_points, crash_points, simulated_crash
from tests.marks import in_turn, one_in
from tests.simulation.test_exactly_once import POINTS, seeds, survive
from tests.simulation.world import Driver, World

BATCH = 10
EVERY = 3
PLACES = [False, True]
"""Spark's folder in the checkpoint, or on the disk of each driver."""
DRIVER_POINTS = [p for p in crash_points("driver") if p in POINTS or p == "driver.batch.published"]
CASES = in_turn(DRIVER_POINTS, [1, EVERY], PLACES)


def published(world: World) -> Counter[int]:
    """How often each row of the input was published, by its number."""
    found: Counter[int] = Counter()
    for row, times in world.seen().items():
        found[row[1]] += times
    return found


def expected(world: World, rows: int) -> Iterator[int]:
    """The rows that are published, of so many of the input."""
    return (row.seq for row in world.rows(0, rows) if row.op != "noop")


def led(world: World, guarantee: Guarantee, every: int) -> Driver:
    driver = Driver(world, guarantee=guarantee, checkpoint_every=every)
    driver.start()
    return driver


def crashed(
    tmp_path: Path, guarantee: Guarantee, every: int, point: str, *, is_on_driver: bool
) -> World:
    """After an epoch, two more were begun; the driver died at a point of them."""
    world = World(3, tmp_path, is_on_driver=is_on_driver)
    first = led(world, guarantee, every)
    for _ in range(every):
        first.run_batch(BATCH)

    def lead() -> None:
        driver = led(world, guarantee, every)
        for _ in range(2 * every):
            driver.run_batch(BATCH)
        driver.coordinator.commit_epoch()

    with simulated_crash(point):
        survive(lead)
    return world


# Exactly-once, with several batches in an epoch


@pytest.mark.parametrize(
    ("point", "nth", "is_on_driver"),
    in_turn([p for p in POINTS if not p.startswith("driver.idle")], [1, 2, 4], PLACES),
)
def test_exactly_once_with_several_batches_survives_a_crash_at_any_point(
    point: str, nth: int, is_on_driver: bool, tmp_path: Path
) -> None:
    world = World(5, tmp_path, is_on_driver=is_on_driver)
    led(world, "exactly-once", EVERY).run_batch()

    def lead() -> None:
        driver = led(world, "exactly-once", EVERY)
        for _ in range(2 * EVERY + 1):
            driver.run_batch()
        driver.rescale(3)
        driver.run_batch()

    with simulated_crash(point, nth):
        survive(lead)
    after = led(world, "exactly-once", EVERY)
    world.check_output()
    for _ in range(EVERY):
        after.run_batch()
    world.check_all()
    assert world.committed_rows() >= EVERY * BATCH


# At-least-once


@pytest.mark.parametrize(("point", "every", "is_on_driver"), one_in(2, CASES))
def test_at_least_once_repeats_what_followed_the_last_commit_and_loses_nothing(
    point: str, every: int, is_on_driver: bool, tmp_path: Path
) -> None:
    world = crashed(tmp_path, "at-least-once", every, point, is_on_driver=is_on_driver)
    committed = world.committed_rows()
    after = led(world, "at-least-once", every)
    for _ in range(2 * every):
        after.run_batch(BATCH)
    rows = world.committed_rows()
    found = published(world)
    assert set(found) >= set(expected(world, rows)), "a row was lost"
    repeated = {seq for seq, times in found.items() if times > 1}
    # Only rows that were published and not committed when the driver died.
    assert all(committed <= seq < committed + every * BATCH for seq in repeated)
    assert max(found.values()) <= 2
    if point == "driver.batch.published":
        assert repeated, "published before the commit, it is published again"
    world.check_log()


def test_state_counts_each_row_once_with_at_least_once(tmp_path: Path) -> None:
    world = World(4, tmp_path)

    def lead() -> None:
        driver = led(world, "at-least-once", 2)
        for _ in range(6):
            driver.run_batch(BATCH)

    for nth in (1, 3, 2):
        with simulated_crash("driver.batch.published", nth):
            survive(lead)
    led(world, "at-least-once", 1).run_batch(BATCH)
    newest = world.newest()
    assert newest is not None
    world.check_state()


# At-most-once


@pytest.mark.parametrize(("point", "every", "is_on_driver"), one_in(2, CASES, first=1))
def test_at_most_once_loses_what_followed_the_last_commit_and_repeats_nothing(
    point: str, every: int, is_on_driver: bool, tmp_path: Path
) -> None:
    world = crashed(tmp_path, "at-most-once", every, point, is_on_driver=is_on_driver)
    after = led(world, "at-most-once", every)
    for _ in range(2 * every):
        after.run_batch(BATCH)
    found = published(world)
    assert set(found.values()) == {1}, "a row was repeated"
    rows = world.committed_rows()
    lost = set(expected(world, rows)) - set(found)
    # One batch, planned and not published: the rest of the epoch had been published.
    assert len(lost) <= BATCH
    if point == "driver.batch.published":
        assert not lost, "it had been published"
    if point == "driver.epoch.ran":
        assert lost, "it had been planned"


@pytest.mark.parametrize("is_on_driver", PLACES)
@pytest.mark.parametrize("seed", seeds(2, more=2))
def test_at_most_once_repeats_nothing_whatever_fails(
    seed: int, is_on_driver: bool, tmp_path: Path
) -> None:
    world = World(seed, tmp_path, is_on_driver=is_on_driver)
    chance = world.random

    def crash_at_times(point: str) -> None:
        if chance.random() < 0.02:
            raise SimulatedCrash(point)

    def lead() -> None:
        with call_at_points(crash_at_times):
            driver = Driver(
                world,
                guarantee="at-most-once",
                checkpoint_every=chance.choice([1, 2, 5]),
                fault_rate=chance.choice([0.0, 0.01]),
                trouble=0.05,
            )
            driver.start()
            for _ in range(6):
                driver.run_batch(BATCH)

    for _ in range(6):
        survive(lead)
    led(world, "at-most-once", 1).run_batch(BATCH)
    assert set(published(world).values()) == {1}


@pytest.mark.parametrize("is_on_driver", PLACES)
def test_at_most_once_does_not_read_what_a_fenced_driver_has_planned_and_published(
    is_on_driver: bool, tmp_path: Path
) -> None:
    """The older driver goes on between the takeover and the first batch of the newer one."""
    for every in (1, EVERY):
        world = World(3, tmp_path / str(every), is_on_driver=is_on_driver)
        older = led(world, "at-most-once", every)
        older.run_batch(BATCH)
        newer = Driver(world, guarantee="at-most-once", checkpoint_every=every)
        newer.start()
        with pytest.raises(CommitConflictError):
            for _ in range(3):
                older.run_batch(BATCH)
        for _ in range(EVERY):
            newer.run_batch(BATCH)
        found = published(world)
        assert set(found.values()) == {1}
        assert set(found) == set(expected(world, world.committed_rows()))


@pytest.mark.parametrize("is_on_driver", PLACES)
def test_at_most_once_goes_on_after_what_it_had_planned_since_a_rollback(
    is_on_driver: bool, tmp_path: Path
) -> None:
    world = World(3, tmp_path, is_on_driver=is_on_driver)
    first = led(world, "at-most-once", 1)
    first.run_batch(BATCH)
    epoch = world.newest()
    assert epoch is not None
    first.run_changed()
    rollback(world.store, epoch.number)

    def lead() -> None:
        driver = led(world, "at-most-once", 1)
        for _ in range(3):
            driver.run_batch(BATCH)

    with simulated_crash("driver.batch.published", 3):
        survive(lead)
    led(world, "at-most-once", 1).run_batch(BATCH)
    assert set(published(world).values()) == {1}


@pytest.mark.parametrize("is_on_driver", PLACES)
def test_a_batch_that_a_stop_left_unread_is_read_by_the_next_run(
    is_on_driver: bool, tmp_path: Path
) -> None:
    world = World(3, tmp_path, is_on_driver=is_on_driver)
    driver = led(world, "at-most-once", 1)
    driver.run_batch(BATCH)
    batch_id, _, _ = driver.spark.next_batch(BATCH)
    driver.batches.leave_unread(batch_id)
    after = led(world, "at-most-once", 1)
    after.run_batch(BATCH)
    assert set(published(world)) == set(expected(world, 2 * BATCH))
