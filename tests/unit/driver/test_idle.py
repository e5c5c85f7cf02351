"""Epochs without a batch: loops run out, endless ones are told of, and batches go first."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.driver import idle
from cairn.driver.coordinator.rounds import is_pending
from cairn.driver.coordinator.ticker import Pace
from cairn.driver.idle import IdleEpochs, Turn
from cairn.errors import EpochError
from tests.simulation.looping import HopsWorld
from tests.simulation.world import Driver


class BoundedTurn(Turn):
    """Ends the run after `epochs_max` epochs."""

    def __init__(self, run: Running) -> None:
        super().__init__()
        self._run = run

    @property
    def is_ending(self) -> bool:
        return super().is_ending or self._run.epochs >= self._run.epochs_max


class Running:
    """A run as far as its epochs without a batch know it."""

    def __init__(self, folder: Path) -> None:
        self.driver = Driver(HopsWorld(3, folder))
        self.driver.start()
        self.driver.run_batch(6)
        self.epochs = 0
        self.epochs_max = 1000
        self.is_stopped = False
        self.turn = BoundedTurn(self)
        changes: Any = SimpleNamespace(is_asked=False)
        self.idle = IdleEpochs(
            self.driver.coordinator,
            Pace(1000),
            self.turn,
            changes,
            run_batch=self.run,
            stop_query=self.stop,
            name="hops",
        )

    def run(self, position: Any, is_draining: bool) -> None:
        self.epochs += 1
        self.driver._run_without_a_batch(position, is_draining)

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def running(tmp_path: Path) -> Running:
    return Running(tmp_path)


@pytest.fixture
def endless(running: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """It has records in flight for ever, and its epochs cost nothing."""
    monkeypatch.setattr(idle, "is_pending", lambda epoch: True)
    monkeypatch.setattr(running.driver, "_run_without_a_batch", lambda position, draining: None)
    return running


@pytest.mark.parametrize("how", ["tick", "run_out", "drain"])
def test_epochs_follow_each_other_until_nothing_is_in_flight(running: Running, how: str) -> None:
    assert is_pending(running.driver.coordinator.newest)
    getattr(running.idle, how)()
    assert not is_pending(running.driver.coordinator.newest)
    assert running.epochs > 1 and running.turn.error is None
    before = running.epochs
    running.idle.run_out()
    assert running.epochs == before
    running.driver.world.check_all()


@pytest.mark.parametrize("how", ["run_out", "drain"])
def test_a_loop_without_end_is_told_of_and_can_be_stopped(
    endless: Running, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    endless.epochs_max = 250
    with caplog.at_level(logging.WARNING, "cairn"):
        getattr(endless.idle, how)()
    assert endless.epochs == 250
    told = [r.getMessage() for r in caplog.records if "still go around" in r.getMessage()]
    assert len(told) == 2 and "job hops: 100 epochs after the last batch" in told[0]


@pytest.mark.parametrize("how", ["tick", "run_out"])
def test_a_batch_that_waits_has_the_next_turn(endless: Running, how: str) -> None:
    endless.epochs_max = 1 << 30
    batches: list[int] = []
    is_waiting = threading.Event()

    def bring_batches() -> None:
        for _ in range(20):
            is_waiting.set()
            endless.turn.take_for_batch(lambda: None)
            batches.append(endless.epochs)
            endless.turn.give_up()
        endless.epochs_max = 0

    spark = threading.Thread(target=bring_batches)
    spark.start()
    assert is_waiting.wait(10)
    while spark.is_alive() and endless.epochs_max:
        getattr(endless.idle, how)()
    spark.join(30)
    assert len(batches) == 20


def test_what_fails_ends_the_run_and_gives_the_turn_back(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(position: Any, draining: bool) -> None:
        raise EpochError("no more")

    monkeypatch.setattr(running.driver, "_run_without_a_batch", failing)
    running.idle.run_out()
    assert isinstance(running.turn.error, EpochError) and running.is_stopped
    assert running.turn.take_at_once(0)


def test_a_batch_that_gives_up_waiting_leaves_the_turn_to_others() -> None:
    turn = Turn()
    assert turn.take_if_free()

    def give_up() -> None:
        raise EpochError("the run ends")

    with pytest.raises(EpochError):
        turn.take_for_batch(give_up)
    assert not turn.is_wanted
    turn.give_up()
    assert turn.take_if_free()
