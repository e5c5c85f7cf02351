"""When to write a range's files anew: small deltas into larger ones, all of it into a base.

Merging is size-tiered: ten files of a tier become one of the next, together with the
smaller ones after them, so a range has few files however old the job is. A base is due
when the deltas after it have outgrown it several times over; recovery then reads a bounded
multiple of the state.
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
    merge = None
    tier = in_tier = 0
    for count, ref in enumerate(reversed(files), start=1):
        if ref.kind == "base":
            break
        # What is smaller goes with the larger: newer files, of which the newest delta is always
        # there, and older ones that a change of parallelism has left between others.
        in_tier = in_tier + 1 if ref.tier <= tier else 1
        tier = max(tier, ref.tier)
        if in_tier >= FAN_IN:
            merge = Compaction("merge", count, tier + 1)
    return merge
