"""The history of a run, and the line that reports its first committed epoch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.driver import progress
from cairn.driver.coordinator.ticker import Pace
from cairn.driver.engine import Engine
from cairn.driver.history import History
from tests.unit.driver.coordinator.leads import POSITION, Lead


@pytest.mark.parametrize(("every", "said_after"), [(1, 1), (3, 3)])
def test_the_first_epoch_is_announced_once_and_when_it_is_committed(
    every: int, said_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = Lead(tmp_path, checkpoint_every=every).start()
    engine: Any = Engine.__new__(Engine)
    engine.coordinator, engine.history = lead.coordinator, History(lead.coordinator)
    engine._pace = Pace(0)
    engine.changes = SimpleNamespace(apply=lambda: None)
    engine.scaling = SimpleNamespace(after_batch=lambda: None)
    engine.driver = SimpleNamespace(
        execute=lambda _, begin: lead.execute(begin, ((1, 5),)),
        end_left_behind=lambda: None,
        give_executors_back=lambda: None,
    )
    said: list[str] = []
    monkeypatch.setattr(progress, "say", said.append)
    for batch in range(1, 7):
        engine._run_batch(POSITION, None)
        assert said == (["the first epoch is committed: 2"] if batch >= said_after else [])
