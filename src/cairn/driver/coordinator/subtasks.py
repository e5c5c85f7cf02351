"""The subtasks of later epochs: the slot and the key groups of each.

Always true here:
- they change between two epochs, never within one;
- after a rescale slots keep as much state as possible;
- ranges follow the load where it was measured and equal ones would be clearly worse.
"""

from __future__ import annotations

from cairn.driver.coordinator.load import Load, starts_of
from cairn.key_groups import Starts
from cairn.protocol.slots import CHANGES_MAX, slots_after
from cairn.protocol.spec import JobSpec
from cairn.report.balance import Balance
from cairn.storage.manifest import Epoch


class Subtasks:
    """Slots and ranges of key groups, by subtask."""

    slots: list[int]
    """The slot of each subtask."""
    starts: Starts = ()
    """The first key group of each subtask; empty: equal ranges."""
    rescaled_from: tuple[int, ...] = ()
    """Earlier parallelisms of the run, oldest first."""

    def __init__(self, parallelism: int, group_count: int, limits: range | None = None) -> None:
        """With `limits`, those of autoscaling, a new leader keeps an epoch's parallelism."""
        self.slots = list(range(parallelism))
        self.load = Load(group_count)
        self._group_count = group_count
        self._limits = limits

    @property
    def parallelism(self) -> int:
        return len(self.slots)

    def continue_from(self, newest: Epoch, spec: JobSpec) -> None:
        """Continue with the ranges of an epoch, or cut them for another parallelism."""
        self.load.note(newest, spec)
        if self._limits is not None:
            # Autoscaling has found this parallelism.
            least, most = self._limits[0], self._limits[-1]
            found = max((each.parallelism for each in newest.operators.values()), default=least)
            self.slots = list(range(min(max(found, least), most)))
        held = starts_of(newest, self.parallelism, self._group_count)
        self.starts = self.load.ranges_for(self.parallelism)[0] if held is None else held

    def rescale(self, parallelism: int) -> None:
        """Change the parallelism, and cut the ranges for it."""
        if parallelism == self.parallelism:
            return
        slots = self.slots_for(parallelism)
        self.rescaled_from = self._changes()
        self.slots = slots
        self.starts, _ = self.load.ranges_for(parallelism)

    def compare_ranges(self) -> Balance:
        """Return what a rebalance would change."""
        return self.load.ranges_for(self.parallelism, self.starts)[1]

    def rebalance(self) -> Balance:
        """Cut the ranges by load; they stay if that would gain little."""
        self.starts, balance = self.load.ranges_for(self.parallelism, self.starts)
        return balance

    def slots_for(self, parallelism: int) -> list[int]:
        """Return the slots that a parallelism would run on."""
        if parallelism == self.parallelism:
            return list(self.slots)
        return list(slots_after((*self._changes(), parallelism), self._group_count))

    def _changes(self) -> tuple[int, ...]:
        """Return the parallelisms before the next change; none if there are too many."""
        changes = (*self.rescaled_from, self.parallelism)
        return changes if len(changes) <= CHANGES_MAX else ()


__all__ = ["Subtasks"]
