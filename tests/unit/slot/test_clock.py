"""The wall clock of a host is set by an hour: its slots and their nursery live on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import tests.clock
from tests.unit.slot.executors import Executor, executor, is_gone
from tests.unit.slot.one_level import Count
from tests.unit.slot.test_process import Job

__all__ = ["executor"]

HOUR_S = 3600
POLLS_S = 1.1
"""The time in which slots and nursery look twice for reasons to end."""


class Watch(Count):
    """Writes down what time it is in the slot."""

    def __init__(self, told: Path) -> None:
        self.told = told

    def process(self, row: Any, ctx: Any) -> Any:
        self.told.write_text(str(time.time()))
        return super().process(row, ctx)


def test_a_step_of_the_wall_clock_ends_no_slot_and_restores_nothing(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told = tmp_path / "clock", tmp_path / "told"
    clock.write_text("0")
    monkeypatch.syspath_prepend(tests.clock.FOLDER)
    monkeypatch.setenv("CAIRN_TEST_CLOCK", str(clock))
    # Less than the step: by the wall clock all would have been idle for too long.
    monkeypatch.setenv("CAIRN_SLOT_LEASE_S", "600")
    job = Job(tmp_path, Watch(told))
    first = job.run(executor, [(1, 1)])
    slot = executor.slot(0)
    for attempt, step_s in enumerate((HOUR_S, -HOUR_S), 1):
        clock.write_text(str(step_s))
        time.sleep(POLLS_S)
        report = job.run(executor, [(1, 1)], attempt=attempt)
        assert float(told.read_text()) == pytest.approx(time.time() + step_s, abs=600)
        assert report.slot_id == first.slot_id and not report.restored
        assert not is_gone(slot) and not is_gone(slot.parent())
        assert executor.slot(attempt).parent() == slot.parent(), "from the same nursery"
