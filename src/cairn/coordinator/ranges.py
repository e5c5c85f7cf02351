"""Who owns which state: an operator's key-group ranges, from epoch to epoch.

Always true here:
- ranges of an operator are disjoint and cover every key group;
- a file listed for a range counts only for the key groups it is listed with, so after a
  change of parallelism old files are shared between ranges and nothing is rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cairn.errors import EpochError
from cairn.ids import digest
from cairn.plan.keygroups import groups_of
from cairn.slot.protocol import OperatorAck, Stored
from cairn.storage.manifest import (
    EMPTY_VERSION,
    FileRef,
    OperatorEntry,
    RangeState,
    next_version,
)
from cairn.storage.pack import Slice


def ranges_for(entry: OperatorEntry | None, parallelism: int, group_count: int) -> list[RangeState]:
    """The state each subtask starts from: the parent's, cut to the ranges it owns now."""
    wanted = [groups_of(subtask, parallelism, group_count) for subtask in range(parallelism)]
    held = [] if entry is None else entry.ranges
    if [range(r.first_group, r.first_group + r.group_count) for r in held] == wanted:
        return list(held)
    return [_cut(held, groups) for groups in wanted]


def _cut(held: list[RangeState], groups: range) -> RangeState:
    files: list[FileRef] = []
    versions: list[str] = []
    keys = size = 0
    for part in held:
        owned = _overlap(part, groups)
        if not owned:
            continue
        if part.version != EMPTY_VERSION:
            versions.append(f"{owned.start}-{owned.stop}:{part.version}")
        keys += part.state_keys * len(owned) // part.group_count
        size += part.state_bytes * len(owned) // part.group_count
        for ref in part.files:
            clipped = _overlap(ref, owned)
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
        state_bytes=size,
    )


def _overlap(part: RangeState | FileRef, groups: range) -> range:
    return range(
        max(part.first_group, groups.start),
        min(part.first_group + part.group_count, groups.stop),
    )


def advance(
    part: RangeState, ack: OperatorAck, parent: int | None, epoch: int, slices: Mapping[str, Slice]
) -> RangeState:
    """A range after an epoch: compacted files in place of old ones, then the delta."""
    files = list(part.files)
    if ack.compacted is not None:
        compaction = ack.compacted.compaction
        replaced = files[-compaction.count :]
        if len(replaced) != compaction.count:
            raise EpochError(f"operator {ack.uid!r} compacted {compaction.count} of {len(files)}")
        files[-compaction.count :] = [
            _ref(
                ack.compacted.stored,
                part,
                slices,
                kind="base" if compaction.kind == "base" else "delta",
                tier=compaction.tier,
                first_epoch=replaced[0].first_epoch,
                last_epoch=parent or 0,
            )
        ]
    version = part.version
    if ack.delta is not None:
        files.append(
            _ref(ack.delta, part, slices, kind="delta", tier=0, first_epoch=epoch, last_epoch=epoch)
        )
        version = next_version(version, ack.delta.id)
    bases = [ref for ref in files if ref.kind == "base"] or files
    row_bytes = sum(r.length for r in bases) / max(1, sum(r.rows for r in bases))
    return RangeState(
        first_group=part.first_group,
        group_count=part.group_count,
        version=version,
        files=files,
        state_keys=ack.state_keys,
        state_bytes=int(row_bytes * ack.state_keys),
    )


def _ref(
    stored: Stored,
    part: RangeState,
    slices: Mapping[str, Slice],
    *,
    kind: str,
    tier: int,
    first_epoch: int,
    last_epoch: int,
) -> FileRef:
    at = slices[stored.id] if stored.path is None else Slice(stored.path, 0, stored.length)
    return FileRef(
        id=stored.id,
        path=at.path,
        offset=at.offset,
        length=at.length,
        kind="base" if kind == "base" else "delta",
        tier=tier,
        rows=stored.rows,
        first_epoch=first_epoch,
        last_epoch=last_epoch,
        first_group=part.first_group,
        group_count=part.group_count,
        format=stored.format,
        objects=list(stored.objects),
        objects_bytes=stored.objects_bytes,
    )
