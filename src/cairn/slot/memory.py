"""The memory of a slot: kept from one batch for the next, returned when state has shrunk, watched.

A batch needs arrays of the same sizes as the one before. Allocators return large ones to the
system at once, and it hands them out again page by page, each filled with zeros: that took a third
of a join's CPU time.

The kernel kills a process of a full container without a word, and Spark's executor with it at
times. So a slot stops an attempt that fills its memory, if the driver can run the batch in more
slices (`driver/coordinator/slices`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa

from cairn.errors import EpochError
from cairn.protocol.messages import Begin
from cairn.sinks.base import Execution

WARN_SHARE: Final = 0.9
"""A slot that uses this share of its memory is reported, and may stop an attempt."""
GROWN_SHARE: Final = 0.1
"""An execution that has added less than this share is not stopped: fewer rows would not help."""
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


class Room:
    """The memory that is left for the executions in a slot, all of their levels together."""

    def __init__(self, limit: int, used: Callable[[], int] = private_bytes) -> None:
        """`limit` in bytes; 0: none is known."""
        self._limit = limit
        self._used = used
        self._before = 0
        """The bytes in use when the execution began."""
        self._present: tuple[int, Execution] | None = None
        self._refused: tuple[int, Execution] | None = None

    def begin(self, begin: Begin) -> None:
        """A level of an execution begins. Changes of the attempt before are undone in it.

        EpochError if the slot has stopped this one already: Spark runs a failed task again.
        """
        named = begin.epoch, begin.execution
        if self._refused == named:
            raise _too_full(self._used(), self._limit)
        if self._refused is not None:
            self._refused = None
            trim_memory()
        if self._limit and named != self._present:
            self._present, self._before = named, self._used()

    def check(self, begin: Begin) -> None:
        """Raise EpochError if the execution fills the memory, and fewer rows at a time may fit."""
        if not self._limit or not begin.is_divisible:
            return
        used = self._used()
        if used >= WARN_SHARE * self._limit and used - self._before >= GROWN_SHARE * self._limit:
            self._refused = begin.epoch, begin.execution
            raise _too_full(used, self._limit)


def _too_full(used: int, limit: int) -> EpochError:
    return EpochError(
        f"a slot uses {used >> 20:,} of {limit >> 20:,} MiB, and more rows are to come\n"
        "  next: none; the batch runs again with fewer rows at a time",
        is_full=True,
    )


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
