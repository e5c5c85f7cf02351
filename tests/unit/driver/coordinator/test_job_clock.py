"""The job's clock: never back, never behind the machine's, and never standing still for long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cairn.driver.coordinator.job_clock import SLOWDOWN, JobClock

HOUR_MS = 3_600_000


class Machine:
    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


def epoch(now_ms: int) -> Any:
    return SimpleNamespace(now_ms=now_ms)


def test_it_shows_the_time_of_the_machine_as_long_as_that_goes_forward() -> None:
    machine = Machine(1000)
    clock = JobClock(machine)
    for machine.now_ms in (1000, 1001, 5000, 5000, HOUR_MS):
        assert clock.read_ms() == machine.now_ms


def test_set_back_it_goes_on_at_half_speed_until_the_machine_has_caught_up() -> None:
    machine = Machine(HOUR_MS)
    clock = JobClock(machine)
    clock.read_ms()
    machine.now_ms = 0
    assert clock.read_ms() == HOUR_MS
    # However often it is read.
    for machine.now_ms in range(0, 10_001, 1):
        read_ms = clock.read_ms()
    assert read_ms == HOUR_MS + 5_000
    machine.now_ms = 2 * HOUR_MS
    assert clock.read_ms() == 2 * HOUR_MS
    machine.now_ms += 1
    assert clock.read_ms() == 2 * HOUR_MS + 1


def test_another_driver_goes_on_from_the_epoch_of_the_last() -> None:
    machine = Machine(1000)
    clock = JobClock(machine)
    clock.follow(epoch(HOUR_MS))
    assert clock.read_ms() == HOUR_MS
    machine.now_ms = 3000
    assert clock.read_ms() == HOUR_MS + 1000
    machine.now_ms = 3 * HOUR_MS
    late = JobClock(machine)
    late.follow(epoch(HOUR_MS))
    assert late.read_ms() == 3 * HOUR_MS


@given(st.lists(st.integers(-5000, 5000), min_size=1), st.integers(0, 50_000))
def test_a_reading_is_never_before_the_last_one_or_the_machine(
    steps: list[int], followed_ms: int
) -> None:
    machine = Machine(20_000)
    clock = JobClock(machine)
    clock.follow(epoch(followed_ms))
    last_ms = clock.read_ms()
    assert last_ms >= followed_ms
    for step_ms in steps:
        machine.now_ms += step_ms
        read_ms = clock.read_ms()
        assert read_ms >= max(last_ms, machine.now_ms)
        if step_ms > 0:
            assert read_ms - last_ms >= step_ms // SLOWDOWN or read_ms == machine.now_ms
        last_ms = read_ms
