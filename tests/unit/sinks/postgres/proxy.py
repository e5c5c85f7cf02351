"""PostgreSQL seen through a socket that loses an answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import psycopg


class Proxy:
    """Passes everything on, under a dsn of its own.

    Once armed with some words: when a client sends them, the server acts and answers, and
    instead of the answer the client finds its connection closed.
    """

    def __init__(self, folder: Path, uri: str) -> None:
        found = psycopg.conninfo.conninfo_to_dict(uri)
        self._server = f"{found['host']}/.s.PGSQL.5432"
        self.dsn = psycopg.conninfo.make_conninfo(uri, host=str(folder), gssencmode="disable")
        self.armed: bytes | None = None
        self.lost = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / ".s.PGSQL.5432"))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                losing = threading.Event()
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(*ends, losing), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, losing: threading.Event) -> None:
        is_answer = source.getsockname() != str(self._listener.getsockname())
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if not is_answer and self.armed is not None and self.armed in data:
                    losing.set()
                    self.armed = None
                if is_answer and losing.is_set():
                    self.lost += 1
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
