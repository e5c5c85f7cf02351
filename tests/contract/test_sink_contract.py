"""One suite over every sink whose published rows can be seen: see tests/places."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.errors import CommitError
from cairn.sinks import Files
from cairn.sinks.base import Committable, Sink
from cairn.testing import Fault, FaultyStore
from tests.places import PLACES, Place, batch


class Stage:
    """A place with a driver and a slot."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.driver = place.opened()
        self.slot = place.opened(in_slot=True)

    def visible(self, driver: Sink | None = None) -> list[tuple[Any, ...]]:
        return self.place.seen(driver or self.driver)

    def leftovers(self) -> list[str]:
        return self.place.leftovers()

    def opened(self, job_id: str = "job", uid: str = "out") -> Sink:
        return self.place.opened(job_id, uid)

    def prepare(
        self, epoch: int, *rows: tuple[Any, ...], subtask: int = 0, attempt: int = 0
    ) -> Committable | None:
        writer = self.slot.writer(epoch, subtask, attempt)
        for row in rows:
            writer.write(batch(row))
        return writer.prepare()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    made = PLACES[request.param](tmp_path)
    yield Stage(made)
    made.close()


def test_what_is_prepared_is_not_seen_until_it_is_committed(place: Stage) -> None:
    prepared = place.prepare(2, (1, "a"), (2, "b"))
    assert place.visible() == []
    assert prepared is not None
    place.driver.commit(2, [prepared])
    assert place.visible() == [(1, "a"), (2, "b")]


def test_committing_again_changes_nothing(place: Stage) -> None:
    prepared = place.prepare(2, (1, "a"))
    for _ in range(3):
        place.driver.commit(2, [prepared])
    assert place.visible() == [(1, "a")]


def test_another_driver_can_commit_what_was_prepared(place: Stage) -> None:
    prepared = place.prepare(2, (1, "a"))
    other = place.opened("job")
    other.commit(2, [prepared])
    other.commit(2, [prepared])
    place.driver.commit(2, [prepared])
    assert place.visible(other) == place.visible() == [(1, "a")]


def test_a_committable_is_json(place: Stage) -> None:
    prepared = place.prepare(2, (1, "é"), (None, None))
    again = json.loads(json.dumps(prepared))
    assert again == prepared
    place.driver.commit(2, [again])
    assert place.visible() == [(1, "é"), (None, None)]


def test_equal_rows_give_equal_committables(place: Stage) -> None:
    first = place.prepare(2, (1, "a"), (2, "b"))
    assert place.prepare(2, (1, "a"), (2, "b"), attempt=1) == first
    assert place.prepare(2, (1, "a"), (3, "b"), attempt=1) != first


def test_no_rows_give_no_committable_and_can_be_committed(place: Stage) -> None:
    assert place.prepare(2) is None
    place.driver.commit(2, [])
    place.driver.commit(2, [])
    assert place.visible() == []
    assert place.leftovers() == []


def test_epochs_and_subtasks_add_up(place: Stage) -> None:
    for epoch in (2, 3, 7):
        place.driver.commit(epoch, [place.prepare(epoch, (1, "x"), subtask=s) for s in range(3)])
    assert place.visible() == [(1, "x")] * 9


def test_equal_rows_written_twice_stay_two_rows(place: Stage) -> None:
    place.driver.commit(2, [place.prepare(2, (1, "a"), (1, "a"), (1, "a"))])
    assert place.visible() == [(1, "a")] * 3


def test_an_aborted_writer_leaves_nothing_to_see(place: Stage) -> None:
    writer = place.slot.writer(2, 0, 0)
    writer.abort()
    writer = place.slot.writer(2, 0, 0)
    writer.write(batch((1, "a")))
    writer.write(batch((2, "b")))
    writer.abort()
    assert place.visible() == []
    place.driver.recover(5)
    assert place.leftovers() == []


def test_a_late_abort_does_not_touch_the_attempt_that_came_after(place: Stage) -> None:
    """A slot given up for dead wakes up; the next attempt has written the very same rows."""
    zombie = place.slot.writer(2, 0, 0)
    zombie.write(batch((1, "a")))
    zombie.write(batch((2, "b")))
    prepared = place.prepare(2, (1, "a"), (2, "b"), attempt=1)
    zombie.abort()
    place.driver.commit(2, [prepared])
    assert place.visible() == [(1, "a"), (2, "b")]


def test_recovery_removes_what_nobody_will_commit(place: Stage) -> None:
    committed = place.prepare(2, (1, "a"))
    place.driver.commit(2, [committed])
    place.prepare(3, (2, "abandoned"))
    place.driver.recover(4)
    assert place.leftovers() == []
    assert place.visible() == [(1, "a")]


def test_recovery_keeps_what_belongs_to_later_epochs(place: Stage) -> None:
    """A driver fenced long ago recovers while the new one has prepared its epoch."""
    prepared = place.prepare(9, (1, "a"))
    place.driver.recover(5)
    place.driver.commit(9, [prepared])
    assert place.visible() == [(1, "a")]


def test_recovery_is_harmless_when_there_is_nothing(place: Stage) -> None:
    place.driver.recover(1)
    place.driver.recover(1)
    assert place.visible() == [] and place.leftovers() == []


@pytest.mark.parametrize("fault", [Fault("move", 2, "after"), Fault("put", 1, "before")])
def test_a_commit_half_done_is_completed(place: Stage, fault: Fault) -> None:
    prepared = [place.prepare(2, (s, "x"), subtask=s) for s in range(3)]
    # By a list nothing is moved; the put is of the mark either way.
    if isinstance(place.driver, Files) and not (place.driver.listed and fault.operation == "move"):
        place.driver._store = FaultyStore(place.driver._store, [fault])
        with pytest.raises(OSError, match="injected"):
            place.driver.commit(2, prepared)
    place.opened("job").commit(2, prepared)
    place.driver.commit(2, prepared)
    assert place.visible() == [(0, "x"), (1, "x"), (2, "x")]


def test_two_sinks_and_two_jobs_in_one_place_do_not_touch_each_other(place: Stage) -> None:
    others = [place.opened("job", "other"), place.opened("another job")]
    mine = place.prepare(2, (1, "a"))
    prepared = []
    for other in others:
        writer = other.writer(2, 0, 0)
        writer.write(batch((1, "a")))
        prepared.append(writer.prepare())
    others[0].recover(9)
    place.driver.commit(2, [mine])
    others[1].commit(2, [prepared[1]])
    assert place.visible() == [(1, "a")] * (2 if place.place.is_shared else 1)


def test_a_sink_travels_to_the_slots_with_its_settings_only(place: Stage) -> None:
    place.driver.commit(2, [place.prepare(2, (1, "a"))])
    again = pickle.loads(pickle.dumps(place.driver))
    again.open(place.driver.context)
    again.commit(3, [place.prepare(3, (2, "b"))])


# What only files can show


def test_the_list_of_an_epoch_names_its_files(tmp_path: Path) -> None:
    place = Stage(PLACES["files"](tmp_path))
    prepared = [place.prepare(2, (s, "x"), subtask=s) for s in range(2)]
    place.driver.commit(2, prepared)
    (listed,) = (tmp_path / "out").glob("_cairn/job/out/epochs/*.json")
    names = {file["name"] for file in json.loads(listed.read_text())["files"]}
    assert names == {file.name for file in (tmp_path / "out").glob("*.parquet")}
    assert listed.name == "000000000002.json"


def test_no_file_of_an_epoch_is_listed_before_all_are_in_place(tmp_path: Path) -> None:
    place = Stage(PLACES["files"](tmp_path))
    prepared = [place.prepare(2, (s, "x"), subtask=s) for s in range(2)]
    staged = sorted((tmp_path / "out").glob("_cairn/job/out/staged/*"))
    staged[1].unlink()
    with pytest.raises(CommitError, match="1 of its files are gone"):
        place.driver.commit(2, prepared)
    assert list((tmp_path / "out").glob("_cairn/job/out/epochs/*")) == []
