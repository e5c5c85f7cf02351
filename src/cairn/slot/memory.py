"""The memory of a slot: kept from one batch for the next, returned when state has shrunk.

A batch needs arrays of the same sizes as the one before. Allocators return large ones to the
system at once, and it hands them out again page by page, each filled with zeros: that took a third
of a join's CPU time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa

WARN_SHARE: Final = 0.9
"""A slot that uses this share of its memory is reported: the kernel kills without a word."""
STATES_NAMED: Final = 3
KEPT_BYTES: Final = 256 << 20
"""Larger arrays, and more free memory than this, go back to the system."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def keep_memory() -> None:
    """Make the allocator of this process keep freed memory for later batches."""
    with contextlib.suppress(AttributeError):  # Not every system has it.
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        # Batches are processed on several threads. Only the main arena has room for large arrays.
        mallopt(_M_ARENA_MAX, 1)
        pa.set_memory_pool(pa.system_memory_pool())


def trim_memory() -> None:
    """Return freed memory to the system; some allocators do that only on request."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def private_bytes() -> int:
    """Return the memory of this process that is not of files; 0 where the system has no /proc."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def describe_excess(
    used: int, limit: int, entries: Mapping[str, int], *, is_heap: bool = True
) -> str:
    """Return that a slot uses nearly all of its memory, and its largest states; "" if it does not.

    `entries` has the number of entries of each operator. `is_heap`: they are all in memory.
    """
    if not limit or used < WARN_SHARE * limit:
        return ""
    largest = sorted(entries.items(), key=lambda each: (-each[1], each[0]))[:STATES_NAMED]
    named = ", ".join(f"{uid} ({count:,} entries)" for uid, count in largest) or "none"
    advice = "more subtasks, a larger slot_memory_mb with spark.executor.memoryOverhead, "
    advice += "backend='rocksdb'" if is_heap else "a smaller backend_memory_mb"
    return (
        f"uses {used >> 20:,} of {limit >> 20:,} MiB; largest states: {named}\n"
        f"  next: {advice}, or smaller batches by the limits of the sources"
    )
