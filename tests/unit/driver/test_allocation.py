"""Executors that no subtask needs are given back, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cairn.driver.allocation import Allocation, Executor

IDLE_S = 60.0


class Cluster:
    """Executors with one core each, as Spark's status store would show them."""

    def __init__(self, count: int, *, executors_min: int = 0) -> None:
        self.executors = {str(n): Executor(str(n), 0, 1, 0) for n in range(count)}
        self.now_s = 1000.0
        self.removed: list[list[str]] = []
        self.failure: Exception | None = None
        self.allocation = Allocation(
            self.look,
            self.remove,
            idle_s=IDLE_S,
            executors_min=executors_min,
            clock_s=lambda: self.now_s,
        )

    def look(self) -> list[Executor]:
        if self.failure is not None:
            raise self.failure
        return list(self.executors.values())

    def remove(self, ids: Sequence[str]) -> None:
        self.removed.append(list(ids))
        for id in ids:
            del self.executors[id]

    def cache(self, *ids: str, blocks: int = 1) -> None:
        """Pin subtasks, or cache a user's data."""
        for id in ids:
            self.executors[id] = self.executors[id]._replace(cached_blocks=blocks)

    def run(self, seconds: float = IDLE_S, *, is_crowded: bool = False, **busy_s: float) -> None:
        """Epochs for so long. `x1=3`: the tasks of executor 1 take three seconds meanwhile."""
        for _ in range(10):
            self.now_s += seconds / 10
            for name, busy in busy_s.items():
                if one := self.executors.get(name[1:]):
                    self.executors[one.id] = one._replace(busy_ms=one.busy_ms + round(100 * busy))
            self.allocation.after_epoch(is_crowded=is_crowded)


def test_executors_without_subtasks_are_given_back_though_epochs_give_them_small_tasks() -> None:
    cluster = Cluster(4)
    cluster.cache("2")
    cluster.run(x0=0.5, x1=0.5, x2=50, x3=0.5)
    cluster.run(x0=0.5, x1=0.5, x2=50, x3=0.5)
    assert sorted(cluster.executors) == ["2"]


def test_an_executor_is_watched_for_the_whole_idle_time_first() -> None:
    cluster = Cluster(2)
    cluster.cache("0")
    cluster.run(IDLE_S * 0.9)
    assert not cluster.removed
    cluster.run(IDLE_S * 0.3)
    assert cluster.removed == [["1"]]


def test_an_executor_that_has_just_come_or_just_lost_its_subtasks_is_watched_first() -> None:
    cluster = Cluster(2)
    cluster.cache("0", "1")
    cluster.run()
    cluster.cache("1", blocks=0)
    cluster.executors["9"] = Executor("9", 0, 1, 0)
    cluster.run(IDLE_S * 0.5)
    assert not cluster.removed
    cluster.run(IDLE_S * 2)
    assert sorted(cluster.executors) == ["0"]


def test_executors_that_read_the_sources_for_a_good_part_of_the_time_stay() -> None:
    cluster = Cluster(3)
    cluster.cache("0")
    for _ in range(4):
        cluster.run(x1=20, x2=20)
    assert not cluster.removed


def test_only_so_many_go_at_a_time_that_the_others_take_their_tasks_on_unnoticed() -> None:
    cluster = Cluster(5)
    cluster.cache("0")
    # Each of them is busy for 4 % of the time: three would be 12 % of an executor.
    cluster.run(IDLE_S * 1.2, x1=2.9, x2=2.9, x3=2.9, x4=2.9)
    assert [len(ids) for ids in cluster.removed] == [2]


@pytest.mark.parametrize(("executors_min", "left"), [(0, 1), (1, 1), (3, 3), (9, 4)])
def test_as_many_executors_stay_as_the_settings_ask_for_and_at_least_one(
    executors_min: int, left: int
) -> None:
    cluster = Cluster(4, executors_min=executors_min)
    for _ in range(4):
        cluster.run()
    assert len(cluster.executors) == left


def test_while_subtasks_are_crowded_executors_that_have_just_come_stay() -> None:
    """They are about to get subtasks; the span begins again when they have had the time."""
    cluster = Cluster(3)
    cluster.cache("0")
    for _ in range(3):
        cluster.run(is_crowded=True)
    cluster.run(IDLE_S * 0.9)
    assert not cluster.removed
    cluster.run()
    assert sorted(cluster.executors) == ["0"]


def test_a_status_store_that_fails_changes_nothing() -> None:
    cluster = Cluster(2)
    cluster.cache("0")
    cluster.run()
    cluster.failure = RuntimeError("the context is stopped")
    cluster.run()
    assert not cluster.removed
    cluster.failure = None
    # What was seen before the failure does not count.
    cluster.run(IDLE_S * 0.9)
    assert not cluster.removed
    cluster.run(IDLE_S * 2)
    assert cluster.removed == [["1"]]
