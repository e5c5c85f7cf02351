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
