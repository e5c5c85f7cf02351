"""The history of a run, and the line that reports its first committed epoch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.driver import progress
from cairn.driver.coordinator.ticker import Pace
from cairn.driver.history import History
from cairn.run import Run
from tests.unit.driver.coordinator.leads import POSITION, Lead


@pytest.mark.parametrize(("every", "said_after"), [(1, 1), (3, 3)])
def test_the_first_epoch_is_announced_once_and_when_it_is_committed(
    every: int, said_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = Lead(tmp_path, checkpoint_every=every).start()
    run: Any = Run.__new__(Run)
    run._coordinator, run._history = lead.coordinator, History(lead.coordinator)
    run._pace = Pace(0)
    run._changes = SimpleNamespace(apply=lambda: None)
    run._driver = SimpleNamespace(
        execute=lambda _, begin: lead.execute(begin, ((1, 5),)), end_left_behind=lambda: None
    )
    said: list[str] = []
    monkeypatch.setattr(progress, "say", said.append)
    for batch in range(1, 7):
        run._run_batch(POSITION, None)
        assert said == (["the first epoch is committed: 2"] if batch >= said_after else [])
