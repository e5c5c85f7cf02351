"""Slots on machines unlike the driver's: another checkpoint at its path, another clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.errors import RestoreError
from cairn.storage.log import Log, create_or_open_job
from cairn.storage.store import Store, open_store
from tests.simulation.cluster import Host
from tests.simulation.test_exactly_once import seeds
from tests.simulation.world import DEATHS, Driver, World

SIGHTS = ["no folder", "empty folder", "another job", "an older copy", "a copy that went on"]


def copied(store: Store) -> Store:
    made = open_store("memory:")
    for found in store.list():
        made.put(found.path, store.get(found.path))
    return made


def seen_by_host(sight: str, world: World, driver: Driver) -> Store | None:
    """Return the store at the path of the checkpoint on that machine; the job goes on at the right
    one."""
    if sight == "no folder":
        return None
    if sight == "empty folder":
        return open_store("memory:")
    if sight == "another job":
        other = open_store("memory:")
        create_or_open_job(other, "ledger", world.group_count)
        return other
    copy = copied(world.store)
    if sight == "a copy that went on":
        Log(copy).take_over(host="another", pid=1, wall_ms=0)
    driver.run_batch()
    return copy


def contents(store: Store | None) -> dict[str, bytes]:
    return {} if store is None else {found.path: store.get(found.path) for found in store.list()}


@pytest.mark.parametrize("sight", SIGHTS)
def test_slot_that_sees_another_checkpoint_is_refused_and_the_epoch_commits_nothing(
    sight: str, tmp_path: Path
) -> None:
    world = World(5, tmp_path)
    driver = Driver(world, parallelism=2)
    driver.start()
    driver.run_batch()
    elsewhere = seen_by_host(sight, world, driver)
    newest, there = world.newest(), contents(elsewhere)
    driver.cluster.kill(1)
    driver.cluster.hosts[1] = Host(elsewhere)
    now_ms = world.clock()
    with pytest.raises(RestoreError, match="does not see the driver's checkpoint") as raised:
        driver.run_batch()
    assert "next: pass a checkpoint that driver and executors share" in str(raised.value)
    assert world.clock() == now_ms, "it was not tried again"
    assert world.newest() == newest and contents(elsewhere) == there
    world.check_output()
    # Mounted there, the job goes on.
    after = Driver(world, parallelism=2)
    after.start()
    after.run_batch()
    world.check_all()


@pytest.mark.parametrize("seed", seeds(3, more=3))
def test_slots_that_come_up_on_machines_without_the_mount_lose_nothing(
    seed: int, tmp_path: Path
) -> None:
    world = World(seed, tmp_path)
    refused = 0
    for _ in range(6):
        driver = Driver(world, parallelism=3, trouble=0.02)
        bad = world.random.randrange(4)
        try:
            driver.start()
            for _ in range(3):
                driver.run_batch(6)
                if bad < 3:
                    driver.cluster.kill(bad)
                    driver.cluster.hosts[bad] = Host(open_store("memory:"))
        except RestoreError:
            refused += 1
        except DEATHS:
            pass
    assert refused, "no slot came up there"
    last = Driver(world, parallelism=2)
    last.start()
    last.run_batch()
    world.check_all()


STEPS_S = [-3600.0, -0.01, 0.01, 1.0, 3600.0, 400 * 86_400.0, -400 * 86_400.0]


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_steps_of_the_wall_clock_of_a_host_end_no_slot_and_restore_nothing(
    backend: str, tmp_path: Path
) -> None:
    world = World(7, tmp_path, backend=backend)
    driver = Driver(world, parallelism=3)
    driver.start()
    driver.run_batch()
    slots = dict(driver.cluster.slots)
    driver.cluster.hosts[1] = Host(driver.store)
    for step_s in STEPS_S:
        driver.cluster.hosts[1].clock_step_s += step_s
        driver.run_batch()
        newest = world.newest()
        assert newest is not None and newest.metrics.restored == 0, f"after {step_s} s"
        assert driver.cluster.slots == slots
    world.check_all()


def test_steps_of_the_drivers_wall_clock_change_nothing_but_now(tmp_path: Path) -> None:
    world = World(8, tmp_path)
    driver = Driver(world, parallelism=2)
    driver.start()
    driver.run_batch()
    slots = dict(driver.cluster.slots)
    step_ms = 0.0
    driver.coordinator._clock = lambda: int(world.clock() + step_ms)
    for step_s in STEPS_S:
        step_ms += step_s * 1000
        driver.run_batch()
        newest = world.newest()
        assert newest is not None and newest.metrics.restored == 0, f"after {step_s} s"
    assert driver.cluster.slots == slots
    world.check_all()
