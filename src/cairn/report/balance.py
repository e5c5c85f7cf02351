"""The answer to a rebalance: how loads of subtasks compare, and what limits them."""

from __future__ import annotations

import msgspec


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """Loads of subtasks, as multiples of their mean, before and after a change of ranges."""

    parallelism: int
    busiest_before: float | None
    """The load of the busiest subtask with the present ranges; None: too few rows were measured."""
    busiest_after: float | None
    groups_moved: int
    """Key groups that get another subtask; 0: the ranges stay as they are."""
    limit: str | None = None
    """The key group that no range can be lighter than; None: none stands out."""

    def text(self) -> str:
        """Return the answer in a sentence or two."""
        if self.busiest_before is None or self.busiest_after is None:
            return "the ranges stay: too few rows were measured so far"
        if self.groups_moved:
            found = (
                f"{self.groups_moved} key groups move: the busiest subtask goes from "
                f"{self.busiest_before:.2f} to {self.busiest_after:.2f} times the mean"
            )
        else:
            found = (
                f"the ranges stay: the busiest subtask has {self.busiest_before:.2f} times the "
                f"mean, other ranges would give {self.busiest_after:.2f}"
            )
        return found if self.limit is None else f"{found}; {self.limit}"
