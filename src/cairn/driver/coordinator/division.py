"""The division of the newest epoch's state among the subtasks of the next batch.

Always true here:
- it depends only on the epoch, the states of the program and the parallelism;
- a merge reads the parent's files of that very range.
"""

from __future__ import annotations

from collections.abc import Mapping

from cairn.driver.coordinator.compaction import due
from cairn.driver.coordinator.ranges import lists_for, pieces_of, ranges_for, shared_range
from cairn.protocol.messages import Compaction, Piece
from cairn.protocol.scoped_state import ScopedState
from cairn.storage.manifest import EMPTY_VERSION, Epoch, EpochOperator, RangeState


class Division:
    """The ranges of each state, and the parts of a begin message that follow from them."""

    def __init__(
        self,
        newest: Epoch | None,
        states: Mapping[str, ScopedState],
        parallelism: int,
        group_count: int,
    ) -> None:
        self._newest = newest
        self._states = states
        self._parallelism = parallelism
        self._group_count = group_count
        self.ranges = {uid: self._divide(state) for uid, state in states.items()}

    def _divide(self, state: ScopedState) -> list[RangeState]:
        held, count = self._find(state.uid), self._group_count
        if state.scope == "shared":
            return [shared_range(held, count)]
        if state.scope == "subtask":
            return lists_for(held, self._parallelism, count, state.redistribution)
        return ranges_for(held, self._parallelism, count)

    def _find(self, uid: str) -> EpochOperator | None:
        """Return the state as the epoch holds it."""
        held = None if self._newest is None else self._newest.operators.get(uid)
        # Under another scope it is empty: otherwise the program would have been refused.
        return held if held is not None and held.scope == self._states[uid].scope else None

    def versions(self) -> dict[str, list[str]]:
        """Return the version that each subtask starts from; shared state has one for all."""
        found = {}
        for uid, ranges in self.ranges.items():
            is_shared = self._states[uid].scope == "shared"
            versions = [each.version for each in ranges]
            found[uid] = versions * self._parallelism if is_shared else versions
        return found

    def find_redistributed(self) -> set[str]:
        """Return the uids of lists that change owners: each subtask writes its share."""
        return {
            uid
            for uid, ranges in self.ranges.items()
            if self._states[uid].scope == "subtask"
            and (held := self._find(uid)) is not None
            and len(held.ranges) != len(ranges)
            and any(each.version != EMPTY_VERSION for each in ranges)
        }

    def pieces(self) -> dict[str, list[list[Piece]]]:
        """Return the pieces that ranges are made of, for states whose ranges have changed."""
        found = {}
        for uid, ranges in self.ranges.items():
            held = self._find(uid)
            if held is None or held.scope != "keyed":
                continue
            if len(held.ranges) != len(ranges):
                found[uid] = [pieces_of(held, each.groups) for each in ranges]
        return found

    def compactions(self, backend: str) -> dict[str, dict[int, Compaction]]:
        """Return the compactions that are due, per state and subtask."""
        return {
            uid: {
                subtask: compaction
                for subtask, each in enumerate(ranges)
                if (compaction := self._due(uid, each, backend)) is not None
            }
            for uid, ranges in self.ranges.items()
        }

    def _due(self, uid: str, wanted: RangeState, backend: str) -> Compaction | None:
        is_keyed = self._states[uid].scope == "keyed"
        compaction = due(wanted.files, backend if is_keyed else "heap")
        if compaction is None or compaction.kind == "base":
            return compaction
        held = self._find(uid)
        # Right after a change of parallelism the parent has other ranges: merged an epoch later.
        ranges = [] if held is None else [(r.first_group, r.group_count) for r in held.ranges]
        return compaction if (wanted.first_group, wanted.group_count) in ranges else None
