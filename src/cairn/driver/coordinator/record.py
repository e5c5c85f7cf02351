"""What the manifest of an epoch says of its parts, made of what the subtasks have acknowledged.

Always true here:
- of an entry that all subtasks hold alike, the word of the first counts;
- of what loops send back there is only what the last round has sent;
- state whose form changes is written anew by every subtask that has some, or the epoch fails.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cairn.driver.coordinator.ranges import advance, replaced, take_in
from cairn.errors import EpochError
from cairn.protocol.messages import Ack, Begin, Compacted, Stored
from cairn.storage.manifest import EMPTY_VERSION, Held, RangeState
from cairn.storage.pack import Slice, write_pack
from cairn.storage.store import Store

Ranges = Mapping[str, Sequence[RangeState]]


def packed(
    store: Store, acks: Sequence[Ack], compacted: Sequence[Compacted], term: int
) -> dict[str, Slice]:
    """Store what travelled with acknowledgements and reports."""
    deltas = [operator.delta for ack in acks for operator in ack.operators]
    small: dict[str, Stored] = {
        stored.id: stored
        for stored in (*deltas, *(file.stored for file in compacted))
        if stored is not None and stored.data is not None
    }
    data = [small[name].data for name in sorted(small)]
    slices = write_pack(store, [d for d in data if d is not None], term)
    return dict(zip(sorted(small), slices, strict=True))


def taken_in(
    begin: Begin, ranges: Ranges, compacted: Sequence[Compacted], slices: Mapping[str, Slice]
) -> dict[str, list[RangeState]]:
    """The ranges with what was written in the background; what no longer fits is left out."""
    found = {uid: list(parts) for uid, parts in ranges.items()}
    rewritten: dict[str, set[int]] = {uid: set() for uid in begin.rewrite}
    for file in compacted:
        for subtask, part in enumerate(found.get(file.uid, ())):
            changed = take_in(part, file, slices)
            if changed is not None:
                found[file.uid][subtask] = changed
                if file.kind == "base" and file.as_of == begin.parent:
                    rewritten.get(file.uid, set()).add(subtask)
    for uid, subtasks in rewritten.items():
        # Files in the form before must not be left behind: nothing could read them later.
        held = {at for at, part in enumerate(ranges[uid]) if part.version != EMPTY_VERSION}
        if held - subtasks:
            raise EpochError(
                f"operator {uid!r}: subtasks {sorted(held - subtasks)} did not write their "
                "state anew; the epoch runs again"
            )
    return found


def advanced_ranges(
    ranges: Ranges,
    rounds: Sequence[Sequence[Ack]],
    epoch: int,
    slices: Mapping[str, Slice],
    held: Mapping[tuple[str, int], Held],
    feedbacks: Collection[str],
) -> dict[str, list[RangeState]]:
    """The ranges after the epoch, of what each of its rounds has acknowledged."""
    found = {
        (uid, subtask): part for uid, parts in ranges.items() for subtask, part in enumerate(parts)
    }
    for acks in rounds:
        for ack in acks:
            for op in ack.operators:
                at = op.uid, ack.subtask
                if at not in found:
                    continue  # Of what all subtasks hold alike, the first one's word counts.
                if op.uid not in feedbacks:
                    found[at] = advance(found[at], op, epoch, slices, held.get(at))
    for ack in rounds[-1]:
        # What rounds before have sent back has been processed.
        for op in ack.operators:
            if op.uid in feedbacks:
                at = op.uid, ack.subtask
                found[at] = replaced(found[at], op, epoch, slices)
    return {uid: [found[uid, at] for at in range(len(parts))] for uid, parts in ranges.items()}


def committables_of(acks: Sequence[Ack], sinks: Collection[str]) -> dict[str, list[Any]]:
    """What each sink has prepared, in the order of acknowledgements."""
    found: dict[str, list[Any]] = {uid: [] for uid in sinks}
    for ack in acks:
        for uid, committable in ack.committables.items():
            found[uid].append(committable)
    return found
