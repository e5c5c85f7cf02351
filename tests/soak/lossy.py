"""A way to a PostgreSQL server that loses answers: the server has committed, nobody hears of it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit


class LossyProxy:
    """Listens on a socket of its own and passes everything on, but for some answers to COMMIT."""

    def __init__(self, uri: str, folder: Path) -> None:
        parts = urlsplit(uri)
        host = unquote(parse_qs(parts.query)["host"][0])
        name = ".s.PGSQL.5432"
        self._server = os.path.join(host, name)
        folder.mkdir(parents=True, exist_ok=True)
        self.uri = uri.replace(parts.query, f"host={quote(str(folder), safe='')}")
        self.answers_to_lose = 0
        self.lost = 0
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / name))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._server)
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client, server), daemon=True).start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        losing = threading.Event()

        def forward() -> None:
            with contextlib.suppress(OSError):
                while data := client.recv(1 << 16):
                    if _commits(data) and self._takes_one():
                        losing.set()
                    server.sendall(data)
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_WR)

        threading.Thread(target=forward, daemon=True).start()
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if losing.is_set():
                    break  # The server has done it, and said so. That is as far as it gets.
                client.sendall(data)
        for each in (client, server):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _takes_one(self) -> bool:
        with self._lock:
            if self.lost >= self.answers_to_lose:
                return False
            self.lost += 1
            return True

    def close(self) -> None:
        self._listener.close()


def _commits(message: bytes) -> bool:
    """A query that ends a transaction, or is one that publishes."""
    if message[:1] not in (b"Q", b"P") or b"pg_advisory_xact_lock" in message:
        return False  # Tables are made when a job starts; it would not start.
    return b"COMMIT" in message.upper() or b"cairn_marks" in message
