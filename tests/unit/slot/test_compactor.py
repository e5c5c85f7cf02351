"""Background work rests between its pieces, unless memory waits for it."""

from __future__ import annotations

import threading
import time

import pytest

from cairn.slot import compactor as compactor_module
from cairn.slot.compactor import Compactor, Pace, Work


@pytest.mark.parametrize("is_urgent", [False, True])
def test_work_that_memory_waits_for_takes_no_rest(
    is_urgent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    monkeypatch.setattr(compactor_module.time, "sleep", rests.append)
    ended = threading.Event()

    def run(pace: Pace) -> None:
        for _ in range(3):
            until = time.monotonic() + 0.001
            while time.monotonic() < until:
                pass
            pace()
        ended.set()

    compactor = Compactor(lambda: True)
    compactor.submit(Work("op", run, lambda: None, lambda: is_urgent))
    assert ended.wait(10)
    compactor.close()
    assert len(rests) == (0 if is_urgent else 3)
    assert all(rest >= 0.009 for rest in rests), "nine times as long as it has worked"
