"""Where a slot keeps state between epochs."""

from cairn.backends.base import Backend
from cairn.backends.heap import HeapBackend

BACKENDS: dict[str, type[Backend]] = {"heap": HeapBackend}

__all__ = ["BACKENDS", "Backend", "HeapBackend"]


def make_backend(name, directory, memory_bytes):
    return BACKENDS[name]()
