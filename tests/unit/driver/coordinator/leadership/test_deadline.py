"""The end of a grant."""

from __future__ import annotations

from cairn.driver.coordinator.leadership.deadline import Deadline
from cairn.testing.clock import ManualClock


def deadline_at(clock: ManualClock) -> Deadline:
    return Deadline(clock=lambda: clock.now_ms / 1000)


def test_a_deadline_has_no_end_until_it_begins() -> None:
    clock = ManualClock()
    deadline = deadline_at(clock)
    clock.advance_ms(10**9)
    assert deadline.check()
    deadline.begin(10, clock.now_ms / 1000)
    clock.advance_ms(10_000)
    assert not deadline.check()


def test_a_renewal_counts_from_its_begin() -> None:
    clock = ManualClock()
    deadline = deadline_at(clock)
    deadline.begin(10, 0)
    clock.advance_ms(9_000)
    deadline.extend(begun_s=3)
    clock.advance_ms(3_999)
    assert deadline.check()
    clock.advance_ms(1)
    assert not deadline.check()


def test_a_renewal_that_comes_after_the_end_does_not_bring_the_grant_back() -> None:
    clock = ManualClock()
    deadline = deadline_at(clock)
    deadline.begin(10, 0)
    clock.advance_ms(10_000)
    deadline.extend(begun_s=9)
    assert deadline.lost.is_set()


def test_a_paused_process_finds_its_grant_lost_at_the_first_look() -> None:
    clock = ManualClock()
    deadline = deadline_at(clock)
    deadline.begin(10, 0)
    assert not deadline.lost.is_set()
    clock.advance_ms(10_000)
    assert deadline.lost.is_set(), "before any thread could set it"
