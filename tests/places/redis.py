"""Keys of a real Redis server. There is one place at a time: each begins with an empty server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import redis

from cairn.sinks import Redis
from cairn.sinks.base import Sink
from tests import servers
from tests.places.base import Place, Row
from tests.places.wal import list_staged

PREFIX = "row:"


class RedisHashPlace(Place):
    is_keyed = True
    is_in_pieces = True
    needs_text = True

    database = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server: Any = servers.redis()
        self.server.flushall()
        for client in self._clients():
            self.server.client_kill_filter(_id=client["id"])

    def elsewhere(self) -> Place:
        """Another database of the server, which has rows of its own."""
        other: Any = object.__new__(type(self))
        Place.__init__(other, self.folder / "elsewhere")
        other.database, file = 1, self.server.socket_file
        other.server = redis.Redis(unix_socket_path=file, db=1)
        other.server.socket_file = file
        return other

    @property
    def url(self) -> str:
        return f"unix://{self.server.socket_file}?db={self.database}"

    def make(self) -> Sink:
        # Chunks of one row, so that an epoch has pieces. With `k`, as a hash of nulls is none.
        return Redis(self.url, key=PREFIX + "{k}", value=("k", "s"), chunk_rows=1)

    def rows(self, driver: Sink) -> list[Row]:
        keys = self.server.keys(f"{PREFIX}*")
        return [(int(key.decode().removeprefix(PREFIX)), self.value(key)) for key in keys]

    def value(self, key: bytes) -> Any:
        found = self.server.hget(key, "s")
        return None if found is None else found.decode()

    def leftovers(self) -> list[str]:
        return list_staged(self.folder) + [str(path) for path in self.scratch.iterdir()]

    def connections(self) -> list[str]:
        # The server notices a little later that a connection is closed.
        for _ in range(200):
            if not self._clients():
                return []
            time.sleep(0.01)
        return [client["name"] for client in self._clients()]

    def _clients(self) -> list[Any]:
        clients = self.server.client_list()
        return [client for client in clients if client["name"].startswith("cairn:")]

    def close(self) -> None:
        self.server.flushall()


class RedisStringPlace(RedisHashPlace):
    def make(self) -> Sink:
        return Redis(self.url, key=PREFIX + "{k}", kind="string", chunk_rows=1)

    def value(self, key: bytes) -> Any:
        return json.loads(self.server.get(key)).get("s")
