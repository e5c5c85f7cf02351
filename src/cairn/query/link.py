"""Requests to one server over HTTP: connections, tokens, what is sent again.

Always true here:
- a request that only reads is sent again when the connection breaks or the server is busy;
  one that changes the job never is, and is waited for as long as it takes;
- each thread has a connection of its own, which ends with it;
- a token is sent to the address that was given and to no other, and never shown.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
import weakref
from typing import Any, Final, Literal
from urllib.parse import SplitResult, urlencode, urlsplit

from cairn.backoff import backoff_s, jitter
from cairn.errors import (
    CairnError,
    EpochError,
    NoEpochError,
    QueryError,
    StaleEpochError,
    StateNotFoundError,
)

TRIES_MAX: Final = 6
WAIT_S: Final = 0.05
_BUSY: Final = (429, 503)
_HEADERS: Final = {"Accept": "application/json", "Content-Type": "application/json"}
_ERRORS: Final[dict[int, type[CairnError]]] = {
    404: StateNotFoundError,
    409: EpochError,
    410: StaleEpochError,
}
_CODES: Final[dict[str, type[CairnError]]] = {"no-epoch": NoEpochError}
"""Codes that are more precise than the HTTP status."""

Json = dict[str, Any]
"""The body of a request or an answer."""


class Link:
    """To one server. Free for all threads."""

    def __init__(
        self,
        url: str,
        token: str | None,
        control_token: str | None,
        ca: str | None,
        timeout: float,
    ) -> None:
        parts, self.host, self._port = _parse_url(url)
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._prefix = parts.path.rstrip("/")
        given = token or control_token
        self.bearer = None if given is None else f"Bearer {given}"
        self._control_token = control_token
        self._tls = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context(cafile=ca)
        self._timeout = timeout
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

    def get(self, path: str, **query: object) -> Json:
        """Send a request that only reads, and is sent again if it fails."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._request("GET", f"{path}?{urlencode(given)}" if given else path)

    def post(self, path: str, body: Json) -> Json:
        """Send a request like `get`, with a body."""
        return self._request("POST", path, body)

    def control(self, what: str, body: Json) -> Json:
        """Send a request that changes the job, once."""
        if self._control_token is None:
            raise QueryError(
                "this client has no control token\n  next: cairn.client(url, control_token=...)"
            )
        # On its own connection: one that the server has closed would look like a failure.
        own = self._new_connection()
        try:
            try:
                own.http.connect()
            except OSError as error:
                raise self._silent(error) from error
            # A savepoint may take long; keepalive notices if the machine is gone.
            own.http.sock.settimeout(None)
            own.http.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                own.http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            headers = {**_HEADERS, "Authorization": f"Bearer {self._control_token}"}
            try:
                found = self._once(own, "POST", f"/api/control/{what}", encode_json(body), headers)
            except (OSError, http.client.HTTPException) as error:
                raise QueryError(
                    f"{self.url} has not confirmed the {what}: "
                    f"{error or type(error).__name__}\n"
                    "  next: look at /api/points and /api/job before asking again"
                ) from error
            return _answer(*found)
        finally:
            own.close()

    def _silent(self, error: Exception) -> QueryError:
        return QueryError(
            f"{self.url} does not answer: {error or type(error).__name__}\n"
            "  next: check that the job runs, and its address: see run.url"
        )

    def _request(self, method: Literal["GET", "POST"], path: str, body: Json | None = None) -> Json:
        headers = dict(_HEADERS)
        if self.bearer is not None:
            headers["Authorization"] = self.bearer
        data = None if body is None else encode_json(body)
        for left in reversed(range(TRIES_MAX)):
            connection = self._connection()
            try:
                status, text = self._once(connection, method, path, data, headers)
            except (OSError, http.client.HTTPException) as error:
                connection.close()  # The next request opens it again.
                if left == 0:
                    raise self._silent(error) from error
            else:
                if status not in _BUSY or left == 0:
                    return _answer(status, text)
            time.sleep(jitter(backoff_s(TRIES_MAX - left, first_s=WAIT_S)))
        raise AssertionError("the last try returns or raises")

    def _once(
        self,
        connection: _Connection,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str],
    ) -> tuple[int, bytes]:
        connection.http.request(method, self._prefix + path, data, headers)
        response = connection.http.getresponse()
        return response.status, response.read()

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


def _parse_url(url: str) -> tuple[SplitResult, str, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise QueryError(f"a url is http://HOST:PORT, found {url!r}\n  next: see run.url")
    return parts, parts.hostname, port


def encode_json(value: object) -> bytes:
    # Escapes would be six bytes a letter. Half a surrogate pair is for the server to refuse.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="surrogatepass")


def _answer(status: int, text: bytes) -> Json:
    try:
        found: Json = json.loads(text)
        if status < 300:
            return found
        error = found["error"]
        message = f"{error['message']}\n  next: {error['next']}"
        code = error["code"]
    except (ValueError, KeyError, TypeError):
        raise QueryError(
            f"the server answered {status}, and not as cairn does\n  next: is the address right?",
            status=status,
        ) from None
    kind = _CODES.get(code) or _ERRORS.get(status, QueryError)
    raise kind(message, status=status, code=code)
