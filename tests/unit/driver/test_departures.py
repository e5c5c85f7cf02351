"""Executors that have notice to end: their subtasks are moved once, and slots read ahead."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.driver import departures as module
from cairn.driver.departures import Departures
from cairn.driver.following import message_ahead
from cairn.protocol.messages import Begin
from cairn.slot import level
from tests.simulation.world import Driver, World


class Notices:
    """What Spark says of its executors, and the moves that follow."""

    def __init__(self) -> None:
        self.given: list[frozenset[str]] = []
        self.moves = 0
        self.departures = Departures(lambda: self.given.pop(0), self._move)

    def _move(self) -> None:
        self.moves += 1

    def look(self, *ids: str) -> bool:
        self.given.append(frozenset(ids))
        return self.departures.look()


def test_subtasks_move_once_for_each_notice() -> None:
    notices = Notices()
    assert not notices.look()
    assert notices.look("1") and notices.departures.count == 1
    assert not notices.look("1")
    assert notices.look("1", "2") and notices.departures.count == 2
    assert not notices.look("2") and notices.departures.count == 1
    assert not notices.look() and notices.moves == 2


def test_a_move_that_fails_ends_neither_the_watch_nor_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)
    seen = threading.Event()
    ids = iter(range(1_000_000))

    def fail() -> None:
        seen.set()
        raise RuntimeError("an executor was lost\nwith a long text")

    departures = Departures(lambda: frozenset([str(next(ids))]), fail)
    departures.start()
    assert seen.wait(5)
    seen.clear()
    assert seen.wait(5), "it looks again"
    departures.stop(5)
    assert "not read ahead for executors that end: an executor was lost" in caplog.text
    assert "long text" not in caplog.text


def started(tmp_path: Path) -> Driver:
    driver = Driver(World(3, tmp_path), parallelism=2)
    driver.start()
    return driver


def ahead_of(driver: Driver) -> Begin:
    begin = message_ahead(driver.coordinator)
    assert begin is not None
    return begin


def follow(driver: Driver, begin: Begin, slots: dict[int, Any]) -> dict[int, Any]:
    """Have slots at new places follow an epoch; return them."""
    before, driver.cluster.slots = driver.cluster.slots, slots
    for subtask in range(begin.parallelism):
        for each in driver.cluster.graph.levels:
            slot = driver.cluster.slot(begin.slot(subtask), begin.token()).level(each.index)
            slot.follow(begin.token(99), begin, subtask)
    driver.cluster.slots = before
    return slots


def test_before_the_first_epoch_there_is_nothing_to_read(tmp_path: Path) -> None:
    assert message_ahead(started(tmp_path).coordinator) is None


def test_slots_that_have_read_ahead_restore_nothing_in_the_next_epoch(tmp_path: Path) -> None:
    driver = started(tmp_path)
    driver.run_batch(20)
    driver.rescale(3)
    driver.run_batch(20)
    begin = ahead_of(driver)
    assert begin.follows and begin.slot(2) == driver.coordinator.subtasks.slots[2]
    driver.cluster.slots = follow(driver, begin, {})
    driver.run_batch(20)
    newest = driver.world.newest()
    assert newest is not None and newest.timings.subtasks
    assert not any(each.restored for each in newest.timings.subtasks)
    driver.world.check_all()


def test_slots_that_have_read_an_earlier_epoch_only_add_its_changes(tmp_path: Path) -> None:
    """The epoch ran on at the old places while they read."""
    driver = started(tmp_path)
    driver.run_batch(20)
    slots = follow(driver, ahead_of(driver), {})
    driver.run_batch(20)
    driver.cluster.slots = slots
    whole: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(level, "restore", lambda holding, *args: whole.append(holding.uid))
        driver.run_batch(20)
    assert not whole
    driver.world.check_all()


def test_a_message_ahead_is_refused_by_a_slot_that_runs_a_later_epoch(tmp_path: Path) -> None:
    driver = started(tmp_path)
    driver.run_batch(20)
    begin = ahead_of(driver)
    driver.run_batch(20)
    slot = driver.cluster.slot(0).level(0)
    assert begin.token(1 << 40) < slot._newest
    with pytest.raises(Exception, match="superseded"):
        slot.follow(begin.token(1 << 40), begin, 0)
    driver.run_batch(20)
    driver.world.check_all()


def test_the_message_travels_as_the_others_do(tmp_path: Path) -> None:
    driver = started(tmp_path)
    driver.run_batch(20)
    begin = ahead_of(driver)
    assert msgspec.json.decode(msgspec.json.encode(begin), type=Begin) == begin
