"""The contract of a sink, one suite over every place where rows can be seen: tests/places.

Each part is a sentence of `cairn.sinks.base`. A sink whose rows of a key replace each other
(`is_keyed`) shows the last one; one that promises at-least-once may repeat after a crash in
the middle of a commit, and only then: a whole epoch, or rows where it shows pieces.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cairn.errors import CommitError
from cairn.sinks import published
from cairn.sinks.base import Committable, Sink, attempt_of
from cairn.storage.arrow_store import ArrowStore
from cairn.testing import SimulatedCrash, simulated_crash, told_of_passes
from tests.places import PLACES, Place, batch

Row = tuple[Any, ...]

KEYED = [name for name, place in PLACES.items() if place.is_keyed]
# Within a commit: these are the sink's own, and it may pass each of them several times.
POINTS = [("driver.sink.piece", 1), ("driver.sink.piece", 2), ("driver.sink.unmarked", 1)]


class Stage:
    """A place with a driver and a slot."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._opened: list[Sink] = []
        self.driver = self.opened()
        self.slot = self.opened(in_slot=True)

    def opened(self, job_id: str = "job", uid: str = "out", *, in_slot: bool = False) -> Sink:
        sink = self.place.opened(job_id, uid, in_slot=in_slot)
        self._opened.append(sink)
        return sink

    def prepare(
        self,
        epoch: int,
        *rows: Row,
        subtask: int = 0,
        attempt: int = 0,
        slot: Sink | None = None,
    ) -> Committable | None:
        writer = (slot or self.slot).writer(epoch, subtask, attempt)
        for row in rows:
            writer.write(batch(row))
        return writer.prepare()

    def prepared(self, epoch: int, *rows: Row, **where: Any) -> Committable:
        committable = self.prepare(epoch, *rows, **where)
        assert committable is not None
        return committable

    def visible(self, driver: Sink | None = None) -> list[Row]:
        return self.place.seen(driver or self.driver)

    def as_seen(self, *rows: Row) -> list[Row]:
        """What a reader finds when these rows were published, one after the other."""
        if self.place.is_keyed:
            rows = tuple({row[0]: row for row in rows}.values())
        return sorted(rows, key=str)

    def assert_sees(self, *rows: Row, driver: Sink | None = None) -> None:
        assert self.visible(driver) == self.as_seen(*rows)

    def assert_survived(self, *rows: Row, driver: Sink) -> None:
        """After a crash in the commit of these rows' epoch, and a commit that came to its end."""
        if self.driver.promise == "exactly-once" or self.place.is_keyed:
            self.assert_sees(*rows, driver=driver)
            return
        seen, expected = Counter(self.visible(driver)), Counter(rows)
        times = {seen[row] / count for row, count in expected.items()}
        assert seen.keys() == expected.keys() and min(times) >= 1
        assert self.driver.shows == "pieces" or len(times) == 1, "a part of an epoch is repeated"

    def leftovers(self) -> list[str]:
        return self.place.leftovers()

    def close_all(self) -> None:
        while self._opened:
            self._opened.pop().close()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    made = PLACES[request.param](tmp_path)
    stage = Stage(made)
    yield stage
    stage.close_all()
    made.close()


# After `prepare` the data is durable and no reader sees it


def test_what_is_prepared_is_not_seen_until_it_is_committed(place: Stage) -> None:
    prepared = place.prepared(2, (1, "a"), (2, "b"))
    place.assert_sees()
    place.driver.commit(2, [prepared])
    place.assert_sees((1, "a"), (2, "b"))


def test_what_a_slot_prepared_outlives_it(place: Stage) -> None:
    slot = place.opened(in_slot=True)
    prepared = place.prepared(2, (1, "a"), slot=slot)
    slot.close()
    place.driver.commit(2, [prepared])
    place.assert_sees((1, "a"))


def test_no_rows_give_no_committable_and_can_be_committed(place: Stage) -> None:
    assert place.prepare(2) is None
    place.driver.commit(2, [])
    place.driver.commit(2, [])
    place.assert_sees()
    assert place.leftovers() == []


def test_equal_rows_written_twice_stay_two_rows(place: Stage) -> None:
    place.driver.commit(2, [place.prepared(2, (1, "a"), (1, "a"), (1, "a"))])
    place.assert_sees(*[(1, "a")] * 3)


def test_rows_are_seen_as_they_were_written(place: Stage) -> None:
    rows = [
        (1, None),
        (2, ""),
        (3, "é\u2028\n\t\"',;\\{}%"),
        (-(2**63), "x" * place.place.text_length),
    ]
    if not place.place.is_keyed:
        rows.append((None, None))
    if place.place.has_no_empty_text:
        rows.remove((2, ""))
    place.driver.commit(2, [place.prepared(2, *rows)])
    place.assert_sees(*rows)


def test_many_rows_in_a_batch_are_all_seen(place: Stage) -> None:
    rows = [(k, f"s{k % 10}") for k in range(300)]
    writer = place.slot.writer(2, 0, 0)
    writer.write(batch(*rows[:200]))
    writer.write(batch(*rows[200:]))
    prepared = writer.prepare()
    assert prepared is not None
    place.driver.commit(2, [prepared])
    place.assert_sees(*rows)


# A commit is idempotent, by a mark of job, sink, epoch and part


def test_committing_again_changes_nothing(place: Stage) -> None:
    prepared = place.prepared(2, (1, "a"))
    for _ in range(3):
        place.driver.commit(2, [prepared])
    place.assert_sees((1, "a"))


def test_another_driver_can_commit_what_was_prepared(place: Stage) -> None:
    prepared = place.prepared(2, (1, "a"))
    other = place.opened()
    other.commit(2, [prepared])
    other.commit(2, [prepared])
    place.driver.commit(2, [prepared])
    place.assert_sees((1, "a"), driver=other)
    place.assert_sees((1, "a"))


def test_epochs_and_subtasks_add_up(place: Stage) -> None:
    rows = []
    for epoch in (2, 3, 7):
        rows += [(s, f"{epoch}") for s in range(3)]
        prepared = [place.prepared(epoch, (s, f"{epoch}"), subtask=s) for s in range(3)]
        place.driver.commit(epoch, prepared)
    place.assert_sees(*rows)


def test_an_older_epoch_committed_again_changes_nothing(place: Stage) -> None:
    """A driver that slept for long wakes up in the middle of a commit."""
    prepared = {epoch: [place.prepared(epoch, (1, f"{epoch}"))] for epoch in (2, 3)}
    for epoch in (2, 3, 2):
        place.driver.commit(epoch, prepared[epoch])
    place.opened().commit(2, prepared[2])
    place.assert_sees((1, "2"), (1, "3"))


def test_each_part_of_an_epoch_is_published_once(place: Stage) -> None:
    first = place.prepared(2, (1, "a"), attempt=attempt_of(0, 0))
    place.driver.commit(2, [first], part=0)
    place.assert_sees((1, "a"))
    second = place.prepared(2, (1, "b"), (2, "b"), attempt=attempt_of(0, 1))
    place.driver.commit(2, [second], part=1)
    place.driver.commit(2, [first], part=0)
    place.driver.commit(2, [second], part=1)
    place.driver.commit(3, [place.prepared(3, (3, "c"))])
    place.assert_sees((1, "a"), (1, "b"), (2, "b"), (3, "c"))


def test_two_drivers_that_commit_at_once_publish_once(place: Stage) -> None:
    prepared = [place.prepared(2, (s, "x"), subtask=s) for s in range(3)]
    drivers = [place.opened() for _ in range(3)]
    errors = _at_once([lambda d=driver: d.commit(2, prepared) for driver in drivers])
    # One that lost may say so; it is called again until it does not.
    assert len(errors) < len(drivers), errors
    for driver in drivers:
        driver.commit(2, prepared)
    place.assert_survived((0, "x"), (1, "x"), (2, "x"), driver=drivers[0])
    place.driver.recover(3)
    assert place.leftovers() == []


def _at_once(calls: list[Callable[[], None]]) -> list[Exception]:
    errors: list[Exception] = []
    start = threading.Barrier(len(calls))

    def work(call: Callable[[], None]) -> None:
        start.wait()
        try:
            call()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_two_sinks_and_two_jobs_in_one_place_do_not_touch_each_other(place: Stage) -> None:
    mine = place.prepared(2, (1, "a"))
    seen = [(1, "a")]
    others = [place.opened("job", "other"), place.opened("another job")]
    for k, other in enumerate(others, 2):
        slot = place.opened(other.context.job_id, other.context.uid, in_slot=True)
        # Of the same epoch, subtask and attempt.
        theirs = place.prepared(2, (k, "a"), slot=slot)
        place.driver.recover(2)
        other.commit(2, [theirs])
        other.recover(9)
        seen += [(k, "a")] if place.place.is_shared else []
    place.driver.commit(2, [mine])
    place.assert_sees(*seen)


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
    with told_of_passes(fail), _noted(OSError, passed):
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
        with told_of_passes(lambda _, found=found: found.append(place.visible())):
            place.driver.commit(epoch, prepared)
        if place.driver.shows == "epochs":
            whole = [place.as_seen(*before), place.as_seen(*before, *rows)]
            assert all(seen in whole for seen in found)
        else:
            assert all(set(before) <= set(seen) <= {*before, *rows} for seen in found)
        before += rows
    place.assert_sees(*before)


# A committable is plain JSON, equal for equal rows, enough to commit from another machine


def test_a_committable_is_json(place: Stage) -> None:
    prepared = place.prepared(2, (1, "é"), (2, None))
    again = json.loads(json.dumps(prepared))
    assert again == prepared
    place.driver.commit(2, [again])
    place.assert_sees((1, "é"), (2, None))


def test_equal_rows_give_equal_committables(place: Stage) -> None:
    """Also when the attempt runs again, in another slot; and they are published once."""
    first = place.prepared(2, (1, "a"), (2, "b"))
    again = place.prepared(2, (1, "a"), (2, "b"), slot=place.opened(in_slot=True))
    assert json.dumps(again) == json.dumps(first)
    if place.place.is_one_whatever_the_batches:
        writer = place.opened(in_slot=True).writer(2, 0, 0)
        writer.write(batch((1, "a"), (2, "b")))
        assert json.dumps(writer.prepare()) == json.dumps(first)
    place.driver.commit(2, [again])
    place.driver.recover(3)
    place.assert_sees((1, "a"), (2, "b"))
    assert place.leftovers() == []


def test_a_sink_travels_with_its_settings_only(place: Stage) -> None:
    place.driver.commit(2, [place.prepared(2, (1, "a"))])
    slot = pickle.loads(pickle.dumps(place.driver))
    slot.open(place.place.context(in_slot=True))
    place.driver.commit(3, [place.prepared(3, (2, "b"), slot=slot)])
    place.assert_sees((1, "a"), (2, "b"))
    slot.close()


# Passes and attempts


def test_all_passes_of_an_epoch_are_published_together(place: Stage) -> None:
    """Batches of an interval, rounds of a loop: equal rows of another pass are other rows."""
    prepared = [
        place.prepared(2, (1, "a"), (1, "a"), attempt=attempt_of(0, pass_index))
        for pass_index in range(3)
    ]
    place.assert_sees()
    place.driver.commit(2, prepared)
    place.assert_sees(*[(1, "a")] * 6)


@pytest.mark.parametrize("place", KEYED, indirect=True)
def test_the_last_row_of_a_key_is_that_of_the_last_pass(place: Stage) -> None:
    prepared = [
        place.prepared(2, (1, f"{p} first"), (1, f"{p} last"), attempt=attempt_of(0, p))
        for p in (0, 1)
    ]
    place.driver.commit(2, prepared)
    place.assert_sees((1, "1 last"))
    place.driver.commit(3, [place.prepared(3, (1, "s0"))])
    place.assert_sees((1, "s0"))
    place.driver.commit(4, [place.prepared(4, (1, f"s{s}"), subtask=s) for s in range(3)])
    place.assert_sees((1, "s2"))


@pytest.mark.parametrize("late", ["a", "other"])
def test_of_several_attempts_the_one_that_is_named_is_published(place: Stage, late: str) -> None:
    place.prepared(2, (1, late), attempt=attempt_of(0, 0))
    named = place.prepared(2, (1, "a"), attempt=attempt_of(1, 0))
    place.prepared(2, (1, late), (2, late), attempt=attempt_of(2, 0))
    place.driver.commit(2, [named])
    place.assert_sees((1, "a"))
    place.driver.recover(3)
    place.assert_sees((1, "a"))
    assert place.leftovers() == []


def test_an_aborted_writer_leaves_nothing(place: Stage) -> None:
    writer = place.slot.writer(2, 0, 0)
    writer.abort()
    writer = place.slot.writer(2, 0, 0)
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
    zombie = place.opened(in_slot=True).writer(2, 0, 0)
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
    zombie = slot.writer(2, 0, 0)
    zombie.write(batch((1, "a")))
    prepared = place.prepared(2, (1, "a"), (2, "b"), attempt=attempt)
    with contextlib.suppress(Exception):
        # It may be told that it is too late.
        zombie.write(batch((2, "b")))
        zombie.prepare()
    place.driver.commit(2, [prepared])
    place.assert_sees((1, "a"), (2, "b"))
    with contextlib.suppress(Exception):
        place.prepare(2, (1, "a"), (2, "b"), attempt=attempt, slot=slot)
    place.assert_sees((1, "a"), (2, "b"))
    slot.close()
    place.driver.commit(2, [prepared])
    place.driver.recover(3)
    place.assert_sees((1, "a"), (2, "b"))
    assert place.leftovers() == []


# What was prepared and never named in a manifest is removed by `recover`


def test_recovery_removes_what_nobody_will_commit(place: Stage) -> None:
    place.driver.commit(2, [place.prepared(2, (1, "a"))])
    place.prepared(3, (2, "abandoned"))
    place.prepared(4, (3, "abandoned"), subtask=1, attempt=attempt_of(2, 1))
    place.driver.recover(5)
    assert place.leftovers() == []
    place.assert_sees((1, "a"))


def test_recovery_removes_what_a_killed_slot_left_half_written(place: Stage) -> None:
    slot = place.opened(in_slot=True)
    writer = slot.writer(2, 0, 0)
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


# The end


def test_a_closed_sink_holds_nothing_open(place: Stage) -> None:
    place.slot.writer(2, 1, 0).write(batch((1, "a")))
    place.driver.commit(2, [place.prepared(2, (1, "a"))])
    place.driver.recover(3)
    place.close_all()
    place.driver.close()
    assert place.place.connections() == []


# What only files can show


@pytest.mark.parametrize("name", [name for name in PLACES if name.startswith("files")])
def test_recovery_removes_what_a_slot_killed_in_the_middle_of_a_file_left(
    name: str, tmp_path: Path
) -> None:
    place = Stage(PLACES[name](tmp_path))
    kept = place.prepared(5, (1, "a"))

    def killed(*_: Any) -> None:
        raise SimulatedCrash("in the middle of a file")

    store = place.slot._store  # type: ignore[attr-defined]
    with contextlib.ExitStack() as patches:
        # The file is written, and the process gone before it has its name.
        if isinstance(store, ArrowStore):
            patches.enter_context(mock.patch.object(store, "_rename", killed))
            patches.enter_context(mock.patch.object(store._fs, "delete_file", killed))
        else:
            patches.enter_context(mock.patch("os.replace", killed))
            patches.enter_context(mock.patch("os.unlink", killed))
        for epoch in (2, 5):
            with contextlib.suppress(SimulatedCrash):
                place.prepare(epoch, (2, "b"))
    for path in place.place.scratch.iterdir():
        path.unlink()  # A slot's scratch goes with it.
    left = place.leftovers()
    place.driver.recover(5)
    # One of epoch 5 may be at work.
    assert sum("/.part-" in path for path in left) == (0 if place.place.is_far else 2)
    assert sum("/.part-" in path for path in place.leftovers()) == (0 if place.place.is_far else 1)
    place.driver.commit(5, [kept])
    place.driver.recover(6)
    assert place.leftovers() == []
    place.assert_sees((1, "a"))
    place.close_all()
    place.place.close()


def test_the_list_of_an_epoch_names_its_files(tmp_path: Path) -> None:
    place = Stage(PLACES["files"](tmp_path))
    prepared = [place.prepared(2, (s, "x"), subtask=s) for s in range(2)]
    place.driver.commit(2, prepared)
    (listed,) = (tmp_path / "out").glob("_cairn/job/out/epochs/*.json")
    names = {file["name"] for file in json.loads(listed.read_text())["files"]}
    assert names == {file.name for file in (tmp_path / "out").glob("*.parquet")}
    assert listed.name == "000000000002.json"


@pytest.mark.parametrize("name", [name for name in PLACES if name.startswith("files")])
def test_whoever_reads_what_is_published_sees_whole_epochs(name: str, tmp_path: Path) -> None:
    """Also of a folder without a list, whose plain readers see files come one by one."""
    place = Stage(PLACES[name](tmp_path))
    prepared = [place.prepared(2, (s, "x"), subtask=s) for s in range(3)]
    found: list[int] = []
    with told_of_passes(lambda _: found.append(len(published(place.driver.path)))):
        place.driver.commit(2, prepared)
    assert set(found) <= {0, 3}
    assert len(published(place.driver.path)) == 3
    place.place.close()


def test_no_file_of_an_epoch_is_listed_before_all_are_in_place(tmp_path: Path) -> None:
    place = Stage(PLACES["files"](tmp_path))
    prepared = [place.prepared(2, (s, "x"), subtask=s) for s in range(2)]
    staged = sorted((tmp_path / "out").glob("_cairn/job/out/staged/*"))
    staged[1].unlink()
    with pytest.raises(CommitError, match="1 of its files are gone"):
        place.driver.commit(2, prepared)
    assert list((tmp_path / "out").glob("_cairn/job/out/epochs/*")) == []
