"""When to write a range's files anew: small deltas into larger ones, all of it into a base.

Merging is size-tiered: ten files of a tier become one of the next, so a range has few
files however old the job is. A base is due when the deltas after it have outgrown it
several times over; recovery then reads a bounded multiple of the state.
"""

from __future__ import annotations

from collections.abc import Sequence

from cairn.slot.protocol import Compaction
from cairn.storage.manifest import FileRef

FAN_IN = 10
BASE_RATIO = 4
BASE_BYTES_MIN = 4 * 1024 * 1024


def due(files: Sequence[FileRef]) -> Compaction | None:
    """What to do about these files, oldest first, before the next epoch."""
    base_bytes = sum(ref.length for ref in files if ref.kind == "base")
    delta_bytes = sum(ref.length for ref in files if ref.kind == "delta")
    if delta_bytes > max(BASE_RATIO * base_bytes, BASE_BYTES_MIN):
        return Compaction("base", len(files), 0)
    tail = files[-FAN_IN:]
    tiers = {ref.tier for ref in tail}
    # Clipped files (after a rescale) hold groups of others too: a base will rid us of them.
    ranges = {(ref.first_group, ref.group_count) for ref in tail}
    if len(tail) == FAN_IN and len(tiers) == 1 and len(ranges) == 1:
        if all(ref.kind == "delta" for ref in tail):
            return Compaction("merge", FAN_IN, tail[0].tier + 1)
    return None
