"""Whether Spark aggregates ahead for an operator: chosen from what the last epoch was like.

Aggregating ahead costs Spark a second shuffle. It pays where it leaves few rows: by few
groups, or because one subtask would get most of the rows, all of one key.

Always true here:
- the choice changes no result, only where the work is done;
- it is the same in all attempts at an epoch;
- the busiest subtask decides: an epoch takes as long as it does.
"""

from __future__ import annotations

from collections.abc import Sequence

from cairn.protocol.messages import Ack

GROUP_BELOW = 0.4
"""Of the rows of the busiest subtask, what aggregating ahead must leave to be chosen."""
UNGROUP_ABOVE = 0.55
ROWS_MIN = 1000
"""Fewer in an epoch tell nothing."""


class PartialChoice:
    """Learns from every attempt that succeeds, for the epochs to come."""

    def __init__(self) -> None:
        self._learned: frozenset[str] = frozenset()
        self._epoch = -1
        self._chosen: frozenset[str] = frozenset()

    def chosen(self, epoch: int) -> frozenset[str]:
        """The operators that Spark aggregates ahead for."""
        if epoch != self._epoch:
            self._epoch, self._chosen = epoch, self._learned
        return self._chosen

    def learn(self, acks: Sequence[Ack]) -> None:
        measured: dict[str, list[tuple[int, int]]] = {}
        for ack in acks:
            for operator in ack.operators:
                if operator.groups:
                    subtasks = measured.setdefault(operator.uid, [])
                    subtasks.append((operator.rows_in, operator.groups))
        for uid, counts in measured.items():
            rows = max(rows for rows, _ in counts)
            groups = max(groups for _, groups in counts)
            if sum(rows for rows, _ in counts) < ROWS_MIN:
                continue
            if groups < GROUP_BELOW * rows:
                self._learned |= {uid}
            elif groups > UNGROUP_ABOVE * rows:
                self._learned -= {uid}
