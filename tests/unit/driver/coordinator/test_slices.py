"""Slices of a batch: more of them where memory is short, fewer again after a while."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.rounds import Outcome, count_sink_rows, latest_times
from cairn.driver.coordinator.slices import CALM_BATCHES, SLICES_MAX, Slices
from tests.simulation.world import Driver, World


def fit(slices: Slices, batches: int) -> int:
    for _ in range(batches):
        slices.note_fit()
    return slices.count


def test_slices_double_up_to_a_limit() -> None:
    slices = Slices()
    assert slices.count == 1 and slices.may_grow
    while slices.grow():
        pass
    assert slices.count == SLICES_MAX and not slices.may_grow


def test_batches_that_fit_bring_the_number_down_step_by_step() -> None:
    slices = Slices()
    slices.grow()
    slices.grow()
    assert fit(slices, CALM_BATCHES - 1) == 4
    assert fit(slices, 1) == 2
    assert fit(slices, CALM_BATCHES) == 1
    assert fit(slices, 2 * CALM_BATCHES) == 1


def test_a_number_that_was_too_low_is_tried_again_after_twice_as_many_batches() -> None:
    slices = Slices()
    slices.grow()
    assert fit(slices, CALM_BATCHES) == 1
    slices.grow()
    assert fit(slices, 2 * CALM_BATCHES - 1) == 2
    assert fit(slices, 1) == 1
    fit(slices, 1)
    slices.grow()
    assert fit(slices, 2 * CALM_BATCHES) == 1, "rows have grown since: patience stays as it was"


def test_what_is_measured_of_slices_adds_up() -> None:
    rounds = [Outcome([], [], {"a": 5, "b": 2}, None, {"s": 3}), Outcome([], [], {"a": 4, "c": 1})]
    rounds.append(Outcome([], [], {}, None, {"s": 4, "t": 1}))
    assert latest_times(rounds) == {"a": 5, "b": 2, "c": 1}
    assert count_sink_rows(rounds) == {"s": 7, "t": 1}


@pytest.mark.parametrize("backend", ["postgresql://x/y", "redis://x", "rocksdb", "heap"])
def test_a_full_slot_over_a_database_commits_the_epoch_before_its_last_batch(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database gets the changes after a commit; until then the slot has them in memory."""
    driver = Driver(World(1, tmp_path), parallelism=2, checkpoint_every=5)
    driver.start()
    report = driver.cluster._report
    excess = [""]

    def report_full(*args: Any) -> list[Any]:
        return [msgspec.structs.replace(each, memory_excess=excess[0]) for each in report(*args)]

    driver.cluster._report = report_full  # type: ignore[method-assign]
    coordinator: Coordinator = driver.coordinator
    coordinator.spec = replace(coordinator.spec, backend=backend)
    driver.run_batch(5)
    assert coordinator.batches == 1
    excess[0] = "uses 99 of 100 MiB"
    driver.run_batch(5)
    assert coordinator.batches == (2 if backend in ("heap", "rocksdb") else 0)
