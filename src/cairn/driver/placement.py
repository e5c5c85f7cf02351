"""The executors that subtasks are pinned to, with several of them.

The pin table has one row per subtask, persisted on the executor where its slot is. The first
action lays it out. It is laid out again when subtasks crowd, and when executors have notice to end.

Always true here:
- a pin table changes between two epochs only; one that is laid out meanwhile waits for the next;
- subtasks that crowd in one epoch stay: an executor may just be late;
- with one executor nothing is pinned; the places of subtasks are noted all the same.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cairn.driver.allocation import watch_allocation
from cairn.driver.departures import Departures, find_departing
from cairn.plan.frames import lay_again, lay_pin, plan_pin
from cairn.protocol.messages import Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cairn.plan.dataframe import Planner

MOVES_CHAINED = 16
"""A pin table that is laid out again reads the one before. The last of this number reads none."""
PATIENCE_S = 10.0
"""Time that a move which is under way may take when the run ends."""


class Placement:
    """The pin tables of a run, and the executors of its subtasks."""

    def __init__(self, spark: SparkSession, *, is_pinned: bool) -> None:
        self._spark = spark
        self.is_pinned = is_pinned
        self.executors: dict[int, str] = {}
        """The executor of each subtask, since the last deployment."""
        self.repinned = 0
        self._prepared: dict[int, DataFrame] = {}
        """Pin tables of a parallelism to come."""
        self._next_pin: tuple[Planner, DataFrame] | None = None
        """A pin table laid out for a planner: the next epoch is the first with it."""
        self._moves = 0
        self._crowded_epochs = 0
        self._departures: Departures | None = None
        self._allocation = watch_allocation(spark) if is_pinned else None

    def keep(self, parallelism: int, pin: DataFrame) -> None:
        """Keep a pin table for a parallelism to come."""
        self._prepared[parallelism] = pin

    def take_pin(self, planner: Planner | None, parallelism: int) -> DataFrame | None:
        """Return the pin table for a parallelism: laid out already, or by the first action.

        `planner` is the one before.
        """
        if not self.is_pinned:
            return None
        pin = self._prepared.pop(parallelism, None)
        is_first = planner is None
        if planner is not None and planner.pin is not None:
            self._prepared.setdefault(planner.parallelism, planner.pin)
            pin = pin or self._prepared.pop(parallelism, None)
        for unused in self._prepared.values():
            unused.unpersist()
        self._prepared.clear()
        return pin or (plan_pin if is_first else lay_pin)(self._spark, parallelism)

    def lay_next(self, planner: Planner) -> DataFrame:
        """Lay the pin table of a planner out again, for the next epoch."""
        assert planner.pin is not None, "subtasks are pinned on several executors only"
        self._moves += 1
        is_long = self._moves % MOVES_CHAINED == 0
        pin = lay_pin(self._spark, planner.parallelism) if is_long else lay_again(planner.pin)
        unused, self._next_pin = self._next_pin, (planner, pin)
        if unused is not None:
            unused[1].unpersist()
        return pin

    def use_next(self, planner: Planner) -> None:
        """Continue with the pin table that was laid out during the epoch before, if any."""
        given, self._next_pin = self._next_pin, None
        if given is None:
            return
        laid_for, pin = given
        if laid_for is planner:
            planner.use_pin(pin)
        else:
            pin.unpersist()

    def watch(self, planner: Planner, reports: Sequence[Report]) -> None:
        """Spread subtasks out again when they crowd on the executors that survived a loss."""
        for report in reports:
            self.executors[report.subtask] = report.executor
        if not self.is_pinned:
            return
        executors = self._executor_count()
        per_executor = collections.Counter(self.executors.values())
        fair = -(-planner.parallelism // max(1, executors))
        crowded = executors > len(per_executor) and max(per_executor.values(), default=0) > fair
        # Twice in a row: an executor may just be late for one epoch.
        self._crowded_epochs = self._crowded_epochs + 1 if crowded else 0
        if self._crowded_epochs >= 2:
            planner.repin(self._spark)
            self._crowded_epochs = 0
            self.repinned += 1

    def _executor_count(self) -> int:
        # One of them is the driver itself. Those that will end get no subtask.
        status = self._spark.sparkContext._jsc.sc().getExecutorMemoryStatus()
        return int(status.size()) - 1 - (self._departures.count if self._departures else 0)

    def watch_departures(self, move: Callable[[], None], name: str) -> None:
        """From now on call `move` when executors have notice to end."""
        find = find_departing(self._spark) if self.is_pinned else None
        if find is not None:
            self._departures = Departures(find, move, name=name)
            self._departures.start()

    def stop_watching(self) -> None:
        """Watch no executors any more; wait for a move that is under way."""
        if self._departures is not None:
            self._departures.stop(PATIENCE_S)

    def give_executors_back(self) -> None:
        """Remove executors that no subtask needs. Called between two epochs."""
        if self._allocation is not None:
            self._allocation.after_epoch(is_crowded=self._crowded_epochs > 0)

    def release(self, planner: Planner) -> None:
        """Let go of the pin tables at the end of a run."""
        self.use_next(planner)
        if planner.pin is not None:
            planner.pin.unpersist()


__all__ = ["Placement"]
