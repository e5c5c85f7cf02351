"""State that expires and open windows, read from the database as they are due, whatever crashes.

Seeded. To try more seeds, or to replay one: CAIRN_SEEDS=100 or CAIRN_SEEDS=17:18.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cairn.backends import expiry, stored_expiry
from cairn.backends.cached import timed_columns
from cairn.backends.cached.backend import CachedBackend
from cairn.backends.handles import batch
from cairn.backends.redis import backend as redis_backend
from cairn.testing import SimulatedCrash, call_at_points
from tests.backends import backend_name
from tests.marks import in_turn
from tests.simulation.operators import OperatorsWorld
from tests.simulation.test_exactly_once import seeds, survive
from tests.simulation.test_operators import BATCH_ROWS, BATCHES, finish, undisturbed
from tests.simulation.world import Driver

DATABASES = ["rocksdb", "postgres", "redis"]
TIMED = [
    "state that expires", "latest with ttl", "deduplicate within", "windows with changes",
    "sessions with changes", "windows of all rows",
]  # fmt: skip


@pytest.fixture(autouse=True)
def few_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0")
    monkeypatch.setattr(CachedBackend, "table_bytes_max", 200)
    monkeypatch.setattr(timed_columns, "PAGE_NAMES", 2)
    monkeypatch.setattr(timed_columns, "PEEKED_NAMES", 1)
    monkeypatch.setattr(stored_expiry, "PIECE_KEYS", 3)
    monkeypatch.setattr(expiry, "_SCAN_KEYS", 2)
    monkeypatch.setattr(redis_backend, "APPLY_EPOCHS", 1)


@pytest.mark.parametrize(("shape", "backend"), in_turn(TIMED, DATABASES))
@pytest.mark.parametrize("seed", seeds(1, more=3))
def test_crashes_leave_the_output_of_timed_state_as_it_is(
    seed: int, shape: str, backend: str, tmp_path: Path
) -> None:
    world = OperatorsWorld(shape, tmp_path, backend_name(backend))
    chance = random.Random(f"{seed} {shape} {backend}")

    def crash_at_times(point: str) -> None:
        if chance.random() < 0.02:
            raise SimulatedCrash(point)

    def lead() -> None:
        with call_at_points(crash_at_times):
            driver = Driver(world, parallelism=chance.choice([1, 2, 3]))
            driver.start()
            while world.committed_rows() < (BATCHES - 1) * BATCH_ROWS:
                if chance.random() < 0.2:
                    driver.rescale(chance.choice([1, 2, 3]))
                    driver.run_changed()
                driver.run_batch(BATCH_ROWS)

    try:
        for _ in range(4):
            survive(lead)
            world.check_log()
        assert finish(world) == undisturbed(shape)
    except BaseException as error:
        error.add_note(f"replay with CAIRN_SEEDS={seed}:{seed + 1}")
        raise


@pytest.mark.parametrize(
    ("shape", "backend"), in_turn(["state that expires", "windows with changes"], DATABASES)
)
def test_state_of_before_the_indexes_is_read_and_stored_by_time(
    shape: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = OperatorsWorld(shape, tmp_path, backend_name(backend))
    with monkeypatch.context() as before:
        before.setattr(CachedBackend, "orders_times", False)
        before.setattr(batch, "stores_times", lambda declaration: False)
        old = Driver(world, parallelism=2)
        old.start()
        for _ in range(3):
            old.run_batch(BATCH_ROWS)
    for parallelism in (2, 3):
        driver = Driver(world, parallelism=parallelism)
        driver.start()
        for _ in range(2):
            driver.run_batch(BATCH_ROWS)
    assert finish(world) == undisturbed(shape)
