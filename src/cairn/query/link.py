"""Requests to a job over HTTP: tokens, what is sent again, and which of several drivers leads.

With several addresses, requests go to the driver that leads: a standby redirects to it, and one
that does not answer is followed by the next in turn.

Always true here:
- a request that only reads is sent again when the connection breaks or the server is busy; with
  several addresses also during a fail-over, up to `failover_timeout`;
- a request that changes the job is sent to one driver that accepts it, once, and is waited for as
  long as it takes. A standby refuses it, so it may be sent to the leader then;
- a token is sent to the addresses that were given and to no other, and never shown: a redirect to
  another address, or from https to http, is not followed.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal
from urllib.parse import urlencode

from cairn.backoff import MAX_S, backoff_s, jitter
from cairn.errors import (
    CairnError,
    EpochError,
    NoEpochError,
    QueryError,
    StaleEpochError,
    StateNotFoundError,
)
from cairn.query.server import Found, Server, origin_of

TRIES_MAX: Final = 6
WAIT_S: Final = 0.05
CONNECT_S: Final = 3.0
"""With several addresses a host that is gone must not use up the time for the others."""
FAILOVER_WAIT_MAX_S: Final = 1.0
NO_LEADER: Final = "no-leader"
_BUSY: Final = (429, 503)
_REDIRECT: Final = 307
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
    """To one server, or to the leader of several. Free for all threads."""

    def __init__(
        self,
        urls: str | Sequence[str],
        token: str | None,
        control_token: str | None,
        ca: str | None,
        timeout: float,
        failover_timeout: float = 60.0,
    ) -> None:
        given = [urls] if isinstance(urls, str) else list(urls)
        if not given:
            raise QueryError("a client needs the url of a run\n  next: see run.url")
        connect_s = timeout if len(given) == 1 else min(timeout, CONNECT_S)
        self._servers = [Server(url, ca, timeout, connect_s) for url in given]
        self._at = 0
        """The server that leads, as far as is known."""
        self._failover_s = failover_timeout
        any_token = token or control_token
        self.bearer = None if any_token is None else f"Bearer {any_token}"
        self._control_token = control_token

    @property
    def url(self) -> str:
        """The address that requests go to now."""
        return self._servers[self._at].url

    @property
    def host(self) -> str:
        return self._servers[self._at].host

    @property
    def is_group(self) -> bool:
        return len(self._servers) > 1

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def get(self, path: str, **query: object) -> Json:
        """Send a request that only reads, and is sent again if it fails."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._request("GET", f"{path}?{urlencode(given)}" if given else path)

    def post(self, path: str, body: Json) -> Json:
        """Send a request like `get`, with a body."""
        return self._request("POST", path, body)

    def control(self, what: str, body: Json) -> Json:
        """Send a request that changes the job; one driver gets it."""
        if self._control_token is None:
            raise QueryError(
                "this client has no control token\n  next: cairn.client(url, control_token=...)"
            )
        headers = {**_HEADERS, "Authorization": f"Bearer {self._control_token}"}
        path, data = f"/api/control/{what}", encode_json(body)
        return self._ask(lambda server: server.send_once(path, data, headers), tries_max=1)

    def _request(self, method: Literal["GET", "POST"], path: str, body: Json | None = None) -> Json:
        headers = dict(_HEADERS)
        if self.bearer is not None:
            headers["Authorization"] = self.bearer
        data = None if body is None else encode_json(body)
        return self._ask(
            lambda server: server.send(method, path, data, headers), tries_max=TRIES_MAX
        )

    def _ask(self, send: Callable[[Server], Found], *, tries_max: int) -> Json:
        """Send a request until a driver that leads answers it.

        `tries_max` limits the tries at one server; the search for the leader is limited by time.
        """
        deadline_s = time.monotonic() + self._failover_s
        tries = hops = waits = 0
        while True:
            server = self._servers[self._at]
            found: Found | None = None
            try:
                found = send(server)
            except (OSError, http.client.HTTPException) as error:
                failure = _silent(server, error)
                self._turn_from(server)
                tries += not self.is_group
            else:
                moved = self._follow(server, found)
                if moved is None and (found.status not in _BUSY or tries + 1 >= tries_max):
                    return _answer(found)
                failure = moved or _busy(server)
                tries += moved is None
                if found.status == _REDIRECT and self._servers[self._at] is not server:
                    hops += 1
                    if hops < len(self._servers):
                        continue
            if tries >= tries_max or time.monotonic() >= deadline_s:
                raise failure from failure.__cause__
            hops = 0
            waits += 1
            most_s = FAILOVER_WAIT_MAX_S if self.is_group else MAX_S
            time.sleep(jitter(backoff_s(waits, first_s=WAIT_S, max_s=most_s)))

    def _follow(self, server: Server, found: Found) -> QueryError | None:
        """Turn to another server if this one does not lead; return why it could not be used."""
        if found.status == _REDIRECT:
            leader = None if found.location is None else origin_of(found.location)
            known = [at for at, each in enumerate(self._servers) if each.origin == leader]
            if known and self._servers[known[0]] is not server:
                self._at = known[0]
            else:
                # The leader may be one of the others, under another name.
                self._turn_from(server)
            error = _elsewhere(server, leader and f"{leader[0]}://{leader[1]}:{leader[2]}")
            if not self.is_group:
                raise error
            return error
        if self.is_group and found.status == 503 and _code(found) == NO_LEADER:
            self._turn_from(server)
            return QueryError(
                f"no driver of the job leads: {server.url} waits, too\n"
                "  next: see the logs of the drivers, and cairn leader CHECKPOINT"
            )
        return None

    def _turn_from(self, server: Server) -> None:
        """Go on with the next server, unless another thread has turned already."""
        if self._servers[self._at] is server:
            self._at = (self._at + 1) % len(self._servers)


def _silent(server: Server, error: Exception) -> QueryError:
    failure = QueryError(
        f"{server.url} does not answer: {error or type(error).__name__}\n"
        "  next: check that the job runs, and its address: see run.url"
    )
    failure.__cause__ = error
    return failure


def _busy(server: Server) -> QueryError:
    return QueryError(f"{server.url} is busy\n  next: try again in a moment")


def _elsewhere(server: Server, leader: str | None) -> QueryError:
    return QueryError(
        f"{server.url} waits as a standby, and the leader is at {leader or 'an unknown address'}, "
        "which this client was not given\n"
        "  next: cairn.client([...], token=...) with the addresses of all drivers"
    )


def _code(found: Found) -> str | None:
    try:
        code: str = json.loads(found.text)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return code


def encode_json(value: object) -> bytes:
    # Escapes would be six bytes a letter. Half a surrogate pair is for the server to refuse.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="surrogatepass")


def _answer(found: Found) -> Json:
    status = found.status
    try:
        body: Json = json.loads(found.text)
        if status < 300:
            return body
        error = body["error"]
        message = f"{error['message']}\n  next: {error['next']}"
        code = error["code"]
    except (ValueError, KeyError, TypeError):
        raise QueryError(
            f"the server answered {status}, and not as cairn does\n  next: is the address right?",
            status=status,
        ) from None
    kind = _CODES.get(code) or _ERRORS.get(status, QueryError)
    raise kind(message, status=status, code=code)
