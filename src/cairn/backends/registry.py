"""The backends by name."""

from __future__ import annotations

from collections.abc import Callable

from cairn.backends.contract import Backend
from cairn.backends.heap.backend import HeapBackend
from cairn.backends.versioned.contract import place_of
from cairn.backends.versioned.kinds import kind_of_url
from cairn.ids import new_id
from cairn.storage.environment import read_setting

DEFAULT_MEMORY_BYTES = 512 << 20


def url_of(backend: str) -> str:
    """Return the backend, or the value of the environment variable that it names: `env:NAME`."""
    return read_setting(backend, "the URL of the backend")


def is_redis(backend: str) -> bool:
    return url_of(backend).startswith(("redis://", "rediss://"))


def _heap(directory: str, memory_bytes: int) -> Backend:
    return HeapBackend()


def _rocksdb(directory: str, memory_bytes: int) -> Backend:
    # Not at the top: a slot with state in memory does not load RocksDB.
    from cairn.backends.rocksdb.backend import RocksBackend

    return RocksBackend(directory, memory_bytes)


BACKENDS: dict[str, Callable[[str, int], Backend]] = {"heap": _heap, "rocksdb": _rocksdb}


def kind_of(backend: str) -> str:
    """Return the kind of a backend: its name, or that of the database that a URL is of."""
    if is_redis(backend):
        return "redis"
    kind = kind_of_url(url_of(backend))
    return backend if kind is None else kind.name


def has_versions(backend: str) -> bool:
    """True for a database that keeps versions of rows."""
    return kind_of_url(url_of(backend)) is not None


def is_known(backend: str) -> bool:
    return backend in BACKENDS or is_redis(backend) or has_versions(backend)


def check_url(backend: str) -> None:
    """Refuse a URL that cannot be read."""
    kind = kind_of_url(url_of(backend))
    if kind is not None:
        kind.address_of(url_of(backend))
    elif is_redis(backend):
        from cairn.backends.redis.link import check_server

        check_server(url_of(backend))


def make_backend(
    name: str,
    directory: str,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    *,
    job_id: str = "",
    operator: str = "",
) -> Backend:
    """Make a backend that may use this directory, which need not exist, and about this memory.

    `name` may be the URL of a database, or name an environment variable that has it. The job has
    a place of its own there.
    """
    url = url_of(name)
    kind = kind_of_url(url)
    if kind is not None:
        # Not at the top: a slot with state elsewhere does not load the client of a database.
        from cairn.backends.versioned.backend import VersionedBackend

        job_id = job_id or new_id()
        label = f"cairn:{job_id[:12]}:{operator}"
        versions = kind.open(kind.address_of(url), place_of(job_id), label)
        return VersionedBackend(directory, memory_bytes, versions, operator=operator)
    if is_redis(name):
        from cairn.backends.redis.backend import RedisBackend

        job_id = job_id or new_id()
        return RedisBackend(directory, memory_bytes, url, job_id=job_id, operator=operator)
    return BACKENDS[name](directory, memory_bytes)
