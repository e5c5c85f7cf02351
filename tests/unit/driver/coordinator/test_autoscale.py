"""Autoscaling: each rule of the decision, with figures instead of a job."""

from __future__ import annotations

from typing import Any

import pytest

import cairn
from cairn.driver.coordinator.autoscale import (
    COOL_MS,
    DOWN_MS,
    EPOCHS_SETTLING,
    EPOCHS_UP,
    Autoscaler,
    Figures,
    busy_ms,
    find_bound,
)
from cairn.plan.deploy import job_spec
from cairn.report.epoch import SubtaskTimes, Timings
from cairn.report.scaling import Decision
from tests.unit.plan.programs import ROW, Pass, process, source


class Job:
    """A job with an epoch per second. `rate`: rows per busy second of a subtask."""

    def __init__(self, smallest: int = 1, largest: int = 16, parallelism: int = 2) -> None:
        self.autoscaler = Autoscaler(smallest, largest, trigger_ms=1000)
        self.parallelism = parallelism
        self.now_ms = 0
        self.made: list[Decision] = []

    def epoch(self, rows: int, rate: int = 1000, **figures: Any) -> Decision:
        self.now_ms += 1000
        busy = rows / rate / self.parallelism * 1000
        given = {"epoch_ms": busy, "backlog_rows": 0, "busy_ms": busy, **figures}
        found = Figures(wall_ms=self.now_ms, parallelism=self.parallelism, rows=rows, **given)
        return self.autoscaler.decide(found)

    def flow(self, arriving: int, seconds: int) -> list[int]:
        """Process a steady input: each epoch reads all that came during the one before."""
        end_ms, waiting, made = self.now_ms + seconds * 1000, arriving, []
        while self.now_ms < end_ms:
            busy = waiting / self.parallelism
            took = max(1000.0, busy + 100)
            self.now_ms += int(took)
            rows, waiting = waiting, int(arriving * took / 1000)
            found = Figures(
                wall_ms=self.now_ms, parallelism=self.parallelism, rows=rows, busy_ms=busy,
                epoch_ms=busy + 100, backlog_rows=waiting,
            )  # fmt: skip
            decision = self.autoscaler.decide(found)
            if decision.kind != "hold":
                made.append(decision.target)
                self.parallelism = decision.target
                self.autoscaler.note_change(self.now_ms)
        return made

    def follow(self, rows: int, epochs: int, **figures: Any) -> list[int]:
        """Run epochs, and apply each decision; return the targets."""
        made = []
        for _ in range(epochs):
            decision = self.epoch(rows, **figures)
            if decision.kind != "hold":
                made.append(decision.target)
                self.parallelism = decision.target
                self.autoscaler.note_change(self.now_ms)
        return made


def test_a_few_epochs_above_the_limit_scale_up_and_one_does_not() -> None:
    job = Job()
    job.epoch(1000)
    assert [job.epoch(1900).kind for _ in range(EPOCHS_UP - 1)] == ["hold"] * (EPOCHS_UP - 1)
    assert job.epoch(1000).kind == "hold"
    for _ in range(EPOCHS_UP - 1):
        assert job.epoch(1900).kind == "hold"
    decision = job.epoch(1900)
    assert (decision.kind, decision.target, decision.utilisation) == ("up", 4, 0.95)
    assert "95%" in decision.reason


def test_one_epoch_that_takes_long_is_enough_to_scale_up() -> None:
    job = Job()
    job.epoch(1000)
    job.now_ms += 29_000
    decision = job.epoch(60_000, busy_ms=30_000.0, epoch_ms=30_000.0, backlog_rows=None)
    assert (decision.kind, decision.target) == ("up", 5)  # 2,000 rows/s and half more.


def test_the_target_brings_utilisation_to_six_tenths() -> None:
    job = Job(parallelism=3)
    assert job.follow(2700, EPOCHS_UP + 1) == [5]  # 2700 / (1000 * 0.6) = 4.5


def test_a_backlog_scales_up_though_subtasks_have_time() -> None:
    job = Job()
    job.epoch(1000)
    decisions = [job.epoch(1000, backlog_rows=60_000) for _ in range(EPOCHS_UP)]
    # 1,000 rows arrive each second, and the backlog shall be gone in a minute.
    assert (decisions[-1].kind, decisions[-1].target) == ("up", 4)
    assert "60,000 rows wait" in decisions[-1].reason


def test_epochs_that_miss_the_trigger_scale_up_where_the_backlog_is_not_known() -> None:
    job = Job()
    job.epoch(1000)
    made = [
        job.epoch(1000, backlog_rows=None, epoch_ms=1500.0, busy_ms=700.0) for _ in range(EPOCHS_UP)
    ]
    assert made[-1].kind == "up" and "1.5 times the trigger" in made[-1].reason


def unlimited(job: Job, arriving: int, rate: int, epochs: int) -> list[Decision]:
    """Epochs of a source that tells no backlog and has no limit: each reads what has come."""
    waiting, decisions = arriving, []
    for _ in range(epochs):
        busy = waiting / rate / job.parallelism * 1000
        took = max(1000.0, busy + 100)
        job.now_ms += int(took)
        rows, waiting = waiting, int(arriving * took / 1000)
        found = Figures(
            wall_ms=job.now_ms, parallelism=job.parallelism, rows=rows, busy_ms=busy,
            epoch_ms=busy + 100, backlog_rows=None,
        )  # fmt: skip
        decisions.append(job.autoscaler.decide(found))
    return decisions


def test_a_load_of_four_times_what_fits_is_met_by_one_step_where_the_backlog_is_not_known() -> None:
    """An epoch that is late has the rows that came during the one before, which tells the rate."""
    job = Job(parallelism=1, largest=8)
    unlimited(job, 600, 900, 10)
    late = unlimited(job, 2400, 900, 3)
    up = next(each for each in late if each.kind == "up")
    assert late.index(up) == 1 and up.target == 7  # 2,400 rows/s and half more.


def test_one_burst_is_not_taken_for_the_rate_at_which_rows_come() -> None:
    job = Job(parallelism=1, largest=8)
    unlimited(job, 600, 900, 10)
    job.now_ms += 8_000
    burst = job.epoch(8000, 900, busy_ms=8900.0, epoch_ms=9000.0, backlog_rows=None)
    assert burst.kind == "hold"
    after = job.epoch(5400, 900, busy_ms=6000.0, epoch_ms=6000.0, backlog_rows=None)
    assert after.target <= 3


def test_epochs_that_are_late_at_times_do_not_keep_idle_subtasks() -> None:
    """What makes them late is not the work of subtasks."""
    job = Job(parallelism=8)
    for second in range(DOWN_MS // 1000 - 20):
        late = {"epoch_ms": 1300.0, "busy_ms": 100.0} if second % 5 == 0 else {}
        job.now_ms += 300 if late else 0
        assert job.epoch(600, backlog_rows=None, **late).kind == "hold"
    decisions = [job.epoch(600, backlog_rows=None) for _ in range(30)]
    down = next(each for each in decisions if each.kind == "down")
    assert down.target == 2


def test_little_load_scales_down_after_minutes_and_not_before() -> None:
    job = Job(parallelism=8)
    kinds = [job.epoch(600).kind for _ in range(DOWN_MS // 1000 + 1)]
    assert set(kinds) == {"hold"}
    decision = job.epoch(600)
    assert (decision.kind, decision.target) == ("down", 1)


def test_scaling_down_keeps_what_the_busiest_time_needed() -> None:
    job = Job(parallelism=8)
    for second in range(DOWN_MS // 1000 + 1):
        job.epoch(2000 if second == 50 else 600)
    assert job.epoch(600).target == 4


def test_utilisation_between_the_limits_changes_nothing() -> None:
    job = Job(parallelism=4)
    assert job.follow(2400, 400) == []


@pytest.mark.parametrize("rows", [300, 900, 1700, 3100, 7000, 30_000])
def test_a_steady_load_is_followed_once_or_twice_and_never_back(rows: int) -> None:
    job = Job(parallelism=4)
    made = job.flow(rows, 3000)
    assert made == sorted(made) or made == sorted(made, reverse=True)
    assert len(made) <= 3
    assert job.parallelism * 1000 * 0.8 >= min(rows, 16 * 800)


def test_a_load_that_swings_faster_than_minutes_does_not_flap() -> None:
    job = Job(parallelism=2)
    swings = [job.flow(6000, 60) + job.flow(300, 100) for _ in range(30)]
    assert swings[0] and not any(swings[5:]), "quiet moments are too short to go down"
    assert job.parallelism * 1000 > 6000


def test_nothing_is_decided_right_after_a_change() -> None:
    job = Job()
    job.autoscaler.note_change(0)
    kinds = [job.epoch(1900).kind for _ in range(COOL_MS // 1000 - 1)]
    assert set(kinds) == {"hold"}
    assert job.epoch(1900).kind == "up"


def test_epochs_that_restore_state_after_a_change_do_not_count() -> None:
    job = Job()
    job.autoscaler.note_change(-COOL_MS)
    for _ in range(EPOCHS_SETTLING):
        assert "restore state" in job.epoch(1900).reason
    assert [job.epoch(1900).kind for _ in range(EPOCHS_UP)] == ["hold", "hold", "up"]


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"commit_ms": 3000.0}, "the sinks take most of the time"),
        ({"alignment_ms": 900.0}, "subtasks wait for their input"),
        ({"heaviest_share": 0.7}, "one key group has 70% of the load"),
        ({"attempts": 2}, "took 2 attempts"),
    ],
)
def test_more_subtasks_are_not_asked_for_where_they_do_not_help(
    figures: dict[str, Any], why: str
) -> None:
    job = Job()
    decisions = [job.epoch(1900, backlog_rows=90_000, **figures) for _ in range(10)]
    assert {each.kind for each in decisions} == {"hold"}
    assert why in decisions[-1].reason


def test_a_heavy_key_group_limits_the_target() -> None:
    job = Job(parallelism=2)
    assert job.follow(1900, EPOCHS_UP + 1, backlog_rows=600_000, heaviest_share=0.3) == [4]


def test_targets_stay_within_the_range() -> None:
    assert Job(1, 5).follow(1900, EPOCHS_UP + 1, backlog_rows=10_000_000) == [5]
    assert Job(3, 5, parallelism=5).follow(1, DOWN_MS // 1000 + 3) == [3]
    assert Job(4, 5, parallelism=2).epoch(10).target == 4


def test_no_rows_ever_change_nothing() -> None:
    assert Job(parallelism=4).follow(0, 1000) == []


def test_busy_time_is_that_of_the_busiest_subtask_of_each_level() -> None:
    subtasks = [
        SubtaskTimes(level=0, subtask=0, process_ms=10.0, snapshot_ms=1.0, begin_ms=99.0),
        SubtaskTimes(level=0, subtask=1, process_ms=30.0),
        SubtaskTimes(level=1, subtask=0, process_ms=5.0),
    ]
    assert busy_ms(Timings(subtasks=subtasks)) == 35.0
    three_batches = Timings(subtasks=subtasks, process_ms=80.0, snapshot_ms=10.0)
    assert busy_ms(three_batches) == 105.0, "subtasks are measured in one batch of three"
    assert busy_ms(Timings()) == 0.0


def test_more_subtasks_are_not_asked_for_where_an_operator_takes_no_more() -> None:
    job = Job(parallelism=4)
    assert job.follow(4000, EPOCHS_UP + 1, backlog_rows=10_000_000, bounded="score") == []
    last = job.epoch(4000, backlog_rows=10_000_000, bounded="score")
    assert "operator score takes most of it" in last.reason


def _level(index: int, *busy_ms: float) -> list[SubtaskTimes]:
    return [
        SubtaskTimes(level=index, subtask=subtask, process_ms=busy)
        for subtask, busy in enumerate(busy_ms)
    ]


def test_the_operator_that_bounds_a_job_takes_most_of_its_busiest_level() -> None:
    program = cairn.Job("j", max_parallelism=16)
    rows = source(program, "s")
    few = rows.key_by("k").process(Pass(), schema=ROW, uid="few", parallelism=2)
    process(few, "many", key="v")
    spec = job_spec(program.graph(), job_id="", checkpoint="memory:", backend="heap")
    first, second = _level(0, 10.0, 9.0, 0.1, 0.1), _level(1, 5.0, 5.0, 5.0, 5.0)
    assert find_bound(Timings(subtasks=[*first, *second]), spec, 4) == "few"
    assert find_bound(Timings(subtasks=[*first, *second]), spec, 2) == ""
    assert find_bound(Timings(subtasks=second), spec, 4) == ""
    assert find_bound(Timings(), spec, 4) == ""


def test_a_bounded_operator_does_not_bound_a_job_that_works_longer_elsewhere() -> None:
    program = cairn.Job("j", max_parallelism=16)
    rows = source(program, "s")
    few = rows.key_by("k").process(Pass(), schema=ROW, uid="few", parallelism=1)
    again = process(few, "many", key="v")
    process(again, "more", key="k")
    spec = job_spec(program.graph(), job_id="", checkpoint="memory:", backend="heap")
    assert len(spec.levels) == 3
    levels = [*_level(0, 10.0, 0.1), *_level(1, 8.0, 8.0), *_level(2, 7.0, 7.0)]
    assert find_bound(Timings(subtasks=levels), spec, 2) == ""
    levels = [*_level(0, 10.0, 0.1), *_level(1, 5.0, 5.0), *_level(2, 4.0, 4.0)]
    assert find_bound(Timings(subtasks=levels), spec, 2) == "few"


def test_a_light_operator_with_a_parallelism_of_its_own_does_not_bound_its_level() -> None:
    program = cairn.Job("j", max_parallelism=16)
    rows = source(program, "s").key_by("k")
    rows.process(Pass(), schema=ROW, uid="light", parallelism=2)
    rows.process(Pass(), schema=ROW, uid="heavy")
    spec = job_spec(program.graph(), job_id="", checkpoint="memory:", backend="heap")
    assert len(spec.levels) == 1
    assert find_bound(Timings(subtasks=_level(0, 11.0, 11.0, 10.0, 10.0)), spec, 4) == ""
    assert find_bound(Timings(subtasks=_level(0, 30.0, 28.0, 10.0, 10.0)), spec, 4) == "light"
