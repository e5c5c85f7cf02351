"""The begin message of a job with so many subtasks that their parts are in an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn.driver.coordinator.epoch import Coordinator
from cairn.protocol import parts
from cairn.protocol.messages import begin_encoder
from cairn.protocol.slots import CHANGES_MAX
from cairn.slot.level import StaleTokenError
from cairn.storage.paths import PENDING_FOLDER
from tests.unit.driver.coordinator.leads import POSITION, Lead

ROWS = [(key, 1) for key in range(20)]


@pytest.fixture
def lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lead:
    monkeypatch.setattr(parts, "INLINE_BYTES_MAX", 0)
    return Lead(tmp_path, parallelism=3).start()


def test_slots_continue_from_versions_in_an_object_that_is_removed_afterwards(lead: Lead) -> None:
    for _ in range(3):
        lead.run_batch(*ROWS)
        assert not lead.store.list(PENDING_FOLDER)
    assert all(begin.parts_at is not None and not begin.parts for begin in lead.begins)
    paths = [begin.parts_at.path for begin in lead.begins if begin.parts_at is not None]
    assert len(set(paths)) == 3
    assert lead.coordinator.newest is not None
    assert lead.coordinator.newest.metrics.restored == 0
    assert max(row["n"] for row in map(_as_dict, lead.sink.rows)) == 3


def _as_dict(row: Any) -> dict[str, Any]:
    return dict(zip(("k", "n", "total"), row, strict=True))


def test_every_attempt_has_an_object_of_its_own(lead: Lead) -> None:
    failures = [RuntimeError("first"), RuntimeError("second")]

    def execute(begin: Any) -> Any:
        outcome = lead.execute(begin, ROWS)
        if failures:
            raise failures.pop(0)
        return outcome

    lead.coordinator.run_batch(POSITION, execute)
    assert len({begin.parts_at for begin in lead.begins}) == 3
    assert not lead.store.list(PENDING_FOLDER)


def test_task_of_an_earlier_attempt_is_refused_before_its_object_is_read(lead: Lead) -> None:
    lead.run_batch(*ROWS)
    lead.run_batch(*ROWS)
    old = lead.begins[0]
    with pytest.raises(StaleTokenError):
        lead.slots[0].level(0).begin(old.token(), old, 0)


def test_tasks_find_the_slots_of_a_rescaled_run(lead: Lead) -> None:
    for parallelism in (3, 5, 2, 6, 1, 4):
        lead.coordinator.subtasks.rescale(parallelism)
        lead.run_batch(*ROWS)
        begin = lead.begins[-1]
        assert [begin.slot(at) for at in range(parallelism)] == lead.coordinator.subtasks.slots
    assert lead.coordinator.newest is not None
    assert lead.coordinator.newest.metrics.operators["count"].state_keys == len(ROWS)


def test_message_has_a_limit_after_any_number_of_rescales(lead: Lead) -> None:
    coordinator: Coordinator = lead.coordinator
    sizes = []
    for change in range(CHANGES_MAX + 10):
        prepared = coordinator.subtasks.slots_for(3 + change % 2)
        coordinator.subtasks.rescale(3 + change % 2)
        assert coordinator.subtasks.slots == prepared and len(set(prepared)) == len(prepared)
        if change > CHANGES_MAX - 5:
            lead.run_batch((1, 1))
            sizes.append(len(begin_encoder.encode(lead.begins[-1])))
    assert max(sizes) < 1000 and min(sizes) < 600
