"""A standby's driver watches the log, and sends its slots the versions of new epochs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from cairn.driver import following as module
from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.following import Follower
from cairn.errors import StateSchemaError
from cairn.protocol.messages import Begin
from cairn.storage.log import Log
from tests.unit.slot.one_level import Checkpoint


class Standby:
    def __init__(self, checkpoint: Checkpoint, *, is_hot: bool = True) -> None:
        self.sent: list[Begin] = []
        self.errors: list[Exception] = []
        self.refusals: list[Exception] = []
        self.clock_s = 0.0
        coordinator = Coordinator(
            checkpoint.spec, checkpoint.store, {}, parallelism=2, retained_epochs=10
        )
        self.follower = Follower(
            coordinator, self.follow, self.check, is_hot=is_hot, clock=lambda: self.clock_s
        )

    def follow(self, begin: Begin, is_needed: Callable[[], bool]) -> None:
        assert is_needed()
        if self.errors:
            raise self.errors.pop()
        self.sent.append(begin)

    def check(self, epoch: Any) -> None:
        if self.refusals:
            raise self.refusals[0]


@pytest.fixture
def checkpoint() -> Checkpoint:
    return Checkpoint()


def commit(checkpoint: Checkpoint, tmp_path: Any) -> int:
    slot = checkpoint.slot(tmp_path)
    return checkpoint.run_batch([slot], [(k, 1) for k in range(9)]).number


def test_each_new_epoch_is_followed_once(checkpoint: Checkpoint, tmp_path: Any) -> None:
    standby = Standby(checkpoint)
    number = commit(checkpoint, tmp_path)
    assert [standby.follower.look() for _ in range(3)] == [True, False, False]
    assert standby.follower.epoch == number
    (begin,) = standby.sent
    assert (begin.parent, begin.follows, sorted(begin.parts)) == (number, True, [0, 1])
    later = commit(checkpoint, tmp_path)
    assert standby.follower.look() and standby.follower.epoch == later


def test_messages_are_older_than_those_of_the_next_leader(
    checkpoint: Checkpoint, tmp_path: Any
) -> None:
    standby = Standby(checkpoint)
    tokens = []
    for _ in range(3):
        commit(checkpoint, tmp_path)
        standby.follower.look()
        tokens.append(standby.sent[-1].token(1 << 40))
    term = Log(checkpoint.store).take_over(host="", pid=0, wall_ms=0).term
    assert tokens == sorted(tokens) and all(token.term < term for token in tokens)


def test_following_writes_nothing(checkpoint: Checkpoint, tmp_path: Any) -> None:
    commit(checkpoint, tmp_path)
    before = sorted(found.path for found in checkpoint.store.list(""))
    standby = Standby(checkpoint)
    assert standby.follower.look()
    assert sorted(found.path for found in checkpoint.store.list("")) == before


def test_a_warm_standby_sends_no_state_and_once_in_a_while(
    checkpoint: Checkpoint, tmp_path: Any
) -> None:
    standby = Standby(checkpoint, is_hot=False)
    commit(checkpoint, tmp_path)
    assert standby.follower.look() and not standby.follower.look()
    commit(checkpoint, tmp_path)
    assert not standby.follower.look()
    standby.clock_s = module.REPEAT_S
    assert standby.follower.look()
    assert standby.follower.epoch is None
    assert {begin.parent for begin in standby.sent} == {None}


def test_an_epoch_is_followed_again_for_slots_that_died(
    checkpoint: Checkpoint, tmp_path: Any
) -> None:
    standby = Standby(checkpoint)
    commit(checkpoint, tmp_path)
    assert standby.follower.look()
    standby.clock_s = module.REPEAT_S
    assert standby.follower.look() and len(standby.sent) == 2


def test_a_try_that_fails_is_repeated_and_meanwhile_no_epoch_is_held(
    checkpoint: Checkpoint, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)
    standby, held, stop = Standby(checkpoint), [], threading.Event()
    number = commit(checkpoint, tmp_path)
    assert standby.follower.look()
    standby.errors.append(OSError("a slot has died"))
    commit(checkpoint, tmp_path)
    follow = standby.follow

    def note(begin: Begin, is_needed: Callable[[], bool]) -> None:
        held.append(standby.follower.epoch)
        follow(begin, is_needed)
        stop.set()

    monkeypatch.setattr(standby.follower, "_follow", note)
    standby.follower.run(stop)
    assert held == [number, None]


def test_a_program_that_does_not_fit_holds_nothing(checkpoint: Checkpoint, tmp_path: Any) -> None:
    standby = Standby(checkpoint)
    standby.refusals.append(StateSchemaError("another type"))
    commit(checkpoint, tmp_path)
    with pytest.raises(StateSchemaError):
        standby.follower.look()
    assert standby.sent == [] and standby.follower.epoch is None


def test_an_empty_checkpoint_is_not_followed() -> None:
    standby = Standby(Checkpoint())
    for path in [found.path for found in standby.follower._log.store.list("")]:
        standby.follower._log.store.delete([path])
    assert not standby.follower.look()


def test_nothing_is_sent_once_the_lead_is_granted(
    checkpoint: Checkpoint, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The takeover may come between two reads of the log."""
    standby, granted = Standby(checkpoint), threading.Event()
    commit(checkpoint, tmp_path)
    message = standby.follower._message

    def take_over_first(*about: Any) -> Begin:
        granted.set()
        Log(checkpoint.store).take_over(host="", pid=0, wall_ms=0)
        return message(*about)

    monkeypatch.setattr(standby.follower, "_message", take_over_first)
    standby.follower.run(granted)
    assert standby.sent == []
