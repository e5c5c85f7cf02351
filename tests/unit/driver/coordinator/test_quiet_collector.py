from __future__ import annotations

import gc
import weakref
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


def is_in(generation: int, wanted: object) -> bool:
    return any(found is wanted for found in gc.get_objects(generation=generation))


def test_what_a_pause_has_left_is_not_gone_through_when_it_ends() -> None:
    with pause_collector():
        made = [[]]  # type: ignore[var-annotated]
        assert is_in(0, made)
    assert not is_in(0, made)


def test_garbage_in_a_cycle_that_a_pause_has_left_is_still_found() -> None:
    with pause_collector():
        cycle = Cycle()
        gone = weakref.ref(cycle)
        del cycle
    assert gone() is not None
    gc.collect()
    assert gone() is None


def test_objects_that_the_user_has_frozen_stay_so() -> None:
    gc.freeze()
    try:
        assert is_in_no_generation(enabled)
        with pause_collector():
            pass
        assert is_in_no_generation(enabled)
    finally:
        gc.unfreeze()


def is_in_no_generation(wanted: object) -> bool:
    return not any(is_in(generation, wanted) for generation in range(3))


class Cycle:
    def __init__(self) -> None:
        self.itself = self
