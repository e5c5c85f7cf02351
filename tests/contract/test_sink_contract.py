"""The contract of a sink, one suite over every place where rows can be seen: tests/places.

Each part is a sentence of `cairn.sinks.base`. A sink whose rows of a key replace each other
(`is_keyed`) shows the last one; one that promises at-least-once may repeat after a crash in
the middle of a commit, and only then: a whole epoch, or rows where it shows pieces.
"""

from __future__ import annotations

import json
import pickle
from functools import partial

import pytest

from cairn.driver.coordinator.marks import check_marks
from cairn.errors import RestoreError
from cairn.sinks.base import Execution
from cairn.storage.log import Log
from cairn.storage.store import open_store
from tests.at_once import at_once
from tests.places import PLACES, batch
from tests.places.stage import Stage
from tests.unit.driver.coordinator import manifests

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
    writer = place.slot.writer(2, 0, Execution())
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
    first = place.prepared(2, (1, "a"), attempt=0)
    place.driver.commit(2, [first], batch=0)
    place.assert_sees((1, "a"))
    second = place.prepared(2, (1, "b"), (2, "b"), round=1)
    place.driver.commit(2, [second], batch=1)
    place.driver.commit(2, [first], batch=0)
    place.driver.commit(2, [second], batch=1)
    place.driver.commit(3, [place.prepared(3, (3, "c"))])
    place.assert_sees((1, "a"), (1, "b"), (2, "b"), (3, "c"))


def test_two_drivers_that_commit_at_once_publish_once(place: Stage) -> None:
    prepared = [place.prepared(2, (s, "x"), subtask=s) for s in range(3)]
    drivers = [place.opened() for _ in range(3)]
    errors = at_once(*(partial(driver.commit, 2, prepared) for driver in drivers))
    # One that lost may say so; it is called again until it does not.
    assert len(errors) < len(drivers), errors
    for driver in drivers:
        driver.commit(2, prepared)
    place.assert_survived((0, "x"), (1, "x"), (2, "x"), driver=drivers[0])
    place.driver.recover(3)
    assert place.leftovers() == []


def test_two_sinks_and_two_jobs_in_one_place_do_not_touch_each_other(place: Stage) -> None:
    mine = place.prepared(2, (1, "a"))
    seen = [(1, "a")]
    others = [place.opened("job", "other"), place.opened("another job")]
    for k, other in enumerate(others, 2):
        slot = place.opened(other.context.job_id, other.context.uid, in_slot=True)
        # They share epoch, subtask and attempt.
        theirs = place.prepared(2, (k, "a"), slot=slot)
        place.driver.recover(2)
        other.commit(2, [theirs])
        other.recover(9)
        seen += [(k, "a")] if place.place.is_shared else []
    place.driver.commit(2, [mine])
    place.assert_sees(*seen)


def test_a_sink_finds_the_newest_epoch_it_has_published(place: Stage) -> None:
    assert place.driver.newest_mark() is None
    for epoch, part in ((2, 0), (7, 0), (7, 1)):
        prepared = place.prepared(epoch, (epoch, "a"), round=part)
        place.driver.commit(epoch, [prepared], part)
    newest = 7 if place.place.has_mark else None
    assert place.driver.newest_mark() == newest
    place.driver.recover(9)
    assert place.opened().newest_mark() == newest
    assert place.opened("another job").newest_mark() is None
    assert place.opened("job", "other").newest_mark() is None


@pytest.mark.parametrize("place", [n for n, p in PLACES.items() if p.has_mark], indirect=True)
def test_a_mark_of_an_epoch_that_the_log_does_not_have_ends_the_start(place: Stage) -> None:
    """The newest records were removed, or the checkpoint is an older copy."""
    store = open_store("memory:")
    log = Log(store)
    log.take_over(host="h", pid=1, wall_ms=1, guarantee="exactly-once")
    log.append(lambda number: manifests.epoch(number))
    place.driver.commit(2, [place.prepared(2, (1, "a"))])
    check_marks({"out": place.opened()}, store)
    place.driver.commit(3, [place.prepared(3, (2, "b"))])
    with pytest.raises(RestoreError, match="published epoch 3 of this job, which is not in the"):
        check_marks({"out": place.opened()}, store)


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
        writer = place.opened(in_slot=True).writer(2, 0, Execution())
        writer.write(batch((1, "a"), (2, "b")))
        assert json.dumps(writer.prepare()) == json.dumps(first)
    place.driver.commit(2, [again])
    place.driver.recover(3)
    place.assert_sees((1, "a"), (2, "b"))
    assert place.leftovers() == []


def test_an_epoch_is_published_with_the_columns_it_was_prepared_with(place: Stage) -> None:
    """The program that publishes it may have others: a column more, one less, another order."""
    # First: what is prepared in a transaction holds the table.
    place.place.add_column("t")
    prepared = [place.prepared(2, (s, "a"), (s, "b"), subtask=s) for s in range(2)]
    later = place.opened(schema=place.place.other_columns())
    for _ in range(2):
        later.commit(2, prepared)
    place.assert_sees(*[(s, text) for s in range(2) for text in "ab"], driver=later)
    later.recover(3)
    assert place.leftovers() == []


def test_a_sink_travels_with_its_settings_only(place: Stage) -> None:
    place.driver.commit(2, [place.prepared(2, (1, "a"))])
    slot = pickle.loads(pickle.dumps(place.driver))
    slot.open(place.place.context(in_slot=True))
    place.driver.commit(3, [place.prepared(3, (2, "b"), slot=slot)])
    place.assert_sees((1, "a"), (2, "b"))
    slot.close()


# A sink says where it publishes


def test_drivers_of_one_program_have_one_target(place: Stage) -> None:
    """Also with other columns, which do not change where rows go."""
    place.place.add_column("t")
    other = place.opened(schema=place.place.other_columns())
    assert place.opened().target == place.driver.target == other.target


@pytest.mark.parametrize("place", [n for n, p in PLACES.items() if p.has_target], indirect=True)
def test_another_place_is_another_target(place: Stage) -> None:
    elsewhere = place.place.elsewhere()
    other = elsewhere.opened()
    assert other.target != place.driver.target
    other.close()
    elsewhere.close()


# The end


def test_a_closed_sink_holds_nothing_open(place: Stage) -> None:
    place.slot.writer(2, 1, Execution()).write(batch((1, "a")))
    place.driver.commit(2, [place.prepared(2, (1, "a"))])
    place.driver.recover(3)
    place.close_all()
    place.driver.close()
    assert place.place.connections() == []
