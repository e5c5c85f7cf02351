"""Make the ranges and committables of a manifest from acknowledgements.

Always true here:
- for state that all subtasks share, the acknowledgement of the first one counts;
- only records that the last round sends back are in the manifest;
- state whose form changes is rewritten by every subtask that has some, or the epoch fails.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from cairn.driver.coordinator.ranges import advance, apply_compaction, replace_state
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
    if not small:
        return list(rounds), list(compacted)
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


def apply_compactions(
    begin: Begin, ranges: Ranges, compacted: Sequence[Compacted]
) -> dict[str, list[RangeState]]:
    """Return the ranges with files written in the background, except those that no longer fit."""
    found = {uid: list(each) for uid, each in ranges.items()}
    rewritten: dict[str, set[int]] = {uid: set() for uid in begin.rewrite}
    # Ranges are disjoint, but lists of subtasks may own no key groups: several at one place.
    places: dict[tuple[str, int, int], list[int]] = {}
    for uid in {file.uid for file in compacted}:
        for subtask, each in enumerate(found.get(uid, ())):
            places.setdefault((uid, each.first_group, each.group_count), []).append(subtask)
    for file in compacted:
        for subtask in places.get((file.uid, file.first_group, file.group_count), ()):
            changed = apply_compaction(found[file.uid][subtask], file)
            if changed is not None:
                found[file.uid][subtask] = changed
                if file.kind == "base" and file.as_of == begin.parent:
                    rewritten.get(file.uid, set()).add(subtask)
    for uid, subtasks in rewritten.items():
        # No files of the old form may stay: nothing could read them later.
        held = {at for at, each in enumerate(ranges[uid]) if each.version != EMPTY_VERSION}
        if held - subtasks:
            raise EpochError(
                f"operator {uid!r}: subtasks {sorted(held - subtasks)} did not write their "
                "state in its new form; the epoch runs again"
            )
    return found


def advance_ranges(
    ranges: Ranges,
    rounds: Sequence[Sequence[Ack]],
    epoch: int,
    held: Mapping[tuple[str, int], Held],
    feedbacks: Collection[str],
) -> dict[str, list[RangeState]]:
    """Return the ranges after a batch, from the acknowledgements of its rounds."""
    found = {
        (uid, subtask): state for uid, each in ranges.items() for subtask, state in enumerate(each)
    }
    for acks in rounds:
        for ack in acks:
            for op in ack.operators:
                at = op.uid, ack.subtask
                if at not in found:
                    continue  # Shared state: the acknowledgement of subtask 0 counts.
                if op.uid not in feedbacks:
                    found[at] = advance(found[at], op, epoch, held.get(at))
    for ack in rounds[-1]:
        # Records that earlier rounds sent back have been processed.
        for op in ack.operators:
            if op.uid in feedbacks:
                at = op.uid, ack.subtask
                found[at] = replace_state(found[at], op, epoch)
    return {uid: [found[uid, at] for at in range(len(each))] for uid, each in ranges.items()}


def committables_of(acks: Sequence[Ack], sinks: Collection[str]) -> dict[str, list[Any]]:
    """Return the committables of each sink, in the order of acknowledgements."""
    found: dict[str, list[Any]] = {uid: [] for uid in sinks}
    for ack in acks:
        for uid, committable in ack.committables.items():
            found[uid].append(committable)
    return found
