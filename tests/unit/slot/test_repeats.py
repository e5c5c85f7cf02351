"""Failures that would come again are told from those that may be over soon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from cairn.errors import EpochError, FunctionError
from cairn.protocol.messages import Failure
from cairn.slot.repeats import Repeats
from cairn.slot.server import FAILED, SlotServer


def failed(row: int, cause: Exception | None = None) -> FunctionError:
    error = FunctionError(f"process() of operator 'a' raised ValueError\n  row: {row}")
    error.__cause__ = cause or ValueError()
    return error


def test_the_same_failure_again_in_an_epoch_is_a_repetition() -> None:
    repeats = Repeats()
    assert [repeats.note(3, failed(row)) for row in (1, 2, 1)] == [False, False, True]


def test_the_same_failure_in_another_epoch_is_none() -> None:
    repeats = Repeats()
    assert not repeats.note(3, failed(1))
    assert not repeats.note(4, failed(1))
    assert repeats.note(4, failed(1))


def test_addresses_make_no_difference() -> None:
    repeats = Repeats()
    first, second = (FunctionError(f"no <Thing object at 0x7f{at}>") for at in ("aa", "bb"))
    assert not repeats.note(1, first)
    assert repeats.note(1, second)


def test_what_the_system_reports_is_never_a_repetition() -> None:
    repeats = Repeats()
    for cause in (ConnectionRefusedError("no"), TimeoutError("late"), FileNotFoundError("gone")):
        assert not repeats.note(1, failed(1, cause))
        assert not repeats.note(1, failed(1, cause))


def test_errors_outside_of_user_code_are_never_a_repetition() -> None:
    repeats = Repeats()
    assert not any(repeats.note(1, error) for error in [EpochError("lost"), OSError("x")] * 2)


def test_what_the_system_reports_behind_another_operator_is_no_repetition() -> None:
    repeats = Repeats()
    for _ in range(2):
        assert not repeats.note(1, failed(1, failed(1, ConnectionResetError("no"))))


def test_the_driver_learns_which_failures_the_system_reported() -> None:
    slot: Any = SimpleNamespace(_repeats=Repeats(), _epoch=1, log="slot.log", executor="1")

    def facts(error: Exception) -> dict[str, Any]:
        sent = SlotServer._failure(slot, error).removeprefix(FAILED)
        found: dict[str, Any] = msgspec.msgpack.decode(sent, type=Failure).facts
        return found

    assert facts(failed(1, ConnectionResetError("no")))["is_of_system"] is True
    assert "is_of_system" not in facts(failed(1))
