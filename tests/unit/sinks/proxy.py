"""A server seen through a socket that can be closed, or lose answers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading


class Proxy:
    """Passes everything on to a Unix socket, under a path of its own."""

    def __init__(self, path: str, server: str) -> None:
        self.path = path
        self.server = server
        self.answers_to_lose = 0
        """When it counts down to zero, the answer is read and the connection is closed."""
        self._open: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.start()

    def start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        """As when the server is gone: no connection stays, none can be made."""
        assert self._listener is not None
        self._listener.close()
        os.unlink(self.path)
        for end in self._open:
            _close(end)
        self._open.clear()

    def lose_answer(self, nth: int) -> None:
        """Lose the nth answer from now on that comes in reply to a script."""
        self.answers_to_lose = nth

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self.server)
            self._open += [client, server]
            threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        asked = threading.Event()

        def answers() -> None:
            with contextlib.suppress(OSError):
                while data := server.recv(1 << 20):
                    if asked.is_set() and self.answers_to_lose:
                        self.answers_to_lose -= 1
                        if not self.answers_to_lose:
                            break
                    asked.clear()
                    client.sendall(data)
            _close(client)

        threading.Thread(target=answers, daemon=True).start()
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                if b"EVALSHA" in data:
                    asked.set()
                server.sendall(data)
        _close(server)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
