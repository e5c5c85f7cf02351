"""The operators that keep rows, join, or emit changes: a crash at any point changes no output."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.backends.columnar import row_table, runs, table
from cairn.storage.verify import verify
from cairn.testing import SimulatedCrash, call_at_points
from tests.backends import ALL, backend_name
from tests.marks import for_soak, in_turn
from tests.simulation.operators import SHAPES, OperatorsWorld
from tests.simulation.test_exactly_once import POINTS, survive
from tests.simulation.world import Driver

RARE = ("driver.takeover.written", "driver.rewind.laid", "driver.recovered", "slot.base.")
"""Points that are passed once or twice only."""
BATCHES = 8
BATCH_ROWS = 12


@pytest.fixture(autouse=True)
def smaller_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that these few rows are compacted, and laid out again in memory."""
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0.3")
    monkeypatch.setattr(table, "DEAD_MIN", 2)
    monkeypatch.setattr(row_table, "DEAD_MIN", 2)
    monkeypatch.setattr(runs, "PAIRS_MAX", 5)


def lead(world: OperatorsWorld, batches: int, checkpoint_every: int = 1) -> None:
    """Run up to a number of batches of the whole input."""
    driver = Driver(world, parallelism=3, checkpoint_every=checkpoint_every)
    driver.start()
    for parallelism in (3, 2, 4, 4, 1, 2, 3, 3)[world.committed_rows() // BATCH_ROWS : batches]:
        driver.rescale(parallelism)
        driver.run_changed()
        driver.run_batch(BATCH_ROWS)


def finish(world: OperatorsWorld) -> Counter[str]:
    """Run what is left, with another driver, to the end of time, and return all output."""
    driver = Driver(world, parallelism=2)
    driver.start()
    while world.committed_rows() < BATCHES * BATCH_ROWS:
        driver.run_batch(BATCH_ROWS)
    driver.run_idle(is_draining=True)
    world.check_log()
    report = verify(world.store)
    assert report.ok, report.damage
    return world.output()


@functools.cache
def undisturbed(shape: str) -> Counter[str]:
    with tempfile.TemporaryDirectory() as scratch:
        return finish(OperatorsWorld(shape, Path(scratch), "heap"))


def cases() -> Iterator[Any]:
    """Yield every point with every operator and backend; `make test` has each point once."""
    for number, point in enumerate(POINTS):
        for index, shape in enumerate(SHAPES):
            for backend_index, backend in enumerate(ALL):
                is_tested = index == number % len(SHAPES) and backend_index == number % len(ALL)
                case = pytest.param if is_tested else for_soak
                yield case(point, shape, backend, 1 + (number // 2 + index) % 2)


@pytest.mark.parametrize(("point", "shape", "backend", "checkpoint_every"), list(cases()))
def test_a_crash_at_any_point_leaves_the_output_of_each_operator_as_it_is(
    point: str, shape: str, backend: str, checkpoint_every: int, tmp_path: Path
) -> None:
    world = OperatorsWorld(shape, tmp_path, backend_name(backend))
    lead(world, 2)
    nth = 1 if point.startswith(RARE) else 3
    passes: Counter[str] = Counter()

    def crash_once(passed: str) -> None:
        passes[passed] += 1
        if passed == point and passes[point] == nth:
            raise SimulatedCrash(point)

    with call_at_points(crash_once):
        lived = survive(lambda: lead(world, 6, checkpoint_every))
    assert passes[point] >= nth, "the point is not reached"
    assert lived == point.startswith("slot.")
    assert finish(world) == undisturbed(shape)


@pytest.mark.parametrize(("shape", "backend"), in_turn(list(SHAPES), ALL))
def test_parallelism_and_restarts_leave_the_output_of_each_operator_as_it_is(
    shape: str, backend: str, tmp_path: Path
) -> None:
    world = OperatorsWorld(shape, tmp_path, backend_name(backend))
    for batches in (1, 3, 4, 7):
        lead(world, batches)
    found = finish(world)
    assert found == undisturbed(shape)
    assert sum(found.values()) > 5
