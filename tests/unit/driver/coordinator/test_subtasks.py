"""Subtasks of later epochs: a new leader continues with the parallelism and ranges of an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.driver.coordinator.subtasks import Subtasks
from tests.unit.driver.coordinator.leads import Lead


@pytest.mark.parametrize(
    ("limits", "parallelism"),
    [(None, 2), (range(1, 9), 4), (range(1, 4), 3), (range(5, 7), 5)],
)
def test_new_leader_keeps_the_epochs_parallelism_within_the_limits_of_autoscaling(
    tmp_path: Path, limits: range | None, parallelism: int
) -> None:
    lead = Lead(tmp_path, parallelism=4).start()
    lead.run_batch((1, 1), (2, 1))
    assert lead.coordinator.newest is not None
    group_count = lead.coordinator.spec.group_count
    subtasks = Subtasks(2, group_count, limits)
    subtasks.continue_from(lead.coordinator.newest, lead.coordinator.spec)
    assert subtasks.parallelism == len(subtasks.slots) == parallelism
    assert subtasks.starts == ()


def test_second_rescale_gives_kept_subtasks_their_slots() -> None:
    subtasks = Subtasks(2, 12)
    subtasks.rescale(4)
    grown = subtasks.slots
    subtasks.rescale(4)
    assert (subtasks.slots, subtasks.rescaled_from) == (grown, (2,))
    subtasks.rescale(2)
    assert (subtasks.slots, subtasks.rescaled_from) == ([0, 1], (2, 4))
