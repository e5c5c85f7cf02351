"""Backends: they hold the state of a slot between epochs."""

from cairn.backends.contract import Backend, Base, BaseCancelledError, BaseTarget
from cairn.backends.heap.backend import HeapBackend
from cairn.backends.registry import (
    BACKENDS,
    DEFAULT_MEMORY_BYTES,
    check_url,
    has_versions,
    is_known,
    kind_of,
    make_backend,
)

__all__ = [
    "BACKENDS",
    "DEFAULT_MEMORY_BYTES",
    "Backend",
    "Base",
    "BaseCancelledError",
    "BaseTarget",
    "HeapBackend",
    "check_url",
    "has_versions",
    "is_known",
    "kind_of",
    "make_backend",
]
