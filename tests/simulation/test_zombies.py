"""A driver that sleeps through a takeover and wakes up again changes nothing any more.

It is put to sleep at each crash point, and woken between the steps of the driver that has
taken over since.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cairn.errors import CommitConflictError
from cairn.storage.manifest import SparkPosition
from cairn.testing import call_at_points, crash_points
from tests.marks import in_turn
from tests.simulation.ledger import as_arrow
from tests.simulation.world import ConcurrentQueryError, Driver, World

PATIENCE_S = 30
# Where the driver that has taken over holds something that an older one could spoil.
WAKE_AT = (
    "driver.takeover.written",
    "driver.epoch.ran",
    "driver.manifest.written",
    "driver.sink.committed",
    "driver.epoch.ended",
)


class Sleeper:
    """Work in a thread of its own that falls asleep at a crash point until it is woken."""

    def __init__(self, work: Callable[[], None], point: str) -> None:
        self.error: BaseException | None = None
        self._point = point
        self._asleep = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        assert self._asleep.wait(PATIENCE_S), f"never came to {point}: {self.error!r}"

    def _run(self, work: Callable[[], None]) -> None:
        try:
            with call_at_points(self._pass):
                work()
        except BaseException as error:
            self.error = error

    def _pass(self, name: str) -> None:
        if name == self._point and not self._asleep.is_set():
            self._asleep.set()
            assert self._woken.wait(PATIENCE_S), "never woken"

    def wake_and_wait(self) -> None:
        """One of the two is at work at any time, so a run is the same each time."""
        self._woken.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "still at work"


@pytest.mark.parametrize(
    ("asleep_at", "woken_at"),
    in_turn(
        [
            point
            for point in crash_points("driver")
            if point not in ("driver.savepoint.loaded", "driver.batch.published")
            and not point.startswith(("driver.idle.", "driver.round."))
        ],
        WAKE_AT,
    ),
)
def test_a_driver_that_slept_through_a_takeover_publishes_nothing_more(
    asleep_at: str, woken_at: str, tmp_path: Path
) -> None:
    world = World(11, tmp_path)
    first = Driver(world, parallelism=2)
    first.start()
    first.run_batch()
    old = Driver(world, parallelism=2)

    def lead_until_fenced() -> None:
        old.start()
        for turn in itertools.count():
            old.rescale(1 + turn % 3)
            old.run_batch()

    sleeper = Sleeper(lead_until_fenced, asleep_at)
    new = Driver(world, parallelism=3)

    def wake(point: str) -> None:
        if point == woken_at and sleeper.error is None:
            sleeper.wake_and_wait()

    with call_at_points(wake):
        new.start()
        # The first batch may be the old driver's last, committed already and so skipped.
        new.run_batch()
        new.run_batch()
    # Spark may notice that two queries share a folder before the log does.
    assert isinstance(sleeper.error, CommitConflictError | ConcurrentQueryError), sleeper.error
    world.check_all()


def test_the_epoch_of_a_fenced_driver_is_refused_and_leaves_no_output(tmp_path: Path) -> None:
    world = World(12, tmp_path)
    old = Driver(world)
    old.start()
    old.run_batch()
    new = Driver(world)
    new.start()
    rows = as_arrow(world.rows(10, 20))
    position = SparkPosition(folder="spark/zombie", batch_id=1, offsets="")
    for _ in range(2):
        with pytest.raises(CommitConflictError):
            old.coordinator.run_batch(
                position, lambda begin: old.cluster.execute({"rows": rows}, begin)
            )
        world.check_all()
    new.run_batch()
    world.check_all()
