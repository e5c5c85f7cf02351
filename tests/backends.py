"""The backends that suites run over: those of `BACKENDS`, those in real servers, and an example."""

from __future__ import annotations

import atexit
import functools
import itertools
import shutil
import tempfile
from typing import Any

from cairn.backends import BACKENDS, Backend, BaseTarget, make_backend
from cairn.backends.cached.backend import CachedBackend
from cairn.backends.cached.outside import OutsideBackend
from cairn.backends.rocksdb.backend import RocksBackend
from cairn.storage.files import StateFile
from cairn.storage.store import open_store
from tests import servers
from tests.marks import for_soak
from tests.sqlite_versions import SCHEME, register

_epochs = itertools.count(2)
SERVERS = ["postgres", "redis"]
VERSIONED = ["postgres", "sqlite"]
OUTSIDE = [*SERVERS, "sqlite"]
"""Databases that are not in the slot."""
ALL = [*BACKENDS, *OUTSIDE]
WITH_SERVERS = [*BACKENDS, *SERVERS, for_soak("sqlite")]
"""For suites that take seconds over a server."""
IN_TURN = ["heap", *SERVERS, "rocksdb", "sqlite"]
"""For `in_turn`: suites of three cases run over the servers in every `make test`."""
MORE_IN_SOAK = [*BACKENDS, *map(for_soak, SERVERS)]
"""For suites that take long: `make soak` runs them over the servers too."""
register()


def backend_name(name: str) -> str:
    """Return what `job.start(backend=)` takes: of a server the URL of its database."""
    if name == "redis":
        return servers.redis_server().url
    if name == "sqlite":
        return _sqlite_url()
    return servers.state_database() if name == "postgres" else name


@functools.cache
def _sqlite_url() -> str:
    """The URL of a file that all jobs of a test process share."""
    folder = tempfile.mkdtemp(prefix="sqlite")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return f"{SCHEME}://{folder}/state.db"


def make(name: str, directory: str, memory_bytes: int, **facts: Any) -> Backend:
    return make_backend(backend_name(name), directory, memory_bytes, **facts)


def take_to_database(backend: Backend, groups: range = range(128)) -> None:
    """Write everything where the backend has a database, and drop it from memory."""
    if isinstance(backend, OutsideBackend):
        write_base(backend, groups=groups)
    elif isinstance(backend, RocksBackend):
        backend.flush()
    if isinstance(backend, CachedBackend):
        drop_from_memory(backend)


def drop_from_memory(backend: CachedBackend) -> None:
    """Drop what is in the database too."""
    for rows in backend.all_rows():
        rows.rotate()
        rows.rotate()


def write_base(backend: Backend, term: int = 1, groups: range = range(128)) -> StateFile:
    """Write a base of an epoch that is newer than all before."""
    base = backend.begin_base({}, groups)
    with tempfile.TemporaryDirectory() as scratch:
        target = BaseTarget(open_store("memory:"), term, "op", next(_epochs), scratch, 0)
        try:
            return base.write(target, lambda: None)
        finally:
            base.close()
