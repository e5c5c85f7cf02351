"""Alignment: from the first to the last upstream subtask to finish."""

from __future__ import annotations

from typing import Any

from cairn import Job, sinks
from cairn.driver.coordinator.alignment import alignment_ms, level_alignment_ms
from cairn.driver.spark_tasks import STAGES_BEFORE_MAX, SparkTasks
from cairn.plan.deploy import job_spec
from cairn.protocol.messages import Report
from cairn.protocol.spec import LevelSpec
from tests.unit.plan.programs import process, source


def levels(*uids: str) -> tuple[LevelSpec, ...]:
    """Keyed operators in a row, each in a level of its own."""
    job = Job("j", max_parallelism=16)
    stream = source(job, "s")
    for uid in uids:
        stream = process(stream, uid)
    stream.sink_to(sinks.Noop(), uid="out")
    return job_spec(job.graph(), job_id="", checkpoint="memory:", backend="heap").levels


def report(level: int, subtask: int, finished_ms: int, stage: int | None = None) -> Report:
    return Report(
        level, subtask, "", "", started_ms=0, finished_ms=finished_ms, begin_ms=0, restored=False,
        process_ms=0, snapshot_ms=0, stage=stage,
    )  # fmt: skip


def test_an_operator_waits_from_the_first_to_the_last_subtask_of_the_level_before() -> None:
    reports = [
        report(0, 0, 1_000), report(0, 1, 1_030), report(0, 2, 1_010),
        report(1, 0, 2_000), report(1, 1, 2_007), report(1, 2, 2_001),
        report(2, 0, 3_000), report(2, 1, 3_900), report(2, 2, 3_000),
    ]  # fmt: skip
    assert alignment_ms(levels("a", "b", "c"), reports, 5) == {"a": 5, "b": 30, "c": 7}


def test_one_upstream_subtask_is_nothing_to_wait_for() -> None:
    assert alignment_ms(levels("a", "b"), [report(0, 0, 50), report(1, 0, 90)], 0)["b"] == 0


def test_what_was_not_measured_is_unknown_and_not_zero() -> None:
    assert alignment_ms(levels("a", "b"), [], None) == {"a": None, "b": None}


def test_a_subtask_that_ran_twice_is_done_the_last_time() -> None:
    reports = [report(0, 0, 100), report(0, 1, 110), report(0, 0, 400)]
    assert level_alignment_ms(levels("a", "b"), reports, 0)[1] == 290


def test_rounds_of_an_epoch_count_by_the_longest_of_them() -> None:
    reports = [
        report(0, 0, 100, stage=4), report(0, 1, 103, stage=4),
        report(0, 0, 900, stage=9), report(0, 1, 920, stage=9),
    ]  # fmt: skip
    assert level_alignment_ms(levels("a", "b"), reports, 0)[1] == 20


def test_the_wait_is_not_known_where_clocks_of_hosts_differ_by_more_than_the_batch_took() -> None:
    hour_ms = 3_600_000
    reports = [
        report(0, 0, 1_000), report(0, 1, 1_030 + hour_ms),
        report(1, 0, 2_000), report(1, 1, 2_007),
    ]  # fmt: skip
    found = level_alignment_ms(levels("a", "b", "c"), reports, 5, ran_ms=1_500.0)
    assert found == {0: 5, 1: None, 2: 7}


class Store:
    """Spark's status store: {stage: [(launched, duration)]}, sorted by when they ended."""

    def __init__(self, stages: dict[int, list[tuple[int, int | None]]]) -> None:
        self.stages = stages

    def taskList(self, stage: int, *args: Any) -> Any:
        tasks = self.stages.get(stage, [])
        return Seq(tasks[: args[2]] if args[4] else tasks[-args[2] :])


class Seq:
    def __init__(self, tasks: Any) -> None:
        self.tasks = tasks

    def size(self) -> int:
        return len(self.tasks)

    def head(self) -> Seq:
        return self

    def launchTime(self) -> Seq:
        return self

    def getTime(self) -> int:
        return int(self.tasks[0][0])

    def duration(self) -> Seq:
        return Seq([] if self.tasks[0][1] is None else [self.tasks[0][1]])

    def get(self) -> int:
        return int(self.tasks[0])


def tasks_of(stages: dict[int, list[tuple[int, int | None]]]) -> SparkTasks:
    tasks = SparkTasks(None)
    tasks._store = Store(stages)
    return tasks


def test_tasks_before_a_stage_are_those_of_the_next_one_below_that_ran() -> None:
    stages: dict[int, list[tuple[int, int | None]]] = {
        3: [(100, 1), (100, 90)],
        4: [(200, 10), (205, 11), (190, 55)],
        5: [],
        6: [(300, 5)],
    }
    assert tasks_of(stages).spread_before_ms(6, -1) == 35
    assert tasks_of(stages).spread_before_ms(7, -1) == 0, "a task alone is first and last"
    assert tasks_of(stages).spread_before_ms(3, -1) is None


def test_tasks_of_an_earlier_epoch_are_not_taken_for_those_of_this_one() -> None:
    stages: dict[int, list[tuple[int, int | None]]] = {4: [(100, 10), (100, 90)]}
    assert tasks_of(stages).spread_before_ms(6, 3) == 80
    assert tasks_of(stages).spread_before_ms(6, 4) is None
    assert tasks_of(stages).spread_before_ms(5 + STAGES_BEFORE_MAX, -1) is None


def test_a_task_that_spark_has_not_seen_end_leaves_it_unknown() -> None:
    assert tasks_of({4: [(200, None), (200, 10)]}).spread_before_ms(5, -1) is None


def test_a_status_store_that_fails_does_not_fail_the_epoch() -> None:
    assert SparkTasks(None).spread_before_ms(5, 0) is None
    assert SparkTasks(None).spread_before_ms(None, 0) is None
