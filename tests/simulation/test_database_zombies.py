"""Two drivers and one database: the older one sleeps while it writes, and wakes after the takeover.

What it writes then is refused, or counts nowhere: output and state are those of the newer driver.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cairn.backends.redis import backend as redis_backend
from cairn.backends.redis import base as redis_base
from cairn.backends.versioned import base as versioned_base
from cairn.crash import crash_point
from cairn.slot.compactor import Compactor
from cairn.testing import call_at_points
from tests.backends import SERVERS, backend_name
from tests.marks import for_soak
from tests.simulation import test_external, test_redis
from tests.simulation.test_zombies import Sleeper
from tests.simulation.world import DEATHS, Driver, World

BETWEEN_PIECES = "slot.between.pieces"
"""Some rows of the change are in the database, others are not."""
ASLEEP_AT = (
    "slot.begun",
    "slot.base.begun",
    BETWEEN_PIECES,
    "slot.rows.applied",
    "slot.base.written",
    "driver.manifest.written",
)
LATER = "later"
"""The newer driver has claimed and written all key groups, and does nothing."""
WOKEN_AT = ("driver.takeover.written", "slot.restored", "driver.epoch.ran", LATER)
TESTED = {(backend, BETWEEN_PIECES, LATER) for backend in SERVERS}
CASES = [
    case if case in TESTED else for_soak(*case)
    for case in itertools.product(SERVERS, ASLEEP_AT, WOKEN_AT)
]
CHECKS: dict[str, Callable[[World], None]] = {
    "postgres": test_external.check_all_kept,
    "redis": test_redis.check_all_kept,
}


@pytest.fixture(autouse=True)
def every_epoch_is_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0")
    monkeypatch.setattr(redis_backend, "APPLY_EPOCHS", 1)
    monkeypatch.setattr(versioned_base, "_STEP_OPS", 3)
    monkeypatch.setattr(redis_base, "_STEP_OPS", 3)
    monkeypatch.setattr(Compactor, "_pace", lambda self: crash_point(BETWEEN_PIECES))


def dump(world: World, backend: str) -> Any:
    """Everything that the job has in the database."""
    if backend == "redis":
        return test_redis.keys_in_redis(world)
    return [
        test_external.query(world, f"select * from {{s}}.{table} as t order by t::text")
        for table in ("rows", "ranges")
    ]


@pytest.mark.parametrize(("backend", "asleep_at", "woken_at"), CASES)
def test_a_driver_that_wakes_while_it_writes_to_the_database_changes_nothing(
    backend: str,
    asleep_at: str,
    woken_at: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(11, tmp_path, backend=backend_name(backend))
    first = Driver(world, parallelism=2)
    first.start()
    for _ in range(3):
        first.run_batch(9)
    old = Driver(world, parallelism=2)

    def lead_until_fenced() -> None:
        old.start()
        while True:
            old.run_batch(9)

    sleeper = Sleeper(lead_until_fenced, asleep_at)
    new = Driver(world, parallelism=3)
    is_woken = False

    def wake(point: str) -> None:
        nonlocal is_woken
        if point == woken_at and not is_woken:
            is_woken = True
            sleeper.wake_and_wait()

    with call_at_points(wake):
        new.start()
        for _ in range(3):
            new.run_batch(9)
    if woken_at == LATER:
        before = dump(world, backend)
        wake(LATER)
        assert dump(world, backend) == before
    assert is_woken, "the point is not reached"
    # A slot may be refused before its driver: the run ends as superseded all the same.
    assert isinstance(sleeper.error, DEATHS) and not old.coordinator.log.is_leading()
    assert "runs again, attempt 5" not in caplog.text, "its attempts end soon"
    for _ in range(2):
        new.run_batch(9)
    world.check_all()
    CHECKS[backend](world)
