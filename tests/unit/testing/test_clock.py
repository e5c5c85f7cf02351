"""A clock that moves only when told."""

from __future__ import annotations

import pytest

from cairn.testing import ManualClock


def test_a_clock_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(5)
    assert clock() == clock() == clock.now_ms == 5
    clock.advance_ms(10)
    clock.sleep(0.25)
    assert clock() == 265


def test_a_clock_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        ManualClock().advance_ms(-1)
