"""The contract of a sink when something fails, over every place of tests/places.

Crashes within a commit, attempts that were in vain, slots given up for dead, recovery. For
what a sink may show then see test_sink_contract.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from cairn.errors import EpochError
from cairn.sinks.base import Execution
from cairn.testing import SimulatedCrash, call_at_points, simulated_crash
from tests.places import PLACES, batch
from tests.places.base import Row
from tests.places.stage import Stage

KEYED = [name for name, place in PLACES.items() if place.is_keyed]
# Within a commit: these are the sink's own, and it may pass each of them several times.
POINTS = [("driver.sink.piece", 1), ("driver.sink.piece", 2), ("driver.sink.unmarked", 1)]


# It is called again until it succeeds, by whichever driver leads


@pytest.mark.parametrize(("point", "nth"), POINTS)
def test_a_driver_that_dies_in_a_commit_is_followed_by_one_that_completes_it(
    place: Stage, point: str, nth: int
) -> None:
    rows = [(s, "x") for s in range(3)]
    prepared = [place.prepared(2, row, subtask=s) for s, row in enumerate(rows)]
    passed: list[bool] = []
    with simulated_crash(point, nth), _noted(SimulatedCrash, passed):
        place.driver.commit(2, prepared)
    _skip_if_not_passed(place, point, passed)
    new = place.opened()
    new.commit(2, prepared)
    new.recover(3)
    place.assert_survived(*rows, driver=new)
    assert place.leftovers() == []


@pytest.mark.parametrize(("point", "nth"), POINTS)
def test_a_commit_that_fails_half_way_is_completed_by_the_next_call(
    place: Stage, point: str, nth: int
) -> None:
    rows = [(s, "x") for s in range(3)]
    prepared = [place.prepared(2, row, subtask=s) for s, row in enumerate(rows)]
    passes = 0

    def fail(name: str) -> None:
        nonlocal passes
        passes += name == point
        if name == point and passes == nth:
            raise OSError("injected")

    passed: list[bool] = []
    with call_at_points(fail), _noted(OSError, passed):
        place.driver.commit(2, prepared)
    _skip_if_not_passed(place, point, passed)
    place.driver.commit(2, prepared)
    place.assert_survived(*rows, driver=place.driver)
    place.driver.commit(3, [place.prepared(3, (7, "y"))])
    assert (7, "y") in place.visible()


@contextlib.contextmanager
def _noted(error: type[BaseException], passed: list[bool]) -> Iterator[None]:
    try:
        yield
    except error:
        passed.append(True)


def _skip_if_not_passed(place: Stage, point: str, passed: list[bool]) -> None:
    """Not each sink has pieces; each but one without a mark is about to write it."""
    if not passed:
        is_piece = point == "driver.sink.piece"
        assert not (place.place.is_in_pieces if is_piece else place.place.has_mark)
        pytest.skip(f"a commit does not pass {point} here")


def test_a_reader_sees_whole_epochs_in_order_while_they_are_committed(place: Stage) -> None:
    """One that says it shows pieces shows those of the epoch at work, and no others."""
    before: list[Row] = []
    for epoch in (2, 3):
        rows = [(3 * epoch + s, "x") for s in range(3)]
        prepared = [place.prepared(epoch, row, subtask=s) for s, row in enumerate(rows)]
        found: list[list[Row]] = []
        with call_at_points(lambda _, found=found: found.append(place.visible())):
            place.driver.commit(epoch, prepared)
        assert found or not place.place.has_mark
        if place.driver.shows == "epochs":
            whole = [place.as_seen(*before), place.as_seen(*before, *rows)]
            assert all(seen in whole for seen in found)
        else:
            assert all(set(before) <= set(seen) <= {*before, *rows} for seen in found)
        before += rows
    place.assert_sees(*before)


# Passes and attempts


def test_all_passes_of_an_epoch_are_published_together(place: Stage) -> None:
    """Batches of an interval, rounds of a loop: equal rows of another pass are other rows."""
    prepared = [place.prepared(2, (1, "a"), (1, "a"), round=n) for n in range(3)]
    place.assert_sees()
    place.driver.commit(2, prepared)
    place.assert_sees(*[(1, "a")] * 6)


@pytest.mark.parametrize("place", KEYED, indirect=True)
def test_the_last_row_of_a_key_is_that_of_the_last_pass(place: Stage) -> None:
    prepared = [place.prepared(2, (1, f"{p} first"), (1, f"{p} last"), round=p) for p in (0, 1)]
    place.driver.commit(2, prepared)
    place.assert_sees((1, "1 last"))
    place.driver.commit(3, [place.prepared(3, (1, "s0"))])
    place.assert_sees((1, "s0"))
    place.driver.commit(4, [place.prepared(4, (1, f"s{s}"), subtask=s) for s in range(3)])
    place.assert_sees((1, "s2"))


@pytest.mark.parametrize("late", ["a", "other"])
def test_of_several_attempts_the_one_that_is_named_is_published(place: Stage, late: str) -> None:
    place.prepared(2, (1, late), attempt=0)
    named = place.prepared(2, (1, "a"), attempt=1)
    place.prepared(2, (1, late), (2, late), attempt=2)
    place.driver.commit(2, [named])
    place.assert_sees((1, "a"))
    place.driver.recover(3)
    place.assert_sees((1, "a"))
    assert place.leftovers() == []


def test_an_aborted_writer_leaves_nothing(place: Stage) -> None:
    writer = place.slot.writer(2, 0, Execution())
    writer.abort()
    writer = place.slot.writer(2, 0, Execution())
    writer.write(batch((1, "a")))
    writer.write(batch((2, "b")))
    writer.abort()
    place.assert_sees()
    place.driver.recover(5)
    assert place.leftovers() == []
    place.driver.commit(7, [place.prepared(7, (3, "c"))])
    place.assert_sees((3, "c"))


def test_a_late_abort_does_not_touch_the_attempt_that_came_after(place: Stage) -> None:
    """A slot given up for dead wakes up; the next attempt has written the very same rows."""
    zombie = place.opened(in_slot=True).writer(2, 0, Execution())
    zombie.write(batch((1, "a")))
    zombie.write(batch((2, "b")))
    prepared = place.prepared(2, (1, "a"), (2, "b"), attempt=1)
    zombie.abort()
    place.driver.commit(2, [prepared])
    place.assert_sees((1, "a"), (2, "b"))


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_slot_given_up_for_dead_that_prepares_late_adds_nothing(
    place: Stage, attempt: int
) -> None:
    """With the number of the attempt that took its place, or with an earlier one."""
    slot = place.opened(in_slot=True)
    zombie = slot.writer(2, 0, Execution())
    zombie.write(batch((1, "a")))
    prepared = place.prepared(2, (1, "a"), (2, "b"), attempt=attempt)
    with contextlib.suppress(EpochError):
        # It may be told that it is too late.
        zombie.write(batch((2, "b")))
        zombie.prepare()
    place.driver.commit(2, [prepared])
    place.assert_sees((1, "a"), (2, "b"))
    with contextlib.suppress(EpochError):
        place.prepare(2, (1, "a"), (2, "b"), attempt=attempt, slot=slot)
    place.assert_sees((1, "a"), (2, "b"))
    slot.close()
    place.driver.commit(2, [prepared])
    place.driver.recover(3)
    place.assert_sees((1, "a"), (2, "b"))
    assert place.leftovers() == []


# `recover` removes prepared data that no manifest names


def test_recovery_removes_what_nobody_will_commit(place: Stage) -> None:
    place.driver.commit(2, [place.prepared(2, (1, "a"))])
    place.prepared(3, (2, "abandoned"))
    place.prepared(4, (3, "abandoned"), subtask=1, attempt=2, round=1)
    place.driver.recover(5)
    assert place.leftovers() == []
    place.assert_sees((1, "a"))


def test_recovery_removes_what_a_killed_slot_left_half_written(place: Stage) -> None:
    slot = place.opened(in_slot=True)
    writer = slot.writer(2, 0, Execution())
    writer.write(batch((1, "a")))
    del writer
    slot.close()
    for path in place.place.scratch.iterdir():
        path.unlink()  # A slot's scratch goes with it.
    place.driver.recover(3)
    place.assert_sees()
    assert place.leftovers() == []


def test_recovery_keeps_what_belongs_to_later_epochs(place: Stage) -> None:
    """A driver fenced long ago recovers while the new one has prepared its epoch."""
    place.prepared(4, (1, "abandoned"))
    prepared = place.prepared(9, (1, "a"))
    place.driver.recover(5)
    place.driver.commit(9, [prepared])
    place.assert_sees((1, "a"))


def test_recovery_is_harmless_when_there_is_nothing(place: Stage) -> None:
    place.driver.recover(1)
    place.driver.recover(1)
    place.assert_sees()
    assert place.leftovers() == []


def test_what_was_recovered_away_is_never_published_by_half(place: Stage) -> None:
    """By a driver that publishes before the record is written, and was fenced meanwhile."""
    prepared = [place.prepared(3, (s, "x"), subtask=s) for s in range(3)]
    place.opened().recover(5)
    try:
        place.driver.commit(3, prepared)
    except Exception:
        place.assert_sees()
    else:
        # Its rows are in the committable: there was nothing to remove.
        place.assert_sees((0, "x"), (1, "x"), (2, "x"))
    assert place.leftovers() == []
    place.driver.commit(6, [place.prepared(6, (7, "y"))])
    assert (7, "y") in place.visible()
