"""A program that stops between manifest and publication, and another one that goes on.

The other has other columns, another target, another kind of sink, or no such sink. For every
place: nothing of the epoch is lost, published twice, or published where it does not belong.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.errors import PlanError
from cairn.sinks import Noop
from cairn.testing import SimulatedCrash, simulated_crash
from tests.marks import in_turn, one_in
from tests.places import PLACES, Place
from tests.places.base import Row
from tests.simulation.outlets import OutletDriver, OutletWorld, numbered_graph

# A slot that is killed leaves its connections to the garbage collector, which complains.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
LASTING = [name for name, place in PLACES.items() if place.is_shared]
TARGETS = [name for name in LASTING if PLACES[name].has_target]
# Before a sink has published, and after the last one has, when nothing is written down yet.
POINTS = ["driver.manifest.written", "driver.sinks.committed"]


class ChangingWorld(OutletWorld):
    """A world whose program changes from one driver to the next."""

    has_sink = True

    def graph(self) -> Any:
        if self.has_sink:
            return super().graph()
        return numbered_graph(self.group_count, Noop(), uid="another")

    def stop_unpublished(self, point: str) -> None:
        """Commit an epoch whose driver dies at this point."""
        driver = self.driver()
        driver.start()
        driver.run_batch(4)
        with simulated_crash(point), pytest.raises(SimulatedCrash):
            driver.run_batch(4)
        self.end()

    def go_on(self) -> OutletDriver:
        driver = self.driver()
        driver.start()
        return driver

    def skip_batch(self, driver: OutletDriver) -> None:
        """Spark has not heard that its batch of the newest epoch was run."""
        rows = self.committed_rows()
        driver.run_batch(4)
        assert self.committed_rows() == rows

    def publish_and_end(self) -> None:
        """As a run does that starts and is stopped."""
        driver = self.go_on()
        self.check_output()
        self.skip_batch(driver)
        driver.coordinator.note_published()
        self.end()

    def look(self, place: Place) -> list[Row]:
        """Return the rows in a place whose program has ended."""
        return place.seen(place.make())


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChangingWorld]:
    made = ChangingWorld(3, tmp_path, PLACES[request.param])
    yield made
    made.close()


@pytest.mark.parametrize("world", one_in(3, LASTING), indirect=True)
def test_another_program_publishes_the_epoch_with_the_columns_of_the_one_before(
    world: ChangingWorld,
) -> None:
    world.go_on()  # Makes the table, where there is one.
    world.end()
    world.place.add_column("t")
    world.stop_unpublished("driver.manifest.written")
    world.schema = world.place.other_columns()
    driver = world.go_on()
    world.check_output()
    world.skip_batch(driver)
    with simulated_crash("driver.manifest.written"), pytest.raises(SimulatedCrash):
        driver.run_batch(4)
    world.end()
    world.go_on()
    rows = world.place.rows(world._drivers[-1].sink)
    keys = {row[0] for row in world.expected()}
    assert len(rows) == (len(keys) if world.place.is_keyed else world.committed_rows())


@pytest.mark.parametrize(("world", "point"), in_turn(TARGETS, POINTS), indirect=["world"])
def test_an_epoch_is_not_published_to_another_target(world: ChangingWorld, point: str) -> None:
    before = world.place
    check_other_place(world, point, before.elsewhere())


@pytest.mark.parametrize("world", one_in(3, LASTING, first=1), indirect=True)
def test_an_epoch_is_not_published_by_another_kind_of_sink(
    world: ChangingWorld, tmp_path: Path
) -> None:
    is_files = type(world.place).__module__.endswith("files")
    other = PLACES["delta" if is_files else "files"](tmp_path / "other kind")
    check_other_place(world, "driver.manifest.written", other)


def check_other_place(world: ChangingWorld, point: str, other: Place) -> None:
    before = world.place
    world.stop_unpublished(point)
    seen = world.look(before)
    try:
        world.place = other
        with pytest.raises(PlanError, match=r"would lose its output[\s\S]*prepared for") as lost:
            world.go_on()
        world.end()
        assert lost.value.expected != lost.value.found
        assert world.look(before) == seen and world.look(other) == []
        world.place = before
        world.publish_and_end()
        seen = world.look(before)
        world.place = other
        driver = world.go_on()
        assert world.look(other) == [], "what is published stays where it is"
        expected = len(world.expected())
        driver.run_batch(4)
        world.end()
        assert world.look(before) == seen
        after = world.expected()[expected:]
        if other.is_keyed:
            after = list(dict(after).items())
        assert world.look(other) == sorted(after, key=str)
    finally:
        world.end()
        world.place = before
        other.close()


@pytest.mark.parametrize("world", one_in(3, LASTING, first=2), indirect=True)
def test_an_epoch_is_not_lost_with_the_sink_that_was_to_publish_it(world: ChangingWorld) -> None:
    world.stop_unpublished("driver.manifest.written")
    world.has_sink = False
    with pytest.raises(PlanError, match="the program has no such sink"):
        world.go_on()
    world.end()
    world.has_sink = True
    world.publish_and_end()
    seen = world.look(world.place)
    world.has_sink = False
    world.go_on().run_batch(4)
    world.end()
    assert world.look(world.place) == seen
