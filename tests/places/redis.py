"""Keys of a real Redis server."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from cairn.sinks import Redis
from cairn.sinks.base import Sink
from tests import servers
from tests.places.base import Place, Row
from tests.places.wal import staged


class RedisHashPlace(Place):
    is_keyed = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server: Any = servers.redis()
        self.prefix = f"place-{uuid.uuid4().hex[:12]}:"
        self._jobs: set[tuple[str, str]] = set()

    @property
    def url(self) -> str:
        return f"unix://{self.server.socket_file}?db=0"

    def make(self) -> Sink:
        # Chunks of one row, so that an epoch has pieces.
        return Redis(self.url, key=self.prefix + "{k}", chunk_rows=1)

    def opened(self, job_id: str = "job", uid: str = "out", *, in_slot: bool = False) -> Sink:
        # Fences are by job and sink: of another place they are others.
        return super().opened(f"{job_id}-{self.prefix[:-1]}", uid, in_slot=in_slot)

    def rows(self, driver: Sink) -> list[Row]:
        return [(int(key.decode().removeprefix(self.prefix)), self._s(key)) for key in self._keys()]

    def _s(self, key: bytes) -> Any:
        value = self.server.hget(key, "s")
        return None if value is None else value.decode()

    def leftovers(self) -> list[str]:
        return staged(self.folder) + [str(path) for path in self.scratch.iterdir()]

    def close(self) -> None:
        for key in [*self._keys(), *self.server.scan_iter(f"cairn:*{self.prefix[:-1]}*")]:
            self.server.delete(key)

    def _keys(self) -> list[bytes]:
        return list(self.server.scan_iter(f"{self.prefix}*"))


class RedisStringPlace(RedisHashPlace):
    def make(self) -> Sink:
        return Redis(self.url, key=self.prefix + "{k}", kind="string", chunk_rows=1)

    def _s(self, key: bytes) -> Any:
        return json.loads(self.server.get(key))["s"]
