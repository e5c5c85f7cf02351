"""When Spark's own tasks finished: those that read the sources and map their rows.

Slots tell when subtasks are done. What runs before the first slot is Spark's alone, and its
status store (what its UI shows) knows of every task. It is asked for two tasks of one stage, the
first and the last to finish, which takes one to two milliseconds.

Always true here:
- nothing here fails an epoch: what cannot be had is None.
"""

from __future__ import annotations

import logging
from typing import Any

_logger = logging.getLogger("cairn")

STAGES_BEFORE_MAX = 4
_BY_COMPLETION = "ct"
"""The name of an index of Spark's, `TaskIndexNames.COMPLETION_TIME`."""


class SparkTasks:
    """The tasks of a Spark context, as far as it remembers them."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._store: Any = None
        self._order: Any = None

    def spread_before_ms(self, stage: int | None, since_ms: int) -> int | None:
        """From the first to the last task to finish, in the stage that feeds this one.

        Of the stages that ran: the one numbered next below. That of the pin table comes between,
        has nothing to do and no tasks. `since_ms` is when the action began.
        """
        if stage is None:
            return None
        try:
            for before in range(stage - 1, max(-1, stage - 1 - STAGES_BEFORE_MAX), -1):
                first = self._finished(before, since_ms, ascending=True)
                if first is not None:
                    last = self._finished(before, since_ms, ascending=False)
                    return None if last is None else last - first
        except Exception as error:
            _logger.debug("no finish times of the tasks before stage %d: %s", stage, error)
        return None

    def _finished(self, stage: int, since_ms: int, *, ascending: bool) -> int | None:
        """When the first or the last task of a stage was done."""
        if self._store is None:
            self._store = self._context._jsc.sc().statusStore()
            self._order = self._context._jvm.scala.Option.apply(_BY_COMPLETION)
        tasks = self._store.taskList(stage, 0, 0, 1, self._order, ascending, None)
        if tasks.isEmpty():
            return None
        task = tasks.head()
        launched_ms: int = task.launchTime().getTime()
        duration = task.duration()
        if launched_ms < since_ms or duration.isEmpty():
            return None
        return launched_ms + int(duration.get())
