"""Give executors back that no subtask needs, where Spark allocates them dynamically.

Spark removes an executor that has had no task for `spark.dynamicAllocation.executorIdleTimeout`.
In a streaming job no executor is idle for so long: Spark gives the few small tasks that read the
sources to any of them, in every epoch. So after a rescale to fewer subtasks none would be removed.
Here an executor counts as spare when it holds no cached data and did next to nothing for that time.

Always true here:
- an executor with cached data stays: it has subtasks (the pin table is cached), or data of users;
- executors are removed between two epochs, when nobody needs their shuffle files, and Spark
  refuses to remove one that is busy;
- at least `spark.dynamicAllocation.minExecutors` stay, and one;
- a failure to read or to remove changes nothing for the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cairn.logs import logger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARE_SHARE_MAX: Final = 0.1
"""The tasks of all executors that are removed at a time took less than this part of the time of
one: the executors that stay take these tasks on without noticing."""


class Executor(NamedTuple):
    """An executor as Spark's status store sees it."""

    id: str
    cached_blocks: int
    cores: int
    busy_ms: int
    """The time that all its tasks took, since it was started."""


class Allocation:
    """Watches executors over spans of time, and removes spare ones at the end of each."""

    def __init__(
        self,
        look: Callable[[], Iterable[Executor]],
        remove: Callable[[Sequence[str]], None],
        *,
        idle_s: float,
        executors_min: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._remove = remove
        self._idle_s = idle_s
        self._executors_min = max(1, executors_min)
        self._clock_s = clock_s
        self._since_s = float("-inf")
        self._before: dict[str, Executor] = {}
        """The executors at the beginning of the span."""

    def after_epoch(self, *, is_crowded: bool) -> None:
        """Remove spare executors if a span is over. Called between two epochs.

        While subtasks are crowded, executors without any have just come, and will get some.
        """
        elapsed_s = self._clock_s() - self._since_s
        if elapsed_s < self._idle_s and not is_crowded:
            return
        try:
            now = {executor.id: executor for executor in self._look()}
            spare = [] if is_crowded else find_spare(self._before, now, elapsed_s)
            spare = spare[: max(0, len(now) - self._executors_min)]
            self._since_s, self._before = self._clock_s(), now
            if spare:
                self._remove(spare)
                logger.info("%d executors have no subtask and are given back", len(spare))
        except Exception:
            self._since_s, self._before = self._clock_s(), {}
            logger.warning("spare executors could not be given back", exc_info=True)


def find_spare(
    before: Mapping[str, Executor], now: Mapping[str, Executor], elapsed_s: float
) -> list[str]:
    """Return executors without cached data that did next to nothing, the least busy first."""
    shares = {
        id: (executor.busy_ms - before[id].busy_ms) / (elapsed_s * 1000 * max(1, executor.cores))
        for id, executor in now.items()
        if id in before and not executor.cached_blocks and not before[id].cached_blocks
    }
    spare = []
    total = 0.0
    for id in sorted(shares, key=lambda id: shares[id]):
        total += shares[id]
        if total >= SPARE_SHARE_MAX:
            break
        spare.append(id)
    return spare


def watch_allocation(spark: SparkSession) -> Allocation | None:
    """Return what gives executors back; None where Spark does not allocate them dynamically."""
    context: Any = spark.sparkContext
    conf = context._jsc.sc().conf()
    if not conf.getBoolean("spark.dynamicAllocation.enabled", False):
        return None

    def look() -> list[Executor]:
        found = context._jsc.sc().statusStore().executorList(True)
        each = [found.apply(index) for index in range(found.size())]
        return [
            Executor(one.id(), one.rddBlocks(), one.totalCores(), one.totalDuration())
            for one in each
            if one.id() != "driver"
        ]

    def remove(ids: Sequence[str]) -> None:
        # As Spark's own allocation does: without asking for others instead, and not by force.
        chosen = context._jvm.PythonUtils.toSeq(list(ids))
        context._jsc.sc().schedulerBackend().killExecutors(chosen, False, False, False)

    return Allocation(
        look,
        remove,
        idle_s=conf.getTimeAsSeconds("spark.dynamicAllocation.executorIdleTimeout", "60s"),
        executors_min=conf.getInt("spark.dynamicAllocation.minExecutors", 0),
    )
