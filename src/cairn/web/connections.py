"""Connections: how many there are, and how long one may take without doing anything.

Always true here:
- file descriptors are left for the job: one connection too many is closed as it comes, before
  anything is read, and so are those that wait for TLS to begin;
- a request's head comes within HEAD_S seconds, slow or not, or the connection is closed;
- a client that takes nothing of its answer for STALLED_S seconds is cut off.
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
    """At most a quarter of what the process may open."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if files_max < 0 else max(8, min(CONNECTIONS_MAX, files_max // 4))


class BoundedSocket(socket.socket):
    """Listens, and accepts so many at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most = connections_max()
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        accepted, address = super().accept()
        # Those that were closed have no number any more.
        if sum(each.fileno() >= 0 for each in self._accepted) >= self._most:
            accepted.close()
            raise BlockingIOError("too many connections")
        self._accepted.add(accepted)
        return accepted, address


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with somebody who may be slow, on purpose or not."""

    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Also after an answer: half a head has ended the waiting for the next request.
        if self.conn.their_state is h11.IDLE:
            self._expect_head()
        elif self._head is not None:
            self._head.cancel()
            self._head = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_less(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        super().resume_writing()

    def _expect_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_S, self.transport.abort)

    def _expect_less(self, size: int) -> None:
        self._stalled = self.loop.call_later(STALLED_S, self._look, size)

    def _look(self, size: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left >= size:
            self.transport.abort()
        else:
            self._expect_less(left)
