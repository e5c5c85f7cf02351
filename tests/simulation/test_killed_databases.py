"""Driver, slot or database server killed at every point: output and state as if nothing was.

State is in PostgreSQL and in Redis, on servers of their own that are killed as by a power cut, and
in the example of a further database. What Redis loses without a power cut is in `test_redis`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.backends.redis import backend as redis_backend
from cairn.testing import SimulatedCrash, call_at_points
from tests.backends import backend_name
from tests.marks import for_soak
from tests.servers import Postgres, RedisServer
from tests.simulation import test_external, test_redis
from tests.simulation.test_exactly_once import POINTS, survive
from tests.simulation.world import Driver, World

ALL_POINTS = [*POINTS, "slot.rows.applied"]
KILLS = {
    "postgres": ("driver", "slot", "server"),
    "redis": ("driver", "slot", "server", "empty server"),
    "sqlite": ("driver", "slot"),
}
"""An empty server has lost everything: Redis without its file. PostgreSQL keeps what it commits."""
TESTED = {
    ("driver.manifest.written", "postgres", "driver"),
    ("driver.manifest.written", "redis", "slot"),
    ("driver.epoch.begun", "postgres", "server"),
    ("slot.base.begun", "postgres", "server"),
    ("slot.base.begun", "redis", "empty server"),
    ("slot.base.written", "postgres", "slot"),
    ("slot.begun", "redis", "server"),
    ("slot.rows.applied", "postgres", "driver"),
    ("slot.rows.applied", "postgres", "slot"),
    ("slot.rows.applied", "postgres", "server"),
    ("slot.rows.applied", "redis", "driver"),
    ("slot.rows.applied", "redis", "slot"),
    ("slot.rows.applied", "redis", "server"),
    ("slot.restored", "postgres", "driver"),
    ("slot.restored", "redis", "empty server"),
    ("slot.base.written", "sqlite", "driver"),
    ("slot.rows.applied", "sqlite", "slot"),
}
"""What `make test` runs. `make soak` runs all combinations."""
CASES = [
    case if case in TESTED else for_soak(*case)
    for point in ALL_POINTS
    for backend, kills in KILLS.items()
    for killed in kills
    for case in [(point, backend, killed)]
]


class Server:
    """The server of a backend, and what holds for the state in it."""

    def __init__(self, backend: str) -> None:
        self.process: Any
        self.check: Callable[[World], None]
        if backend == "sqlite":
            self.process, self.url = None, backend_name(backend)
            self.check = test_external.check_all_kept
        elif backend == "postgres":
            self.process = Postgres()
            self.url = self.process.new_database()
            self.check = test_external.check_all_kept
        else:
            self.process = RedisServer()
            self.url = self.process.url
            self.check = test_redis.check_all_kept

    def kill_and_start(self, killed: str) -> None:
        self.process.kill()
        self.process.start(**({"is_empty": True} if killed == "empty server" else {}))


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    """The servers that were needed, by backend."""
    found: dict[str, Server] = {}
    yield found
    for server in found.values():
        if server.process is not None:
            server.process.kill()


def new_driver(world: World, parallelism: int) -> Driver:
    driver = Driver(world, parallelism=parallelism)
    driver.start()
    return driver


@pytest.mark.parametrize(("point", "backend", "killed"), CASES)
def test_whatever_is_killed_at_any_point_output_and_state_are_as_without(
    point: str,
    backend: str,
    killed: str,
    tmp_path: Path,
    servers: dict[str, Server],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Bases in every epoch, and in Redis every epoch applied.
    monkeypatch.setenv("CAIRN_BASE_RATIO", "1.5" if backend == "redis" else "0")
    monkeypatch.setattr(redis_backend, "APPLY_EPOCHS", 1)
    if backend not in servers:
        servers[backend] = Server(backend)
    server = servers[backend]
    (tmp_path / "w").mkdir()
    world = World(7, tmp_path / "w", backend=server.url)
    warm = new_driver(world, 2)
    for _ in range(4):
        warm.run_batch(9)
    leading: list[Driver] = []
    passes = 0
    is_of_start = point.startswith(("driver.takeover", "driver.re"))
    """A run passes these once."""

    def kill() -> None:
        if killed == "driver":
            raise SimulatedCrash("driver.killed")
        if killed != "slot":
            server.kill_and_start(killed)
        elif point.startswith("slot."):
            raise SimulatedCrash(point)
        else:
            for driver in leading:
                driver.cluster.slots.clear()

    def kill_once(passed: str) -> None:
        nonlocal passes
        if passed == point:
            passes += 1
            if passes == 2 or is_of_start:
                kill()

    def lead() -> None:
        driver = Driver(world, parallelism=3)
        leading.append(driver)
        driver.start()
        for parallelism in (3, 2, 4, 4):
            driver.rescale(parallelism)
            driver.run_changed()
            driver.run_batch()

    with call_at_points(kill_once):
        lived = survive(lead)
    assert passes >= 2 or is_of_start, "the point is not reached"
    assert lived == (killed != "driver")
    after = new_driver(world, 1)
    after.run_batch()
    after.run_batch()
    world.check_all()
    server.check(world)
