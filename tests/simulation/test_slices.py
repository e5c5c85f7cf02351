"""Slots that are short of memory: batches are read in slices, and every row counts once.

A slot here has memory for three pieces of rows (of seven rows each) at a time, in all its levels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cairn.protocol.messages import Begin
from cairn.slot import runtime
from cairn.slot.memory import Room
from cairn.testing import SimulatedCrash, call_at_points
from tests.simulation.looping import HopsWorld
from tests.simulation.test_exactly_once import seeds, survive
from tests.simulation.world import Driver, World

PIECES_MAX = 3


class SmallRoom(Room):
    """A unit of memory for each piece of rows in an execution."""

    def __init__(self, limit: int) -> None:
        super().__init__(PIECES_MAX + 1, lambda: self.pieces)
        self.pieces = 0

    def begin(self, begin: Begin) -> None:
        if (begin.epoch, begin.execution) != self._present:
            self.pieces = 0
        super().begin(begin)

    def check(self, begin: Begin) -> None:
        self.pieces += 1
        super().check(begin)


@pytest.fixture(autouse=True)
def small_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "Room", SmallRoom)


def test_a_batch_that_does_not_fit_is_committed_in_one_epoch_of_several_rounds(
    tmp_path: Path,
) -> None:
    world = World(5, tmp_path)
    driver = Driver(world, parallelism=2)
    driver.start()
    driver.run_batch(120)
    newest = world.newest()
    assert newest is not None and newest.parent is None and world.committed_rows() == 120
    assert newest.timings.rounds >= 4 and newest.timings.attempts > 2
    world.check_all()
    driver.run_batch(60)
    newest = world.newest()
    assert newest is not None and newest.timings.attempts == 1, "the next one begins in slices"
    world.check_all()


def test_epochs_without_a_batch_are_not_divided(tmp_path: Path) -> None:
    world = World(5, tmp_path)
    driver = Driver(world, parallelism=2)
    driver.start()
    driver.run_batch(120)
    driver.run_changed()
    newest = world.newest()
    assert newest is not None and newest.parent is not None and newest.timings.rounds == 1


def test_a_crash_between_two_slices_leaves_nothing_of_the_batch(tmp_path: Path) -> None:
    world = World(7, tmp_path)
    driver = Driver(world, parallelism=2)
    driver.start()
    driver.run_batch(10)
    passed = []

    def crash(point: str) -> None:
        passed.append(point)
        if passed.count("driver.round.ran") == 2:
            raise SimulatedCrash(point)

    with call_at_points(crash), pytest.raises(SimulatedCrash):
        driver.run_batch(120)
    assert world.committed_rows() == 10
    world.check_all()
    again = Driver(world, parallelism=3)
    again.start()
    again.run_batch(120)
    assert world.committed_rows() == 130
    world.check_all()


@pytest.mark.parametrize("make", [World, partial(HopsWorld, rounds_max=2)], ids=["keyed", "loop"])
@pytest.mark.parametrize("seed", seeds(1, more=3))
def test_no_row_is_lost_or_doubled_in_slices_whatever_fails(
    make: Callable[..., Any], seed: int, tmp_path: Path
) -> None:
    world = make(seed, tmp_path)
    chance = world.random

    def crash_at_times(point: str) -> None:
        if chance.random() < 0.005:
            raise SimulatedCrash(point)

    def lead() -> None:
        with call_at_points(crash_at_times):
            driver = Driver(
                world,
                parallelism=chance.choice([1, 2, 3]),
                fault_rate=chance.choice([0.0, 0.003]),
                trouble=chance.choice([0.0, 0.02]),
                checkpoint_every=chance.choice([1, 3]),
            )
            driver.start()
            world.check_output()
            for _ in range(chance.randrange(1, 6)):
                if chance.random() < 0.3:
                    driver.rescale(chance.choice([1, 2, 3, 5]))
                driver.run_batch(chance.choice([0, 10, 60]))
                world.check_output()
                world.clock.advance_ms(chance.choice([0, 1000]))

    try:
        for _ in range(6):
            survive(lead)
            world.check_log()
        last = Driver(world, parallelism=2)
        last.start()
        last.run_batch(60)
        newest = last.coordinator.newest
        assert newest is not None and newest.timings.rounds > 3, "it was divided"
        while last.run_idle():
            pass
        world.check_all()
    except BaseException as error:
        error.add_note(f"replay with CAIRN_SEEDS={seed}:{seed + 1}")
        raise
