"""Autoscaling of a run: decisions are applied, or only observed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cairn.driver.coordinator.reports import report_of
from cairn.driver.options import Options, parallelism_range
from cairn.driver.scaling import Scaling
from cairn.errors import PlanError
from cairn.report.epoch import EpochReport
from tests.unit.driver.coordinator.test_load import epoch_of


class Fake:
    """A run whose single subtask works all the time, an epoch per second."""

    def __init__(self, mode: Any, cores: int | None = None, progress: Any = None) -> None:
        self.asked: list[int] = []
        self.number = 0
        self.coordinator: Any = SimpleNamespace(
            parallelism=1,
            decision=None,
            committed=None,
            subtasks=SimpleNamespace(load=SimpleNamespace(heaviest_share=lambda: 0.0)),
            spec=SimpleNamespace(group_count=8, job_name="job", levels=[]),
        )
        self.scaling = Scaling(
            Options("ckpt", parallelism="1..4", autoscale=mode),
            self.coordinator,
            SimpleNamespace(rescale=lambda target, decision: self.asked.append(target)),  # type: ignore[arg-type]
            SimpleNamespace(newest=self.newest),  # type: ignore[arg-type]
            ["rows"],
            trigger_ms=1000,
            cores=cores,
            progress=progress or (lambda: {"sources": [{"endOffset": 1, "latestOffset": 99_001}]}),
        )

    def newest(self) -> EpochReport:
        from msgspec.structs import replace

        report = report_of(epoch_of(count=[1000]))
        times = [replace(report.timings.subtasks[0], process_ms=950.0)]
        return replace(
            report,
            epoch=self.number,
            wall_ms=self.number * 1000,
            parallelism=1,
            epoch_ms=1000.0,
            timings=replace(report.timings, subtasks=times),
            decision=self.coordinator.decision,
        )

    def commit(self) -> None:
        self.number += 1
        decision = self.coordinator.decision
        self.coordinator.committed = SimpleNamespace(number=self.number, decision=decision)

    def run(self, epochs: int) -> Fake:
        for _ in range(epochs):
            self.commit()
            self.scaling.after_batch()
            self.coordinator.decision = None
        return self


def test_a_decision_is_applied_when_autoscaling_is_on() -> None:
    fake = Fake("on").run(4)
    assert fake.asked == [4]
    found = fake.scaling.report()
    assert found.decision is not None and found.decision.is_applied
    assert found.backlog == {"rows": 99_000}


def test_observing_notes_the_decision_and_changes_nothing() -> None:
    fake = Fake("observe").run(3)
    fake.commit()
    fake.scaling.after_batch()
    noted = fake.coordinator.decision
    assert fake.asked == [] and noted.target == 4 and not noted.is_applied
    assert noted.text().startswith("would scale up from 1 to 4: ")
    fake.commit()
    fake.scaling.after_batch()
    assert fake.scaling.report().changes == [noted], "the next epoch has noted it"


def test_nothing_is_decided_when_autoscaling_is_off() -> None:
    options = Options("ckpt", parallelism=1)
    fake = Fake("on")
    fake.scaling = Scaling(
        options, fake.coordinator, None, SimpleNamespace(newest=fake.newest),  # type: ignore[arg-type]
        ["rows"], trigger_ms=1000, cores=None, progress=lambda: None,
    )  # fmt: skip
    fake.run(10)
    assert fake.scaling.report().decision is None and fake.scaling.report().mode == "off"


def test_slots_that_share_the_cores_of_one_machine_are_not_more_than_cores() -> None:
    assert Fake("on", cores=2).run(4).asked == [2]


def test_progress_that_cannot_be_read_leaves_the_backlog_unknown() -> None:
    def fail() -> Any:
        raise RuntimeError("the JVM is gone")

    fake = Fake("on", progress=fail).run(2)
    assert fake.scaling.report().backlog == {"rows": None}


def test_one_epoch_is_counted_once() -> None:
    fake = Fake("on").run(2)
    for _ in range(10):
        fake.scaling.after_batch()
    assert fake.asked == []


@pytest.mark.parametrize(
    ("given", "mode", "expected"),
    [
        (4, "off", range(4, 5)),
        ("4", "off", range(4, 5)),
        ("2..16", "on", range(2, 17)),
        (None, "observe", range(1, 129)),
        (None, "off", None),
    ],
)
def test_parallelism_is_a_number_or_a_range(given: Any, mode: Any, expected: Any) -> None:
    assert parallelism_range(Options("c", parallelism=given, autoscale=mode), 128) == expected


@pytest.mark.parametrize(
    ("given", "mode", "why"),
    [
        ("2..16", "off", "autoscale is 'off'"),
        (4, "on", "needs a range"),
        ("16..2", "on", "a range such as"),
        ("many", "off", "must be a number"),
        ("0..4", "on", "between 1 and max_parallelism"),
        (0, "off", "between 1 and max_parallelism"),
        (None, "maybe", "must be 'off', 'observe' or 'on'"),
    ],
)
def test_other_parallelisms_are_refused(given: Any, mode: Any, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        parallelism_range(Options("c", parallelism=given, autoscale=mode), 128)
