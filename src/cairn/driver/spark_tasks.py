"""Finish times of Spark's own tasks, which read the sources and map their rows.

Slots report when subtasks finish. Tasks before the first slot are in Spark's status store, which
its UI shows. Two tasks of one stage are read from it, the first and the last to finish, with a
dozen calls of a tenth of a millisecond each.

Always true here:
- nothing here fails an epoch: unknown times are None.
"""

from __future__ import annotations

from typing import Any

from cairn.logs import logger

STAGES_BEFORE_MAX = 4
_BY_COMPLETION = "ct"
"""The name of Spark's index `TaskIndexNames.COMPLETION_TIME`."""


class SparkTasks:
    """The tasks that a Spark context remembers."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._store: Any = None
        self._order: Any = None

    def spread_before_ms(self, stage: int | None, after: int) -> int | None:
        """Return the time between the first and last finish in the stage that feeds this one.

        That is the stage with the next lower number that has tasks: the stage of the pin table,
        in between, has none. Stages up to `after` belong to earlier actions.
        """
        if stage is None:
            return None
        try:
            for before in range(stage - 1, max(after, stage - 1 - STAGES_BEFORE_MAX), -1):
                tasks = self._tasks(before, 2, ascending=True)
                count = tasks.size()
                if count == 1:
                    return 0
                if count:
                    first = _finish_ms(tasks)
                    return _finish_ms(self._tasks(before, 1, ascending=False)) - first
        except Exception as error:
            logger.debug("no finish times of the tasks before stage %d: %s", stage, error)
        return None

    def _tasks(self, stage: int, count: int, *, ascending: bool) -> Any:
        """Return the first or last tasks of a stage to finish."""
        if self._store is None:
            self._store = self._context._jsc.sc().statusStore()
            self._order = self._context._jvm.scala.Option.apply(_BY_COMPLETION)
        return self._store.taskList(stage, 0, 0, count, self._order, ascending, None)


def _finish_ms(tasks: Any) -> int:
    """Return the finish time of the first task. Raises if Spark does not have it yet."""
    task = tasks.head()
    return int(task.launchTime().getTime()) + int(task.duration().get())
