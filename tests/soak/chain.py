"""Drivers that die one after the other, each at a point of its own, on one checkpoint.

Always true here:
- each driver finds new batches, and is killed in one of them or says that it passed them all;
- after each of them, what the targets show is whole batches from the first on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers import Postgres
from tests.soak.driver import Driver
from tests.soak.events import Events
from tests.soak.reader import check_prefix
from tests.soak.targets import Site, targets

BATCHES = 1
"""New ones for each driver; it also runs what the one before did not get done."""


@dataclass
class Chain:
    """One checkpoint and its drivers."""

    site: Site
    names: Sequence[str]
    seed: int = 1
    on: Any = None
    """The session whose Spark the drivers run on; without it each starts its own."""
    killed: list[str] = field(default_factory=list)
    passed_by: list[str] = field(default_factory=list)
    """Places where no driver came by."""

    def __post_init__(self) -> None:
        self.site.save()
        self.events = Events(self.site.path / "in", self.seed)

    @property
    def folder(self) -> Path:
        return self.site.path

    def drive(self, *arguments: object, **environment: str) -> Driver:
        """Start a driver; the caller ends it."""
        names = ",".join(self.names)
        return Driver(self.folder, "--targets", names, *arguments, on=self.on, **environment)

    def die(self, places: Iterable[str]) -> None:
        """POINT[@TARGET][:NTH], one driver each."""
        for number, place in enumerate(places):
            self.events.add(BATCHES)
            parallelism = 1 + number % 3
            with self.drive("--at", f"{place}=kill", "--parallelism", parallelism) as driver:
                ended = driver.wait()
                if driver.was_killed:
                    self.killed.append(place)
                else:
                    assert ended and ended["end"] == "finished", driver.errors()
                    self.passed_by.append(place)
            self.check_prefix(place)

    def outlast(self, server: Postgres, seconds: float) -> None:
        """PostgreSQL goes away in the middle of a commit, and the driver waits for it."""
        self.events.add(3)
        # The first time it comes by may be before the run begins, when it repeats the last commit.
        with self.drive("--at", "driver.sink.unmarked@postgres:2=stop") as driver:
            assert driver.await_report(at=...), driver.errors()
            server.stop()
            try:
                driver.go_on()
                assert driver.await_report(status="paused"), driver.errors()
                time.sleep(seconds)
                assert driver.lives, driver.errors()
            finally:
                server.start()
            ended = driver.wait()
            assert ended and ended["end"] == "finished", driver.errors()

    def check_prefix(self, after: str = "") -> None:
        for name, target in targets(self.site, list(self.names)).items():
            if target.shows_epochs:
                problem = check_prefix(target.batches())
                assert problem is None, f"{name} after {after}: {problem}"

    def finish(self) -> None:
        """A driver that nobody kills runs to the end; then everything is compared."""
        with self.drive() as driver:
            ended = driver.wait()
            assert ended and ended["end"] == "finished", driver.errors()
        self.check()

    def check(self) -> None:
        for target in targets(self.site, list(self.names)).values():
            target.check(self.events)
