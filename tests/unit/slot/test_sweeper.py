"""The sweeper works while nobody calls, and stops when told."""

from __future__ import annotations

import threading

import pytest

from cairn.slot import sweeper
from cairn.slot.sweeper import Sweeper

PATIENCE_S = 20


def test_it_sweeps_until_nothing_is_left_and_looks_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeper, "LOOK_AGAIN_S", 0.01)
    left = [3, 0]
    done = threading.Event()

    def sweep(seconds: float) -> bool:
        if left[0]:
            left[0] -= 1
        else:
            left[1] += 1
            done.set()
        return left[0] > 0

    swept = Sweeper(sweep, lambda: False)
    swept.wake()
    assert done.wait(PATIENCE_S)
    swept.close()
    assert left == [0, 1]


def test_it_does_nothing_while_the_slot_is_busy_or_closed() -> None:
    calls: list[float] = []
    asked = threading.Event()

    def is_busy() -> bool:
        asked.set()
        return True

    swept = Sweeper(lambda seconds: bool(calls.append(seconds)), is_busy)
    swept.wake()
    assert asked.wait(PATIENCE_S)
    swept.close()
    swept.wake()
    assert calls == []


def test_an_error_ends_the_sweep_and_not_the_slot(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[float] = []
    failed = threading.Event()

    def sweep(seconds: float) -> bool:
        calls.append(seconds)
        if len(calls) == 1:
            raise ValueError("as told")
        failed.set()
        return False

    swept = Sweeper(sweep, lambda: False)
    swept.wake()
    while not calls:
        threading.Event().wait(0.01)
    swept.wake()
    assert failed.wait(PATIENCE_S)
    swept.close()
    assert "ValueError: as told" in caplog.text
