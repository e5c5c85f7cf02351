"""What the manifest of an epoch says of its parts, made of what the subtasks have acknowledged.

Always true here:
- of an entry that all subtasks hold alike, the word of the first counts;
- of what loops send back there is only what the last round has sent;
- state whose form changes is written anew by every subtask that has some, or the epoch fails.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from cairn.driver.coordinator.ranges import advance, replaced, take_in
from cairn.driver.coordinator.rounds import Outcome
from cairn.errors import EpochError
from cairn.protocol.messages import Ack, Begin, Compacted
from cairn.storage.files import StateFile
from cairn.storage.manifest import EMPTY_VERSION, Held, RangeState
from cairn.storage.pack import write_pack
from cairn.storage.store import Store

Ranges = Mapping[str, Sequence[RangeState]]


def pack_small_files(
    store: Store, rounds: Sequence[Outcome], compacted: Sequence[Compacted], term: int
) -> tuple[list[Outcome], list[Compacted]]:
    """Store the files that came inline, as one pack; return both arguments with their places."""
    deltas = [op.delta for outcome in rounds for ack in outcome.acks for op in ack.operators]
    small = {
        file.id: file
        for file in (*deltas, *(done.stored for done in compacted))
        if file is not None and file.data is not None
    }
    in_order = [small[id] for id in sorted(small)]
    placed = {file.id: file for file in write_pack(store, in_order, term)}

    def place(file: StateFile) -> StateFile:
        return file if file.data is None else placed[file.id]

    def place_deltas(ack: Ack) -> Ack:
        return replace(
            ack,
            operators=[
                op if op.delta is None else replace(op, delta=place(op.delta))
                for op in ack.operators
            ],
        )

    return (
        [outcome._replace(acks=list(map(place_deltas, outcome.acks))) for outcome in rounds],
        [replace(done, stored=place(done.stored)) for done in compacted],
    )


def taken_in(
    begin: Begin, ranges: Ranges, compacted: Sequence[Compacted]
) -> dict[str, list[RangeState]]:
    """The ranges with what was written in the background; what no longer fits is left out."""
    found = {uid: list(parts) for uid, parts in ranges.items()}
    rewritten: dict[str, set[int]] = {uid: set() for uid in begin.rewrite}
    for file in compacted:
        for subtask, part in enumerate(found.get(file.uid, ())):
            changed = take_in(part, file)
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
                    found[at] = advance(found[at], op, epoch, held.get(at))
    for ack in rounds[-1]:
        # What rounds before have sent back has been processed.
        for op in ack.operators:
            if op.uid in feedbacks:
                at = op.uid, ack.subtask
                found[at] = replaced(found[at], op, epoch)
    return {uid: [found[uid, at] for at in range(len(parts))] for uid, parts in ranges.items()}


def committables_of(acks: Sequence[Ack], sinks: Collection[str]) -> dict[str, list[Any]]:
    """What each sink has prepared, in the order of acknowledgements."""
    found: dict[str, list[Any]] = {uid: [] for uid in sinks}
    for ack in acks:
        for uid, committable in ack.committables.items():
            found[uid].append(committable)
    return found
