"""A database that is away, full or slow while no row of it is needed: memory stays bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn import KeyedProcess, state
from cairn.backends.cached.outside import OutsideBackend
from cairn.backends.redis import backend as redis_backend
from cairn.errors import EpochError
from cairn.plan.graph import (
    Graph,
    Inlet,
    Node,
    Port,
    ProcessNode,
    SinkNode,
    SourceNode,
)
from cairn.plan.levels import build_graph
from cairn.types import parse_schema
from tests.backends import OUTSIDE, backend_name
from tests.servers import Postgres, RedisServer
from tests.simulation.world import Driver, Transactional, World
from tests.sqlite_versions import SqliteVersions

ROW = parse_schema("k long, seq long")
KEYS = 4
EPOCH_ROWS = 8
BYTES_MAX = 6_000
"""Memory for unwritten changes: those of about six epochs."""


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0")
    monkeypatch.setattr(redis_backend, "APPLY_EPOCHS", 1)
    monkeypatch.setattr(OutsideBackend, "unwritten_bytes_max", BYTES_MAX)


class Items(KeyedProcess[Any]):
    """Appends to lists whose ends are in memory, and needs no row of the database."""

    items = state.List("long")

    def process(self, row: Any, ctx: Any) -> Any:
        self.items.append(row.seq)
        return row.k, len(self.items)


class ListWorld(World):
    def graph(self) -> Graph:
        nodes: dict[str, Node] = {
            "rows": SourceNode("rows", None, ROW, None, None),
            "items": ProcessNode(
                "items", (Inlet((Port("rows"),), ("k",)),), Items(), parse_schema("k long, n long")
            ),
            "told": SinkNode("told", (Port("items"),), Transactional(self.published.url)),
        }
        return build_graph("items", self.group_count, nodes)

    def arrow(self, start: int, stop: int) -> pa.StructArray:
        rows = [{"k": seq % KEYS, "seq": seq} for seq in range(start, stop)]
        return pa.array(rows, pa.struct(list(ROW)))

    def check(self) -> None:
        """All rows that were committed have been counted once."""
        count = self.committed_rows()
        assert dict(self.seen()) == {(seq % KEYS, seq // KEYS + 1): 1 for seq in range(count)}


class Outage:
    """A database that can be taken away."""

    def __init__(self, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server: Any = None
        self._patch = monkeypatch
        if backend == "sqlite":
            self.url = backend_name("sqlite")
        elif backend == "postgres":
            self._server = Postgres()
            self.url = self._server.new_database()
        else:
            self._server = RedisServer()
            self.url = self._server.url
        self._run = SqliteVersions._run

    def begin(self) -> None:
        if self._server is not None:
            self._server.kill()
            return

        def refuse(self: Any, work: Any) -> Any:
            raise EpochError("the database cannot be used", database=self.where, is_away=True)

        self._patch.setattr(SqliteVersions, "_run", refuse)

    def end(self) -> None:
        if self._server is not None:
            self._server.start()
        self._patch.setattr(SqliteVersions, "_run", self._run)

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()


@pytest.fixture(params=OUTSIDE)
def outage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outage]:
    found = Outage(request.param, monkeypatch)
    yield found
    found.close()


def made_driver(world: World, parallelism: int = 1) -> Driver:
    driver = Driver(world, parallelism=parallelism)
    driver.start()
    return driver


def backends_of(driver: Driver) -> list[OutsideBackend]:
    found = [
        slot.level(0).operators[0].state.backend for slot in list(driver.cluster.slots.values())
    ]
    return [backend for backend in found if isinstance(backend, OutsideBackend)]


@contextmanager
def paused_run(driver: Driver, on_pause: Callable[[str], None]) -> Iterator[list[str]]:
    """Call a function when the job is paused, and return what it says."""
    told: list[str] = []
    slept = driver.world.clock.sleep

    def note(seconds: float) -> None:
        slept(seconds)
        if driver.coordinator.paused is not None:
            told.append(str(driver.coordinator.paused))
            if len(told) == 3:
                on_pause(told[0])

    driver.coordinator._sleep = driver.coordinator._publisher._sleep = note
    yield told
    driver.coordinator._sleep = driver.coordinator._publisher._sleep = slept


def run_bounded(driver: Driver, epochs: int) -> int:
    """Run epochs; return the largest memory of unwritten changes."""
    most = 0
    for _ in range(epochs):
        driver.run_batch(EPOCH_ROWS)
        # In a real slot it runs by itself.
        for slot in driver.cluster.slots.values():
            slot.compactor.work()
        for backend in backends_of(driver):
            most = max(most, backend.unwritten_bytes(with_frozen=True))
    return most


def test_a_job_that_needs_no_row_is_paused_before_unwritten_changes_fill_its_memory(
    outage: Outage, tmp_path: Path
) -> None:
    world = ListWorld(7, tmp_path, backend=outage.url)
    driver = made_driver(world)
    run_bounded(driver, 3)
    before = world.committed_rows()
    outage.begin()
    rows_at_pause: list[int] = []

    def end(told: str) -> None:
        rows_at_pause.append(world.committed_rows())
        outage.end()

    most: list[int] = []
    with paused_run(driver, end) as told:
        runner = threading.Thread(target=lambda: most.append(run_bounded(driver, 20)))
        runner.start()
        runner.join(240)
        assert not runner.is_alive() and most
    assert "operator 'items': memory is full of changes of state that cannot be written" in told[0]
    assert "cannot be" in told[0].partition("cause:")[2]
    assert driver.coordinator.paused is None, "it goes on"
    (paused_at,) = rows_at_pause
    assert paused_at >= before + 3 * EPOCH_ROWS, "it goes on as long as there is memory"
    assert most[0] <= BYTES_MAX + 4_000, "and the changes of two epochs"
    assert world.committed_rows() == before + 20 * EPOCH_ROWS
    assert backends_of(driver)[0].unwritten_bytes(with_frozen=True) < BYTES_MAX
    world.check()


def test_a_paused_job_that_is_restarted_goes_on_when_the_database_is_back(
    outage: Outage, tmp_path: Path
) -> None:
    world = ListWorld(7, tmp_path, backend=outage.url)
    driver = made_driver(world)
    run_bounded(driver, 3)
    outage.begin()

    class GivenUpError(Exception):
        pass

    def give_up(told: str) -> None:
        raise GivenUpError

    with pytest.raises(GivenUpError), paused_run(driver, give_up):
        run_bounded(driver, 20)
    second = made_driver(world, parallelism=2)
    with paused_run(second, lambda told: outage.end()):
        runner = threading.Thread(target=run_bounded, args=(second, 8))
        runner.start()
        runner.join(240)
        assert not runner.is_alive()
    world.check()


def test_an_epoch_waits_for_a_slow_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ListWorld(7, tmp_path, backend=backend_name("postgres"))
    driver = made_driver(world)
    most = 0
    for _ in range(30):
        # No work is done in between: the database is slower than the job.
        monkeypatch.setattr(driver.cluster.trouble.random, "random", lambda: 0.9)
        driver.run_batch(EPOCH_ROWS)
        for backend in backends_of(driver):
            most = max(most, backend.dirty_bytes)
    assert BYTES_MAX < most < BYTES_MAX + 4_000
    assert driver.coordinator.paused is None
    world.check()
