"""When Spark's own tasks finished: those that read the sources and map their rows.

Slots tell when subtasks are done. What runs before the first slot is Spark's alone, and its
status store (what its UI shows) knows of every task. It is asked for two tasks of one stage, the
first and the last to finish, in a dozen calls of a tenth of a millisecond each.

Always true here:
- nothing here fails an epoch: what cannot be had is None.
"""

from __future__ import annotations

from typing import Any

from cairn.logs import logger

STAGES_BEFORE_MAX = 4
_BY_COMPLETION = "ct"
"""The name of an index of Spark's, `TaskIndexNames.COMPLETION_TIME`."""


class SparkTasks:
    """The tasks of a Spark context, as far as it remembers them."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._store: Any = None
        self._order: Any = None

    def spread_before_ms(self, stage: int | None, after: int) -> int | None:
        """From the first to the last task to finish, in the stage that feeds this one.

        Of the stages that ran: the one numbered next below. That of the pin table comes between,
        has nothing to do and no tasks. Stages up to `after` are of earlier actions.
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
                    first = _finished_ms(tasks)
                    return _finished_ms(self._tasks(before, 1, ascending=False)) - first
        except Exception as error:
            logger.debug("no finish times of the tasks before stage %d: %s", stage, error)
        return None

    def _tasks(self, stage: int, count: int, *, ascending: bool) -> Any:
        """The first tasks of a stage to finish, or the last."""
        if self._store is None:
            self._store = self._context._jsc.sc().statusStore()
            self._order = self._context._jvm.scala.Option.apply(_BY_COMPLETION)
        return self._store.taskList(stage, 0, 0, count, self._order, ascending, None)


def _finished_ms(tasks: Any) -> int:
    """When the first of these was done. Raises where Spark has not seen that yet."""
    task = tasks.head()
    return int(task.launchTime().getTime()) + int(task.duration().get())
