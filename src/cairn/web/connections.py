"""Limits on connections: how many there are, and how long an idle one stays.

uvicorn limits neither: its `limit_concurrency` answers 503 but leaves idle connections open, and
its keep-alive timeout starts only after the first answer. So the socket counts connections as it
accepts them, and the protocol has a timer for the head of each request.

Always true here:
- file descriptors are left for the job: a connection beyond the limit is closed as it comes,
  before anything is read. Connections that wait for the TLS handshake count too;
- the head of a request arrives within HEAD_S seconds, or the connection is closed;
- on Linux, a client that reads nothing of its answer for STALLED_S seconds is disconnected.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import weakref
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_MAX: Final = 512
HEAD_S: Final = 10.0
STALLED_S: Final = 30.0


def connections_max() -> int:
    """Return the limit: at most a quarter of the files that the process may open."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if files_max < 0 else max(8, min(CONNECTIONS_MAX, files_max // 4))


class BoundedSocket(socket.socket):
    """A TCP socket that keeps at most `connections_max()` accepted connections open."""

    def __init__(self, family: int) -> None:
        # asyncio switches off Nagle's algorithm (40 ms per answer) if the protocol is given.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._most = connections_max()
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted sockets inherit it. The kernel counts from the last byte the client took.
            stalled_ms = int(STALLED_S * 1000)
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stalled_ms)

    def accept(self) -> tuple[socket.socket, Any]:
        accepted, address = super().accept()
        # A closed socket has no file descriptor.
        if sum(each.fileno() >= 0 for each in self._accepted) >= self._most:
            accepted.close()
            raise BlockingIOError("too many connections")
        self._accepted.add(accepted)
        return accepted, address


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with a time limit for the head of each request."""

    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Half a head has cancelled uvicorn's own keep-alive timer.
        if self.conn.their_state is h11.IDLE:
            self._expect_head()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
