"""One server, as a client reaches it: its address, and connections over HTTP.

Always true here:
- each thread has a connection of its own, which ends with it;
- headers that the caller passes, such as a token, are sent to this address and to no other: a
  redirect is returned, never followed.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import weakref
from typing import Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

from cairn.errors import QueryError

_PORTS: Final = {"http": 80, "https": 443}

Origin = tuple[str, str, int | None]


class Found(NamedTuple):
    """An answer."""

    status: int
    text: bytes
    location: str | None = None
    """The address that a redirect names."""


class Server:
    """One address. Free for all threads."""

    def __init__(self, url: str, ca: str | None, timeout: float, connect_timeout: float) -> None:
        parts, self.host, self._port = _parse_url(url)
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self.origin = origin_of(url)
        self._prefix = parts.path.rstrip("/")
        self._tls = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context(cafile=ca)
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._mine = threading.local()
        # A thread that is gone takes its connection with it: only it holds on to that.
        self._connections: weakref.WeakSet[_Connection] = weakref.WeakSet()
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            connections, self._connections = list(self._connections), weakref.WeakSet()
        self._mine = threading.local()
        for connection in connections:
            connection.close()

    def send(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> Found:
        """Send a request on the connection of this thread."""
        connection = self._connection()
        try:
            if connection.http.sock is None:
                self._connect(connection.http)
            return self._send(connection.http, method, path, data, headers)
        except (OSError, http.client.HTTPException):
            connection.close()  # The next request opens it again.
            raise

    def send_once(self, path: str, data: bytes, headers: dict[str, str]) -> Found:
        """Send a request that changes something, and wait as long as it takes.

        OSError if it was not sent; QueryError if it was sent and not answered.
        """
        # On its own connection: one that the server has closed would look like a failure.
        own = self._new_connection()
        try:
            self._connect(own.http)
            # A savepoint may take long; keepalive notices if the machine is gone.
            own.http.sock.settimeout(None)
            own.http.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                own.http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            try:
                return self._send(own.http, "POST", path, data, headers)
            except (OSError, http.client.HTTPException) as error:
                raise QueryError(
                    f"{self.url} has not confirmed the {path.rpartition('/')[2]}: "
                    f"{error or type(error).__name__}\n"
                    "  next: look at /api/points and /api/job before asking again"
                ) from error
        finally:
            own.close()

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        connection.timeout = self._connect_timeout
        connection.connect()
        connection.sock.settimeout(self._timeout)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str],
    ) -> Found:
        connection.request(method, self._prefix + path, data, headers)
        response = connection.getresponse()
        return Found(response.status, response.read(), response.getheader("location"))

    def _connection(self) -> _Connection:
        """That of this thread."""
        connection: _Connection | None = getattr(self._mine, "connection", None)
        if connection is None:
            connection = self._mine.connection = self._new_connection()
            with self._lock:
                self._connections.add(connection)
        return connection

    def _new_connection(self) -> _Connection:
        to, timeout, tls = (self.host, self._port), self._timeout, self._tls
        if tls is None:
            return _Connection(http.client.HTTPConnection(*to, timeout=timeout))
        return _Connection(http.client.HTTPSConnection(*to, timeout=timeout, context=tls))


class _Connection:
    """Closes with the last one who holds on to it."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.http = connection

    def close(self) -> None:
        self.http.close()

    def __del__(self) -> None:
        self.close()


def origin_of(url: str) -> Origin | None:
    """Return scheme, host and port of an address; None if it is not one."""
    try:
        parts, host, port = _parse_url(url)
    except QueryError:
        return None
    return parts.scheme, host, port or _PORTS[parts.scheme]


def _parse_url(url: str) -> tuple[SplitResult, str, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise QueryError(f"a url is http://HOST:PORT, found {url!r}\n  next: see run.url")
    return parts, parts.hostname, port
