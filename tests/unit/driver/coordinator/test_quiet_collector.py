from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from cairn.driver.coordinator.quiet_collector import pause_collector


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_collector_is_off_until_the_last_pause_ends() -> None:
    with pause_collector():
        with pause_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collector_is_on_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), pause_collector():
        raise ValueError("inside")
    assert gc.isenabled()


def test_collector_that_was_turned_off_stays_off() -> None:
    gc.disable()
    with pause_collector():
        pass
    assert not gc.isenabled()


def test_garbage_in_cycles_does_not_pile_up_over_many_pauses() -> None:
    for _ in range(300):
        with pause_collector():
            make_cycles(100)
        make_cycles(300)
    left = sum(isinstance(found, Cycle) for found in gc.get_objects())
    assert left < 300 * 400 / 4


def make_cycles(count: int) -> None:
    for _ in range(count):
        Cycle()


class Cycle:
    def __init__(self) -> None:
        self.itself = self
