"""One fault of the store, at each call in turn: nothing changes but the time it takes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cairn.testing import Fault
from tests.marks import for_soak
from tests.simulation.world import DEATHS, Driver, World


@pytest.mark.parametrize(
    ("kind", "step"), [("after", 3), for_soak("after", 1), for_soak("before", 1)]
)
def test_a_fault_at_any_call_to_the_store_changes_nothing_but_time(
    kind: str, step: int, tmp_path: Path
) -> None:
    """At every call in `make soak`, else at every third of them."""
    for call in itertools.count(1, step):
        folder = tmp_path / str(call)
        folder.mkdir()
        if not goes_on_after_fault(Fault("*", call, kind), World(3, folder)):
            break
    assert call > 40, "the simulation hardly used the store"


def goes_on_after_fault(fault: Fault, world: World) -> bool:
    """False when the simulation was over before the fault struck."""
    first = Driver(world, parallelism=2)
    first.start()
    first.run_batch(8)
    try:
        faulty = Driver(world, parallelism=1, faults=[fault], retained_epochs=1)
        faulty.start()
        for _ in range(3):
            faulty.run_batch(4)
        if not faulty.store.faults_seen:
            return False
    except DEATHS:
        pass
    last = Driver(world, parallelism=2)
    last.start()
    last.run_batch(4)
    world.check_all()
    return True


@pytest.mark.parametrize("call", range(2, 8))
def test_a_collection_that_died_half_way_leaves_a_log_that_can_be_read(
    call: int, tmp_path: Path
) -> None:
    """Records go one by one, so one may be left without the one it was written against."""
    world = World(1, tmp_path)
    driver = Driver(world, faults=[Fault("delete", call, "before")], retained_epochs=1)
    driver.start()
    while not driver.store.faults_seen:
        driver.run_batch(2)
    world.check_log()
    after = Driver(world, retained_epochs=1)
    after.start()
    after.run_batch()
    world.check_all()


def test_a_run_goes_on_while_nothing_can_be_collected(tmp_path: Path) -> None:
    world = World(2, tmp_path)
    driver = Driver(world, retained_epochs=1)
    driver.start()
    for _ in range(50):
        driver.store.plan(
            *(Fault("delete", driver.store.calls["delete"] + n, "before") for n in range(1, 9))
        )
        driver.run_batch(2)
    assert len(driver.store.faults_seen) > 1
    world.check_all()


def test_a_restore_that_failed_half_way_is_not_taken_for_the_state(tmp_path: Path) -> None:
    world = World(5, tmp_path)
    first = Driver(world, parallelism=1)
    first.start()
    for _ in range(4):
        first.run_batch()
    second = Driver(world, parallelism=1)
    second.start()
    # Several files make up the state; the second one cannot be read at the first attempt.
    reads = second.store.calls["get_range"]
    second.store.plan(Fault("get_range", reads + 2, "before"))
    second.run_batch()
    assert second.store.faults_seen
    world.check_all()
