"""The division of the newest epoch's state among the subtasks of the next batch.

Always true here:
- it depends only on the epoch, the states of the program, the parallelism and the ranges;
- an operator with a parallelism of its own has equal ranges in its first subtasks, and the other
  subtasks own nothing of it;
- a merge reads the parent's files of that very range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cairn.driver.coordinator.compaction import Rules
from cairn.driver.coordinator.ranges import lists_for, pieces_of, ranges_for, shared_range
from cairn.key_groups import Starts, groups_of, starts_within
from cairn.protocol.messages import Compaction, Part, Piece
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
        starts: Starts = (),
    ) -> None:
        self._newest = newest
        self._states = states
        self._parallelism = parallelism
        self._group_count = group_count
        self._starts = starts
        self._held: dict[str, set[tuple[int, int]]] = {}
        """The ranges of states in the epoch, first group and count, as far as they were needed."""
        self.ranges = {uid: self._divide(state) for uid, state in states.items()}

    def _divide(self, state: ScopedState) -> list[RangeState]:
        held, count = self._find(state.uid), self._group_count
        if state.scope == "shared":
            return [shared_range(held, count)]
        if state.scope == "subtask":
            return lists_for(held, self._parallelism, count, state)
        starts = starts_within(state.parallelism, self._parallelism, count, self._starts)
        return ranges_for(held, self._parallelism, count, starts)

    def _find(self, uid: str) -> EpochOperator | None:
        """Return the state as the epoch holds it."""
        held = None if self._newest is None else self._newest.operators.get(uid)
        # Under another scope it is empty: otherwise the program would have been refused.
        return held if held is not None and held.scope == self._states[uid].scope else None

    def parts(
        self, settled: Mapping[int, list[str]], slots: Sequence[int], backend: str | None
    ) -> dict[int, Part]:
        """Return the part of each subtask in a begin message; without `backend` no compactions.

        `settled` has ids of files per slot.
        """
        versions = self.versions()
        compactions = {} if backend is None else self.compactions(backend)
        pieces = self.pieces()
        due: dict[int, dict[str, Compaction]] = {}
        for uid, found in compactions.items():
            for subtask, compaction in found.items():
                due.setdefault(subtask, {})[uid] = compaction
        rows = zip(*versions.values(), strict=True) if versions else ((),) * self._parallelism
        return {
            subtask: Part(
                dict(zip(versions, row, strict=True)),
                due.get(subtask, {}),
                {uid: each[subtask] for uid, each in pieces.items()},
                settled.get(slots[subtask], []),
                self._groups_of(subtask),
            )
            for subtask, row in enumerate(rows)
        }

    def _groups_of(self, subtask: int) -> tuple[int, int] | None:
        if not self._starts:
            return None
        groups = groups_of(subtask, self._parallelism, self._group_count, self._starts)
        return groups.start, len(groups)

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
            and [each.version for each in held.ranges] != [each.version for each in ranges]
            and any(each.version != EMPTY_VERSION for each in ranges)
        }

    def pieces(self) -> dict[str, list[list[Piece]]]:
        """Return the pieces that ranges are made of, for states whose ranges have changed."""
        found = {}
        for uid, ranges in self.ranges.items():
            held = self._find(uid)
            if held is None or held.scope != "keyed":
                continue
            if [each.groups for each in held.ranges] != [each.groups for each in ranges]:
                found[uid] = [pieces_of(held, each.groups) for each in ranges]
        return found

    def compactions(self, backend: str) -> dict[str, dict[int, Compaction]]:
        """Return the compactions that are due, per state and subtask."""
        keyed, others = Rules(backend), Rules("heap")
        found = {}
        for uid, ranges in self.ranges.items():
            rules = keyed if self._states[uid].scope == "keyed" else others
            found[uid] = {
                subtask: compaction
                for subtask, each in enumerate(ranges)
                if (compaction := self._due(uid, each, rules)) is not None
            }
        return found

    def _due(self, uid: str, wanted: RangeState, rules: Rules) -> Compaction | None:
        compaction = rules.due(wanted.files)
        if compaction is None or compaction.kind == "base":
            return compaction
        # Right after a change of ranges the parent has other ranges: merged an epoch later.
        is_held = (wanted.first_group, wanted.group_count) in self._find_ranges(uid)
        return compaction if is_held else None

    def _find_ranges(self, uid: str) -> set[tuple[int, int]]:
        if uid not in self._held:
            held = self._find(uid)
            ranges = [] if held is None else held.ranges
            self._held[uid] = {(each.first_group, each.group_count) for each in ranges}
        return self._held[uid]
