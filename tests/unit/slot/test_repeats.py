"""Failures that would come again are told from those that may be over soon."""

from __future__ import annotations

from cairn.errors import EpochError, FunctionError
from cairn.slot.repeats import Repeats


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
