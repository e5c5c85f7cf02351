"""How the state of the newest epoch is divided among the subtasks of the next batch.

Always true here:
- it follows from the epoch, the entries of the program and the parallelism alone;
- a merge reads the parent's files of that very range.
"""

from __future__ import annotations

from collections.abc import Mapping

from cairn.driver.coordinator.compaction import due
from cairn.driver.coordinator.ranges import lists_for, pieces_of, ranges_for, shared_range
from cairn.protocol.entry import EntrySpec
from cairn.protocol.messages import Compaction, Piece
from cairn.storage.manifest import EMPTY_VERSION, Epoch, EpochOperator, RangeState


class Division:
    """The ranges of each entry, and what subtasks are told of them."""

    def __init__(
        self,
        newest: Epoch | None,
        entries: Mapping[str, EntrySpec],
        parallelism: int,
        group_count: int,
    ) -> None:
        self._newest = newest
        self._entries = entries
        self._parallelism = parallelism
        self._group_count = group_count
        self.ranges = {uid: self._ranges_of(entry) for uid, entry in entries.items()}

    def _ranges_of(self, entry: EntrySpec) -> list[RangeState]:
        held, count = self._held(entry.uid), self._group_count
        if entry.scope == "shared":
            return [shared_range(held, count)]
        if entry.scope == "subtask":
            return lists_for(held, self._parallelism, count, entry.redistribution)
        return ranges_for(held, self._parallelism, count)

    def _held(self, uid: str) -> EpochOperator | None:
        """What the epoch has of an entry."""
        held = None if self._newest is None else self._newest.operators.get(uid)
        # One of another scope has no state, or the program would not have been let in.
        return held if held is not None and held.scope == self._entries[uid].scope else None

    def versions(self) -> dict[str, list[str]]:
        """Of each subtask; of shared state they all start from one."""
        found = {}
        for uid, parts in self.ranges.items():
            is_shared = self._entries[uid].scope == "shared"
            versions = [part.version for part in parts]
            found[uid] = versions * self._parallelism if is_shared else versions
        return found

    def redistributed(self) -> set[str]:
        """Entries whose lists are handed out anew: each subtask writes its share."""
        return {
            uid
            for uid, parts in self.ranges.items()
            if self._entries[uid].scope == "subtask"
            and (held := self._held(uid)) is not None
            and len(held.ranges) != len(parts)
            and any(part.version != EMPTY_VERSION for part in parts)
        }

    def pieces(self) -> dict[str, list[list[Piece]]]:
        """What is asked of the slots where ranges are not those of the epoch."""
        found = {}
        for uid, parts in self.ranges.items():
            entry = self._held(uid)
            if entry is None or entry.scope != "keyed":
                continue
            if len(entry.ranges) != len(parts):
                found[uid] = [pieces_of(entry, part.groups) for part in parts]
        return found

    def compactions(self, backend: str) -> dict[str, dict[int, Compaction]]:
        """What is due to be written anew, per entry and subtask."""
        return {
            uid: {
                subtask: compaction
                for subtask, part in enumerate(parts)
                if (compaction := self._due(uid, part, backend)) is not None
            }
            for uid, parts in self.ranges.items()
        }

    def _due(self, uid: str, part: RangeState, backend: str) -> Compaction | None:
        is_keyed = self._entries[uid].scope == "keyed"
        compaction = due(part.files, backend if is_keyed else "heap")
        if compaction is None or compaction.kind == "base":
            return compaction
        held = self._held(uid)
        # Right after a change of parallelism the parent has other ranges: merged an epoch later.
        ranges = [] if held is None else [(r.first_group, r.group_count) for r in held.ranges]
        return compaction if (part.first_group, part.group_count) in ranges else None
