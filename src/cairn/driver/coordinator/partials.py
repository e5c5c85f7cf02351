"""Choose the operators that Spark aggregates ahead for, from the measurements of the last epoch.

Aggregating ahead costs Spark a second shuffle. It pays if it leaves few rows: because there are
few keys, or because one subtask would get most of the rows, all of one key.

Always true here:
- the choice does not change results, only the place of the work;
- it is the same in all attempts at an epoch;
- the busiest subtask decides: an epoch takes as long as it does. All tasks share the grouping,
  however the keys are divided, so rows of one key pay for it sooner than rows of many keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from cairn.protocol.messages import Ack

GROUPING_COST = 0.6
"""Cost of grouping a row in Spark, in units of a row that reaches its subtask."""
UNGROUPING_COST = 0.45
"""The same, for groups that are made already: a choice that barely pays is kept."""
ROWS_MIN = 1000
"""An epoch with fewer rows changes no choice."""


class PartialChoice:
    """The choice per operator. Every successful attempt may change it for later epochs."""

    def __init__(self) -> None:
        self._learned: frozenset[str] = frozenset()
        self._epoch = -1
        self._chosen: frozenset[str] = frozenset()

    def choose(self, epoch: int) -> frozenset[str]:
        """Return the operators that Spark aggregates ahead for in an epoch."""
        if epoch != self._epoch:
            self._epoch, self._chosen = epoch, self._learned
        return self._chosen

    def learn(self, acks: Sequence[Ack]) -> None:
        """Update the choice from the counts of an attempt."""
        measured: dict[str, list[tuple[int, int]]] = {}
        for ack in acks:
            for operator in ack.operators:
                subtasks = measured.setdefault(operator.uid, [])
                subtasks.append((operator.rows_in, operator.partial_count))
        for uid, counts in measured.items():
            total = sum(rows for rows, _ in counts)
            partials = max(partials for _, partials in counts)
            if total < ROWS_MIN or not partials:
                continue
            saved, grouped = max(rows for rows, _ in counts) - partials, total / len(counts)
            if saved > GROUPING_COST * grouped:
                self._learned |= {uid}
            elif saved < UNGROUPING_COST * grouped:
                self._learned -= {uid}
