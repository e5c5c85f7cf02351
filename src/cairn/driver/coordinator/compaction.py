"""When to write a range's files anew: small deltas into larger ones, all of it into a base.

Merging is size-tiered: ten files of a tier become one of the next, together with the
smaller ones after them, so a range has few files however old the job is. A base is due
when the deltas after it have outgrown it; recovery then reads a bounded multiple of the
state. How far they may outgrow it follows from what a base costs: on the heap all of the
state, in RocksDB only the files that are new.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from cairn.protocol.messages import Compaction
from cairn.storage.manifest import FileRef

FAN_IN = 10
BASE_RATIO = {"heap": 4.0, "rocksdb": 0.5}
BASE_BYTES_MIN = 4 * 1024 * 1024


def base_ratio(backend: str) -> float:
    """How many times its size the deltas after a base may reach."""
    return float(os.environ.get("CAIRN_BASE_RATIO") or BASE_RATIO[backend])


def base_bytes_min() -> int:
    """Deltas of so many bytes need no base yet. Whoever sets the ratio means it."""
    return 0 if "CAIRN_BASE_RATIO" in os.environ else BASE_BYTES_MIN


def due(files: Sequence[FileRef], backend: str = "heap") -> Compaction | None:
    """What to write anew of these files, oldest first."""
    base_bytes = sum(ref.size for ref in files if ref.kind == "base")
    delta_bytes = sum(ref.size for ref in files if ref.kind == "delta")
    if delta_bytes > max(base_ratio(backend) * base_bytes, base_bytes_min()):
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
