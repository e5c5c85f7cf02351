"""The key-group ranges of an operator, from epoch to epoch.

Always true here:
- ranges of an operator are disjoint and cover every key group;
- a file listed for a range counts only for the key groups it is listed with, so after a
  change of parallelism old files are shared between ranges and nothing is rewritten;
- a delta holds final values: one that begins before the base it is applied to does no harm, so
  a base may replace the files up to its epoch even if some were merged meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cairn.ids import digest
from cairn.key_groups import Starts, count_owners, groups_of, overlap
from cairn.protocol.messages import Compacted, OperatorAck, Piece
from cairn.protocol.scoped_state import ScopedState
from cairn.storage.manifest import (
    EMPTY_VERSION,
    EpochOperator,
    FileRef,
    Held,
    RangeState,
    next_version,
)


def ranges_for(
    stored: EpochOperator | None, parallelism: int, group_count: int, starts: Starts = ()
) -> list[RangeState]:
    """Return the state each subtask starts from: the parent's, cut to the ranges it owns now."""
    wanted = [groups_of(each, parallelism, group_count, starts) for each in range(parallelism)]
    held = [] if stored is None else stored.ranges
    if [each.groups for each in held] == wanted:
        return list(held)
    return [_cut(held, groups) for groups in wanted]


def lists_for(
    stored: EpochOperator | None, parallelism: int, group_count: int, state: ScopedState
) -> list[RangeState]:
    """Return the lists each subtask starts from: its own, or its share after a rescale.

    No file holds a share yet: the subtask reads all lists, and writes its share as a base. The
    key groups of lists only number the subtasks: their ranges are equal, whatever the load.
    Lists that are split go to the subtasks that get rows.
    """
    held = [] if stored is None else stored.ranges
    versions = [each.version for each in held]
    owners = count_owners(state.parallelism, parallelism)
    before = 0 if stored is None else stored.owners
    if before:
        # Lists that are split stay where they are if more subtasks get rows than before.
        is_other = owners < before or (owners > before and state.is_united)
    else:
        # Rows of a broadcast, and lists that are united, put items there again and again.
        may_be_idle = not state.has_broadcast and not state.is_united
        is_other = may_be_idle and any(each != EMPTY_VERSION for each in versions[owners:])
    is_kept = len(held) == parallelism and not is_other
    if is_kept or not any(version != EMPTY_VERSION for version in versions):
        return ranges_for(stored, parallelism, group_count)
    number = f"{parallelism}" if owners == parallelism else f"{owners} of {parallelism}"

    def version_of(subtask: int) -> str:
        if subtask >= owners and not state.is_united:
            return EMPTY_VERSION
        place = f"{subtask}/{number}:{state.redistribution}"
        return digest(*map(str.encode, [place, *versions]))

    return [
        RangeState(
            first_group=groups.start,
            group_count=len(groups),
            version=version_of(subtask),
            files=[],
            state_keys=0,
            state_entries=0,
            state_bytes=0,
        )
        for subtask in range(parallelism)
        if (groups := groups_of(subtask, parallelism, group_count))
    ]


def owners_of(state: ScopedState, parallelism: int) -> int:
    """Return the number of subtasks that get rows, for lists; 0 for state that has keys."""
    return count_owners(state.parallelism, parallelism) if state.scope == "subtask" else 0


def shared_range(stored: EpochOperator | None, group_count: int) -> RangeState:
    """Return the one range of state that all subtasks share."""
    (one,) = ranges_for(stored, 1, group_count)
    return one


def pieces_of(stored: EpochOperator | None, groups: range) -> list[Piece]:
    """Return the pieces of the parent's ranges that these key groups come from."""
    return [
        Piece(owned.start, len(owned), each.version)
        for each in ([] if stored is None else stored.ranges)
        if each.version != EMPTY_VERSION and (owned := overlap(each.groups, groups))
    ]


def _cut(held: list[RangeState], groups: range) -> RangeState:
    files: list[FileRef] = []
    versions: list[str] = []
    keys: int | None = 0
    entries = size = 0
    for each in held:
        owned = overlap(each.groups, groups)
        if not owned:
            continue
        if each.version != EMPTY_VERSION:
            versions.append(f"{owned.start}-{owned.stop}:{each.version}")
        if keys is not None:
            count = each.state_keys
            keys = None if count is None else keys + count * len(owned) // each.group_count
        entries += each.state_entries * len(owned) // each.group_count
        size += each.state_bytes * len(owned) // each.group_count
        for ref in each.files:
            clipped = overlap(ref.groups, owned)
            if clipped:
                files.append(
                    msgspec.structs.replace(
                        ref, first_group=clipped.start, group_count=len(clipped)
                    )
                )
    version = digest(*map(str.encode, versions)) if versions else EMPTY_VERSION
    return RangeState(
        first_group=groups.start,
        group_count=len(groups),
        version=version,
        files=files,
        state_keys=keys,
        state_entries=entries,
        state_bytes=size,
    )


def apply_compaction(before: RangeState, compacted: Compacted) -> RangeState | None:
    """Replace files of a range by one that was written in the background.

    Return None if it no longer fits, because the range or its files have changed.
    """
    if (before.first_group, before.group_count) != (compacted.first_group, compacted.group_count):
        return None
    files = before.files
    ids = [ref.id for ref in files]
    if compacted.stored.id in ids:
        return None
    if compacted.kind == "base":
        if any(ref.kind == "base" and ref.last_epoch > compacted.as_of for ref in files):
            return None
        replaced = [ref for ref in files if ref.last_epoch <= compacted.as_of]
        at = 0
    else:
        count = len(compacted.replaced)
        # By key groups too: after ranges were joined, a file is listed for several pieces.
        listed = [ref.listing for ref in files]
        starts = [i for i in range(len(ids)) if tuple(listed[i : i + count]) == compacted.replaced]
        if not starts:
            return None
        # They were the last files of the range when they were merged.
        at = starts[-1]
        replaced = files[at : at + count]
    ref = compacted.stored.list_for(
        before.groups,
        tier=compacted.tier,
        first_epoch=min((ref.first_epoch for ref in replaced), default=compacted.as_of),
        last_epoch=compacted.as_of
        if compacted.kind == "base"
        else max(ref.last_epoch for ref in replaced),
    )
    kept = [other for other in files if not any(other is gone for gone in replaced)]
    return msgspec.structs.replace(before, files=[*kept[:at], ref, *kept[at:]])


def advance(
    before: RangeState,
    ack: OperatorAck,
    epoch: int,
    held: Held | None = None,
) -> RangeState:
    """Return a range after a batch, with its delta last. `held` is the slot's count, if it has one.

    A slot counts all ranges that it owns, or none.
    """
    keys, entries = (before.state_keys, before.state_entries) if held is None else held
    files = list(before.files)
    version = before.version
    if ack.delta is not None:
        files.append(ack.delta.list_for(before.groups, first_epoch=epoch, last_epoch=epoch))
        version = next_version(version, ack.delta.id)
    return RangeState(
        first_group=before.first_group,
        group_count=before.group_count,
        version=version,
        files=files,
        state_keys=keys,
        state_entries=entries,
        state_bytes=_state_bytes(files, entries),
    )


def replace_state(before: RangeState, ack: OperatorAck, epoch: int) -> RangeState:
    """Return a range whose whole state the batch has written, or emptied."""
    stored = ack.delta
    files = []
    if stored is not None:
        files = [stored.list_for(before.groups, first_epoch=epoch, last_epoch=epoch)]
    return RangeState(
        first_group=before.first_group,
        group_count=before.group_count,
        version=EMPTY_VERSION if stored is None else stored.id,
        files=files,
        state_keys=0,
        state_entries=0 if stored is None else stored.rows,
        state_bytes=sum(ref.size for ref in files),
    )


def _state_bytes(files: Sequence[FileRef], entries: int) -> int:
    """Estimate the state's size as a file, from the bytes per row of base or deltas."""
    measured = [ref for ref in files if ref.kind == "base"] or files
    size = rows = 0
    for ref in measured:
        size += ref.length + ref.objects_bytes
        rows += ref.rows
    return int(size / max(1, rows) * entries)
