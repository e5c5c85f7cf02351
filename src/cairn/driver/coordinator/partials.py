"""Choose the operators that Spark aggregates ahead for, from the measurements of the last epoch.

Aggregating ahead costs Spark a second shuffle. It pays if it leaves few rows: because there are
few keys, or because one subtask would get most of the rows, all of one key.

Always true here:
- the choice does not change results, only the place of the work;
- it is the same in all attempts at an epoch;
- the busiest subtask decides: an epoch takes as long as it does.
"""

from __future__ import annotations

from collections.abc import Sequence

from cairn.protocol.messages import Ack

GROUP_BELOW = 0.4
"""Aggregate ahead if that leaves less than this share of the busiest subtask's rows."""
UNGROUP_ABOVE = 0.55
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
                if operator.partial_count:
                    subtasks = measured.setdefault(operator.uid, [])
                    subtasks.append((operator.rows_in, operator.partial_count))
        for uid, counts in measured.items():
            rows = max(rows for rows, _ in counts)
            partials = max(partials for _, partials in counts)
            if sum(rows for rows, _ in counts) < ROWS_MIN:
                continue
            if partials < GROUP_BELOW * rows:
                self._learned |= {uid}
            elif partials > UNGROUP_ABOVE * rows:
                self._learned -= {uid}
