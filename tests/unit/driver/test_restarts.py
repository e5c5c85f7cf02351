"""Restarts: when a run that failed begins again, by a clock that the tests move."""

from __future__ import annotations

import errno

import pytest

from cairn.driver.restarts import SAME_ROW_MAX, RestartPolicy, Restarts, parse_restart
from cairn.errors import (
    CommitConflictError,
    EpochError,
    FunctionError,
    PlanError,
    StateSchemaError,
)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def pauses(text: str, count: int, *, life_s: float = 1.0) -> list[float | None]:
    clock = Clock()
    restarts = Restarts(parse_restart(text), clock)
    found = []
    for _ in range(count):
        restarts.begin()
        clock.now_s += life_s
        found.append(restarts.after(EpochError("lost")))
    return found


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("none", RestartPolicy()),
        ("fixed(3, 10 seconds)", RestartPolicy("fixed", 3, 10.0)),
        ("Exponential( 500 ms , 5 minutes )", RestartPolicy("exponential", 0, 0.5, 300.0)),
        ("rate(5 per 10 minutes)", RestartPolicy("rate", 5, 0.0, 600.0)),
    ],
)
def test_a_policy_is_read_from_text(text: str, policy: RestartPolicy) -> None:
    assert parse_restart(text) == policy


@pytest.mark.parametrize(
    "text",
    [
        "", "always", "none()", "fixed", "fixed(3)", "fixed(0, 1 second)", "fixed(-1, 1 second)",
        "fixed(3, soon)", "exponential(1 second)", "exponential(2 minutes, 1 minute)",
        "exponential(0 seconds, 1 minute)", "rate(5)", "rate(0 per 1 minute)",
        "rate(5 per 0 seconds)", "rate(5 per)", "fixed(3, 1 second) twice", None, 3,
    ],
)  # fmt: skip
def test_another_text_is_refused(text: object) -> None:
    with pytest.raises(PlanError, match="restart"):
        parse_restart(text)


def test_none_never_restarts() -> None:
    assert pauses("none", 1) == [None]


def test_fixed_ends_after_its_number_of_restarts() -> None:
    assert pauses("fixed(2, 10 seconds)", 3) == [10.0, 10.0, None]


def test_exponential_doubles_up_to_its_limit_and_never_ends() -> None:
    assert pauses("exponential(1 second, 5 seconds)", 5) == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert pauses("exponential(1 second, 5 seconds)", 2000)[-1] == 5.0


def test_after_a_quiet_time_the_count_begins_again() -> None:
    assert pauses("exponential(1 second, 5 seconds)", 3, life_s=61.0) == [1.0, 1.0, 1.0]
    assert pauses("fixed(1, 1 second)", 3, life_s=61.0) == [1.0, 1.0, 1.0]


def test_a_rate_counts_the_restarts_of_the_last_minutes_only() -> None:
    assert pauses("rate(2 per 10 seconds)", 3, life_s=1.0) == [0.0, 0.0, None]
    assert pauses("rate(2 per 10 seconds)", 6, life_s=5.0) == [0.0] * 6


@pytest.mark.parametrize(
    "error",
    [
        PlanError("wrong"),
        StateSchemaError("string, not long"),
        CommitConflictError("another leads"),
        KeyboardInterrupt(),
    ],
)
def test_an_error_that_repetition_cannot_fix_ends_the_run(error: BaseException) -> None:
    restarts = Restarts(parse_restart("exponential(1 second, 5 minutes)"))
    assert restarts.after(error) is None
    assert restarts.count == 0


@pytest.mark.parametrize(("number", "pause_s"), [(errno.ETIMEDOUT, 1.0), (errno.EACCES, None)])
def test_a_start_whose_checkpoint_is_away_is_repeated_and_a_wrong_place_is_not(
    number: int, pause_s: float | None
) -> None:
    error = PlanError("checkpoint /mnt/c cannot be used")
    error.__cause__ = OSError(number, "text")
    assert Restarts(parse_restart("exponential(1 second, 5 minutes)")).after(error) == pause_s


def failed_on(row: str, *, is_repeated: bool = True) -> FunctionError:
    return FunctionError("bad", operator="op", key="k", row=row, is_repeated=is_repeated)


def test_a_function_that_fails_twice_on_a_row_in_the_same_way_ends_the_run() -> None:
    restarts = Restarts(parse_restart("exponential(1 second, 5 minutes)"))
    assert restarts.after(failed_on("a")) is None


def test_a_function_whose_error_may_pass_is_tried_again() -> None:
    restarts = Restarts(parse_restart("exponential(1 second, 5 minutes)"))
    for _ in range(6):
        error = FunctionError("refused", operator="op", row="a", is_of_system=True)
        assert restarts.after(error) is not None


def in_a_new_slot(row: str, life: int) -> FunctionError:
    """A failure that its slot has seen once: each life has a new slot, and a new log."""
    message = f"bad <object at 0x{life:08x}>\n  log: /logs/{life}.log"
    return FunctionError(message, operator="op", key="k", row=row, is_repeated=False)


def test_a_row_that_fails_the_same_way_in_life_after_life_ends_the_run() -> None:
    restarts = Restarts(parse_restart("exponential(1 second, 5 minutes)"))
    answers = [restarts.after(in_a_new_slot("a", life)) for life in range(SAME_ROW_MAX)]
    assert answers[-1] is None and None not in answers[:-1]
    assert restarts.count == SAME_ROW_MAX - 1


def test_two_rows_that_fail_in_turn_end_the_run_too() -> None:
    restarts = Restarts(parse_restart("exponential(1 second, 5 minutes)"))
    rows = "abab"
    assert all(restarts.after(in_a_new_slot(row, at)) for at, row in enumerate(rows))
    assert restarts.after(in_a_new_slot("b", 9)) is None


def test_rows_that_all_differ_and_errors_without_a_row_do_not_end_the_run() -> None:
    restarts = Restarts(parse_restart("exponential(1 second, 5 minutes)"))
    for at in range(2 * SAME_ROW_MAX):
        assert restarts.after(in_a_new_slot(f"row {at}", at)) is not None
        assert restarts.after(FunctionError("bad", operator="op")) is not None


def test_a_row_that_failed_before_a_quiet_time_is_counted_from_the_beginning() -> None:
    now_s = 0.0
    restarts = Restarts(parse_restart("fixed(9, 1 second)"), lambda: now_s)
    for life in range(2 * SAME_ROW_MAX):
        restarts.begin()
        now_s += restarts.policy.quiet_s
        assert restarts.after(in_a_new_slot("a", life)) is not None
