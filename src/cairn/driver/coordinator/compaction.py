"""Choose the files of a range to rewrite: small deltas into larger ones, all files into a base.

Merging is size-tiered: ten files of a tier become one of the next, together with the
smaller ones after them, so a range has few files even in an old job. A base is due when the
deltas after it are larger than a multiple of it; a restore then reads a bounded multiple of the
state. The multiple depends on the cost of a base: of state in memory or in Redis all of it is
written, of state in RocksDB only the new files, of state in PostgreSQL only the deltas.

The first delta of a state has what a base of its epoch would have: it changes nothing that was
there before. So a large one is compared with the deltas after it, and is not written once more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from cairn.backends import has_versions, kind_of
from cairn.protocol.messages import Compaction
from cairn.storage.manifest import FileRef

FAN_IN = 10
BASE_RATIO = {"heap": 4.0, "rocksdb": 0.5, "redis": 4.0}
"""A database with versions has a base whenever there are changes to write."""
BASE_BYTES_MIN = 4 * 1024 * 1024
WHOLE_BYTES_MIN = 4 * 1024 * 1024
"""A first delta of at least this size, of state in memory, counts as a base."""


def base_ratio(backend: str) -> float:
    """Return the limit of the deltas after a base, as a multiple of its size."""
    return float(os.environ.get("CAIRN_BASE_RATIO") or BASE_RATIO.get(kind_of(backend), 0.0))


def base_bytes_min() -> int:
    """Return the bytes of deltas that need no base yet; 0 if the user has set the ratio."""
    return 0 if "CAIRN_BASE_RATIO" in os.environ else BASE_BYTES_MIN


def due(files: Sequence[FileRef], backend: str = "heap") -> Compaction | None:
    """Return the compaction that is due for these files, oldest first; None if none is."""
    is_external = has_versions(backend)
    base_bytes = delta_bytes = 0
    # One pass: this is called for every range of every epoch.
    for ref in files:
        if ref.kind == "delta":
            delta_bytes += ref.length + ref.objects_bytes
        else:
            base_bytes += ref.length + ref.objects_bytes
            if ref.format != "rocksdb" and not is_external:
                backend = "heap"
    is_whole = not base_bytes and _is_whole(files, backend)
    if is_whole:
        base_bytes, delta_bytes = files[0].length, delta_bytes - files[0].length
    if delta_bytes > base_bytes_min() and delta_bytes > base_ratio(backend) * base_bytes:
        return Compaction("base", len(files), 0)
    merge = None
    tier = in_tier = 0
    for count, ref in enumerate(reversed(files), start=1):
        if ref.kind == "base" or (is_whole and count == len(files)):
            break
        # Smaller files are merged with larger ones: newer files, among them always the newest
        # delta, and older ones that a change of parallelism has left in between.
        if ref.tier <= tier:
            in_tier += 1
        else:
            in_tier, tier = 1, ref.tier
        if in_tier >= FAN_IN and is_external:
            # Its rows are new versions of a few others: a base costs no more than a merge.
            return Compaction("base", len(files), 0)
        if in_tier >= FAN_IN:
            merge = Compaction("merge", count, tier + 1)
    return merge


def _is_whole(files: Sequence[FileRef], backend: str) -> bool:
    """True if the oldest file, a delta, is as good as a base."""
    return bool(files) and files[0].length >= WHOLE_BYTES_MIN and kind_of(backend) == "heap"
