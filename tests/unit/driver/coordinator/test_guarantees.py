"""Epochs of several batches, and output that is published before they commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn.driver.coordinator.publisher import TRIES_BEFORE_PAUSE, StoppedError
from cairn.errors import CommitConflictError, CommitError, EpochError, FunctionError
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch
from cairn.testing import SimulatedCrash, simulated_crash
from tests.unit.driver.coordinator.leads import POSITION, Lead


def committed(lead: Lead) -> list[int]:
    return [r.number for r in Log(lead.store).records() if isinstance(r, Epoch)]


# Exactly-once, with several batches in an epoch


def every(tmp_path: Path, batches: int, **options: Any) -> Lead:
    return Lead(tmp_path, checkpoint_every=batches, **options).start()


def test_an_epoch_is_committed_after_its_last_batch(tmp_path: Path) -> None:
    lead = every(tmp_path, 3)
    for _ in range(2):
        lead.run_batch((1, 5))
        assert committed(lead) == [] and lead.sink.calls == [("recover", 2)]
    lead.run_batch((1, 5))
    assert committed(lead) == [2]
    assert lead.sink.rows == [(1, 1, 5), (1, 2, 10), (1, 3, 15)]
    assert [(b.epoch, b.execution.batch, b.parent) for b in lead.begins] == [
        (2, 0, None), (2, 1, None), (2, 2, None),
    ]  # fmt: skip
    lead.run_batch((1, 5))
    assert (lead.begins[-1].epoch, lead.begins[-1].execution.batch, lead.begins[-1].parent) == (
        3,
        0,
        2,
    )


def test_what_an_epoch_did_is_the_sum_of_its_batches(tmp_path: Path) -> None:
    lead = every(tmp_path, 2)
    lead.run_batch((1, 5), (2, 5))
    first = lead.coordinator.newest
    epoch = lead.run_batch((1, 5))
    metrics = epoch.metrics.operators["count"]
    assert first is not None and metrics.rows_in == 3
    # What is held is counted once.
    assert metrics.state_keys == first.metrics.operators["count"].state_keys
    assert epoch.timings.attempts == 2 and len(epoch.timings.subtasks) == 1


def test_a_driver_that_dies_within_an_epoch_leaves_none_of_it(tmp_path: Path) -> None:
    lead = every(tmp_path, 2)
    lead.run_batch((1, 5))
    lead.run_batch((1, 5))
    lead.run_batch((1, 5))
    after = Lead(tmp_path, lead.store, checkpoint_every=2).start()
    assert after.sink.rows == [(1, 1, 5), (1, 2, 10)], "the newest epoch again, no more"
    after.run_batch((1, 5))
    after.run_batch((1, 5))
    assert after.sink.rows[2:] == [(1, 3, 15), (1, 4, 20)]


def test_a_slot_that_dies_within_an_epoch_is_restored_to_the_batch_before(tmp_path: Path) -> None:
    lead = every(tmp_path, 3)
    lead.run_batch((1, 5))
    lead.run_batch((1, 5), (2, 1))
    lead.slots.clear()
    lead.run_batch((1, 5), (2, 1))
    assert [(b.execution.batch, b.execution.attempt, b.pending is None) for b in lead.begins] == [
        (0, 0, True), (1, 0, True), (2, 0, True), (2, 1, False),
    ]  # fmt: skip
    assert lead.sink.rows[-2:] == [(1, 3, 15), (2, 2, 2)]
    assert lead.store.list("pending/") == []


def test_what_is_written_down_of_an_epoch_goes_with_the_driver(tmp_path: Path) -> None:
    lead = every(tmp_path, 5)
    lead.run_batch((1, 5))
    lead.slots.clear()
    lead.run_batch((1, 5))
    assert len(lead.store.list("pending/")) == 1
    Lead(tmp_path, lead.store).start()
    assert lead.store.list("pending/") == []


def test_an_epoch_can_be_committed_before_its_last_batch(tmp_path: Path) -> None:
    lead = every(tmp_path, 5)
    lead.run_batch((1, 5))
    lead.coordinator.commit_epoch()
    assert committed(lead) == [2] and lead.sink.rows == [(1, 1, 5)]
    lead.coordinator.commit_epoch()
    assert committed(lead) == [2], "there is none under way"
    lead.run_batch((1, 5))
    assert lead.begins[-1].execution.batch == 0


def test_bases_are_asked_for_in_the_first_batch_only(tmp_path: Path) -> None:
    lead = every(tmp_path, 2)
    for value in range(40):
        lead.run_batch((value % 7, value))
    asked = {
        begin.execution.batch
        for begin in lead.begins
        if any(part.compactions for part in begin.parts.values())
    }
    assert asked == {0}
    lead.slots.clear()
    lead.run_batch((0, 1))
    assert lead.coordinator.newest is not None
    lead.run_batch((0, 1))
    assert lead.sink.rows[-1] == (0, 8, sum(range(0, 40, 7)) + 2)


# Publishing before the commit


def test_at_least_once_publishes_each_batch_before_the_epoch_is_in_the_log(tmp_path: Path) -> None:
    lead = every(tmp_path, 2, guarantee="at-least-once")
    lead.run_batch((1, 5))
    assert committed(lead) == [] and lead.sink.rows == [(1, 1, 5)]
    lead.run_batch((1, 5))
    assert lead.sink.calls == [("recover", 2), ("commit", 2), ("commit", 2, 1)]
    epoch = lead.coordinator.committed
    assert epoch is not None and epoch.committables == {}
    after = Lead(tmp_path, lead.store, guarantee="at-least-once").start()
    assert after.sink.calls == [("recover", 4)], "published once is enough"


@pytest.mark.parametrize("guarantee", ["at-least-once", "at-most-once"])
def test_a_crash_after_publishing_leaves_the_batch_out_of_the_log(
    tmp_path: Path, guarantee: str
) -> None:
    lead = every(tmp_path, 1, guarantee=guarantee)
    with simulated_crash("driver.batch.published"), pytest.raises(SimulatedCrash):
        lead.run_batch((1, 5))
    assert lead.sink.rows == [(1, 1, 5)] and committed(lead) == []


def test_at_most_once_tells_a_sink_that_may_repeat_once_only(tmp_path: Path) -> None:
    lead = every(tmp_path, 1, guarantee="at-most-once")
    lead.sink.failures = 1
    type(lead.sink).promise = "at-least-once"
    try:
        lead.run_batch((1, 5))
        assert lead.sink.calls[1:] == [("commit", 2)] and lead.sink.rows == []
    finally:
        type(lead.sink).promise = "exactly-once"
    lead.sink.failures = 1
    lead.run_batch((1, 5))
    assert lead.sink.calls[2:] == [("commit", 3), ("commit", 3)], "one that can tell is told again"


# Pausing


def test_a_commit_that_keeps_failing_pauses_the_job_until_it_succeeds(tmp_path: Path) -> None:
    lead = Lead(tmp_path).start()
    lead.sink.failures = TRIES_BEFORE_PAUSE + 3
    seen = []
    sleep = lead.clock.sleep

    def look(seconds: float) -> None:
        seen.append(lead.coordinator.paused)
        sleep(seconds)

    lead.coordinator._publisher._sleep = look
    lead.run_batch((1, 5))
    paused = [each for each in seen if each is not None]
    assert seen[0] is None and paused
    assert (paused[0].place.name, paused[0].epoch, paused[0].error) == ("out", 2, "sink is away")
    assert "cannot take epoch 2" in str(paused[0])
    assert lead.coordinator.paused is None and lead.sink.rows == [(1, 1, 5)]


def test_a_paused_job_can_be_stopped_and_the_next_start_publishes(tmp_path: Path) -> None:
    lead = Lead(tmp_path).start()
    lead.sink.failures = 1000
    lead.coordinator.is_stopping = lambda: lead.coordinator.paused is not None
    with pytest.raises(StoppedError, match="the next start goes on with it"):
        lead.run_batch((1, 5))
    after = Lead(tmp_path, lead.store).start()
    assert after.sink.rows == [(1, 1, 5)]


def test_a_paused_driver_that_was_taken_over_lets_go(tmp_path: Path) -> None:
    lead = Lead(tmp_path).start()
    lead.sink.failures = 1000
    sleep = lead.clock.sleep
    others: list[Lead] = []

    def take_over(seconds: float) -> None:
        sleep(seconds)
        if lead.coordinator.paused and not others:
            others.append(Lead(tmp_path, lead.store).start())

    lead.coordinator._publisher._sleep = take_over
    with pytest.raises(CommitConflictError, match="another driver has taken over"):
        lead.run_batch((1, 5))
    assert others[0].sink.rows == [(1, 1, 5)]


def test_a_start_does_not_wait_for_ever(tmp_path: Path) -> None:
    lead = Lead(tmp_path).start()
    lead.run_batch((1, 5))
    after = Lead(tmp_path, lead.store)
    after.sink.failures = 1000
    with pytest.raises(CommitError, match="tried 5 times"):
        after.start()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("guarantee", ["at-least-once", "at-most-once"])
def test_a_batch_that_was_not_published_is_not_in_the_log(
    tmp_path: Path, guarantee: str, every: int
) -> None:
    """Stopped while the sink is away: as published counts only what is."""
    lead = every_of(tmp_path, every, guarantee)
    for _ in range(every):
        lead.run_batch((1, 5))
    lead.sink.failures = 1000
    lead.coordinator.is_stopping = lambda: lead.coordinator.paused is not None
    with pytest.raises(StoppedError):
        lead.run_batch((1, 5))
    lead.coordinator.commit_epoch()
    assert committed(lead) == [2]
    assert lead.coordinator.paused is None


def every_of(tmp_path: Path, every: int, guarantee: str) -> Lead:
    return Lead(tmp_path, checkpoint_every=every, guarantee=guarantee).start()


@pytest.mark.parametrize("guarantee", ["at-least-once", "at-most-once"])
def test_a_driver_that_was_taken_over_publishes_nothing_before_its_commit(
    tmp_path: Path, guarantee: str
) -> None:
    lead = every_of(tmp_path, 3, guarantee)
    lead.run_batch((1, 5))
    Lead(tmp_path, lead.store).start()
    with pytest.raises(CommitConflictError, match="another driver has taken over"):
        lead.run_batch((1, 5))
    assert lead.sink.rows == [(1, 1, 5)]


def test_a_pause_goes_on_while_the_checkpoint_is_away_too(tmp_path: Path) -> None:
    lead = Lead(tmp_path).start()
    lead.sink.failures = TRIES_BEFORE_PAUSE + 3

    def away() -> int:
        raise OSError("the store is away")

    lead.coordinator.log.newest_number = away  # type: ignore[method-assign]
    lead.run_batch((1, 5))
    assert lead.sink.rows == [(1, 1, 5)]


# Trouble within an epoch


def test_what_cannot_be_written_down_or_removed_is_tried_again(tmp_path: Path) -> None:
    lead = every(tmp_path, 2)
    lead.run_batch((1, 5))
    lead.slots.clear()
    put = lead.store.put
    tries = []

    def fails_once(path: str, data: bytes) -> None:
        if path.startswith("pending/"):
            tries.append(path)
            if len(tries) == 1:
                raise OSError("injected")
        put(path, data)

    lead.store.put = fails_once  # type: ignore[method-assign]
    lead.run_batch((1, 5))
    assert len(tries) == 2
    assert lead.sink.rows == [(1, 1, 5), (1, 2, 10)] and committed(lead) == [2]


def test_a_lost_slot_does_not_hide_why_a_batch_fails(tmp_path: Path) -> None:
    lead = every(tmp_path, 3)
    lead.run_batch((1, 5))
    lead.slots.clear()

    def execute(begin: Any) -> Any:
        lead.execute(begin, [(1, 5)])
        raise FunctionError("this is why")

    with pytest.raises(FunctionError, match="this is why"):
        lead.coordinator.run_batch(POSITION, execute)


def test_a_target_that_is_away_while_slots_write_pauses_the_job(tmp_path: Path) -> None:
    lead = Lead(tmp_path).start()
    seen = []

    def execute(begin: Any) -> Any:
        if begin.execution.attempt < TRIES_BEFORE_PAUSE + 2:
            raise EpochError("no route", sink="out", is_away=True)
        seen.append(lead.coordinator.paused)
        return lead.execute(begin, [(1, 5)])

    lead.coordinator.run_batch(POSITION, execute)
    assert seen[0] is not None and seen[0].error == "no route"
    assert lead.coordinator.paused is None and lead.sink.rows == [(1, 1, 5)]
    lead.coordinator.is_stopping = lambda: True

    def away(begin: Any) -> Any:
        raise EpochError("no route", sink="out", is_away=True)

    with pytest.raises(StoppedError):
        lead.coordinator.run_batch(POSITION, away)


def is_away(begin: Any) -> Any:
    raise EpochError("no route", sink="out", is_away=True)


def test_a_target_that_is_away_from_the_slots_is_waited_for_as_long_as_it_takes(
    tmp_path: Path,
) -> None:
    """Weeks here; executors come and go meanwhile, and an epoch still has all of its tries."""
    lead = Lead(tmp_path, attempts_max=2).start()
    began_ms, tries = lead.clock(), 5000

    def execute(begin: Any) -> Any:
        if begin.execution.attempt < tries:
            if begin.execution.attempt % 100 == 50:
                raise EpochError("an executor is lost")
            lead.clock.sleep(600)
            is_away(begin)
        return lead.execute(begin, [(1, 5)])

    lead.coordinator.run_batch(POSITION, execute)
    assert lead.clock() - began_ms > 14 * 24 * 3600 * 1000
    assert lead.coordinator.paused is None and lead.sink.rows == [(1, 1, 5)]


def test_a_target_away_from_the_slots_ends_the_run_after_the_commit_timeout(
    tmp_path: Path,
) -> None:
    lead = Lead(tmp_path, commit_timeout_s=60).start()
    was_long = lead.clock() + 3_600_000

    def execute(begin: Any) -> Any:
        if lead.clock() < was_long:
            lead.clock.sleep(3600)  # The epoch itself may take long: that does not count.
        is_away(begin)

    with pytest.raises(CommitError, match="sink 'out' did not take epoch 2: no route"):
        lead.coordinator.run_batch(POSITION, execute)
    assert 60_000 <= lead.clock() - was_long < 120_000


def test_a_target_that_was_back_gets_the_whole_commit_timeout_again(tmp_path: Path) -> None:
    lead = Lead(tmp_path, commit_timeout_s=60).start()

    def execute(begin: Any) -> Any:
        if begin.execution.attempt == 6:
            lead.clock.sleep(3 * 3600)
            raise EpochError("an executor is lost")
        if begin.execution.attempt < 13:
            is_away(begin)
        return lead.execute(begin, [(1, 5)])

    lead.coordinator.run_batch(POSITION, execute)
    assert lead.sink.rows == [(1, 1, 5)]


def test_a_driver_that_waits_for_a_target_leaves_the_job_to_one_that_takes_over(
    tmp_path: Path,
) -> None:
    lead = Lead(tmp_path).start()

    def execute(begin: Any) -> Any:
        if begin.execution.attempt == TRIES_BEFORE_PAUSE + 3:
            Lead(tmp_path, lead.store).start()
        is_away(begin)

    with pytest.raises(CommitConflictError, match="another driver has taken over"):
        lead.coordinator.run_batch(POSITION, execute)
    assert lead.coordinator.paused is not None, "why it waited can still be seen"
