"""The backends by name."""

from __future__ import annotations

from collections.abc import Callable

from cairn.backends.contract import Backend
from cairn.backends.heap.backend import HeapBackend

DEFAULT_MEMORY_BYTES = 512 << 20


def _heap(directory: str, memory_bytes: int) -> Backend:
    return HeapBackend()


def _rocksdb(directory: str, memory_bytes: int) -> Backend:
    # Not at the top: a slot with state in memory does not load RocksDB.
    from cairn.backends.rocksdb.backend import RocksBackend

    return RocksBackend(directory, memory_bytes)


BACKENDS: dict[str, Callable[[str, int], Backend]] = {"heap": _heap, "rocksdb": _rocksdb}


def make_backend(name: str, directory: str, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> Backend:
    """Make a backend that may use this directory, which need not exist, and about this memory."""
    return BACKENDS[name](directory, memory_bytes)
