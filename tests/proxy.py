"""A way between a client and a server on this machine that can be slow, or swallow everything."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Proxy:
    """Forwards TCP connections to a port. `port` is the one to connect to."""

    def __init__(self, target: int) -> None:
        self.delay_s = 0.0
        """Every piece of data comes this much later."""
        self._target = target
        self._is_cut = False
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Swallow all data from now on; connections stay open, as with a dead network."""
        self._is_cut = True

    def mend(self) -> None:
        """Forward again, on new connections: the old ones have lost data."""
        self._is_cut = False
        self._close_all()

    def close(self) -> None:
        self._listener.close()
        self._close_all()

    def _close_all(self) -> None:
        with self._lock:
            found, self._open = self._open, []
        for each in found:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                with self._lock:
                    self._open += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.delay_s:
                    time.sleep(self.delay_s)
                if not self._is_cut:
                    target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
