"""Limits on requests (sizes, rates, how many at once) and the headers of every answer.

Always true here:
- the body of a request that is refused for its size or its missing token is not read;
- requests without a token have a rate of their own: they never use up the rate of clients with one;
- a client that stalls in the middle of its body gets an error after BODY_S seconds;
- every answer, also one to an unexpected error, has the headers that keep a browser safe.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cairn.web.auth import is_public, may_read
from cairn.web.errors import answer_unexpected, error_response

if TYPE_CHECKING:
    from cairn.web.site import Site

BODY_BYTES_MAX: Final = 64 << 10
URL_BYTES_MAX: Final = 8 << 10
BODY_S: Final = 10.0
AT_ONCE_MAX: Final = 128
OPEN_BODIES_MAX: Final = 8
"""Bodies read at once on paths that need no token: forms of /login."""
STRANGERS_SHARE: Final = 0.1
"""Share of `requests_per_s` for requests without a valid token or session: pages of /login."""
STRANGERS_PER_S_MIN: Final = 20.0
"""Enough for a browser to load the login page with all its files, however low the rate is."""
LASTING: Final = "/api/events"
"""Streams of events never end, and have a limit of their own."""

_SAFE: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Rate:
    """Allows `per_s` requests a second, with bursts of a second's worth."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = max(per_s, 1.0)
        self._clock = clock
        self._left = self._burst
        self._at = clock()

    def take(self) -> bool:
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Limits:
    """ASGI middleware, the outermost one: limits rates, and answers unexpected errors."""

    def __init__(self, app: ASGIApp, site: Site) -> None:
        self._app = app
        self._site = site
        per_s = site.settings.requests_per_s
        self._rate = Rate(per_s)
        self._strangers = Rate(min(per_s, max(per_s * STRANGERS_SHARE, STRANGERS_PER_S_MIN)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, send)
        try:
            refusal = self._refusal(scope)
            await (refusal or self._app)(scope, receive, answer)
        except Exception as error:
            response = answer_unexpected(Request(scope), error)
            if not answer.has_begun:
                await response(scope, receive, answer)

    def _refusal(self, scope: Scope) -> Response | None:
        # The token first: it decides which rate applies.
        rate = self._rate if may_read(self._site, scope) else self._strangers
        if not rate.take():
            return _too_many()
        url_bytes = len(scope.get("raw_path") or scope["path"].encode()) + len(
            scope["query_string"]
        )
        if url_bytes > URL_BYTES_MAX:
            return error_response(
                414,
                "url-too-long",
                f"The URL has {url_bytes} bytes, the limit is {URL_BYTES_MAX}",
                "send many or long keys with POST .../lookup",
            )
        return None


class Bodies:
    """ASGI middleware, behind the guard: limits requests at once, and reads bodies whole."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._at_once = asyncio.Semaphore(AT_ONCE_MAX)
        self._open_bodies = asyncio.Semaphore(OPEN_BODIES_MAX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == LASTING:
            await self._app(scope, receive, send)
            return
        has_body = _has_body(Headers(scope=scope))
        places = self._at_once
        if is_public(scope["path"]):
            if not has_body:
                await self._app(scope, receive, send)
                return
            places = self._open_bodies
        if places.locked():
            await _too_many()(scope, receive, send)
            return
        async with places:
            if has_body:
                body = await _read_body(scope, receive)
                if isinstance(body, Response):
                    await body(scope, receive, send)
                    return
                receive = _replay(body, receive)
            await self._app(scope, receive, send)


async def _read_body(scope: Scope, receive: Receive) -> bytes | Response:
    """Return the body, or the response that refuses it."""
    length = Headers(scope=scope).get("content-length", "0")
    if not length.isdecimal() or len(length) > 9 or int(length) > BODY_BYTES_MAX:
        return _too_large()
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in Request(scope, receive).stream():
                body += chunk
                if len(body) > BODY_BYTES_MAX:
                    return _too_large()
    except ClientDisconnect:
        return Response(status_code=400)  # Nobody reads it.
    except TimeoutError:
        return error_response(
            408, "too-slow", f"The body did not arrive within {BODY_S:.0f} s", "send it again"
        )
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields a body which has been read already."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _too_many() -> Response:
    return error_response(429, "too-many", "Too many requests", "try again in a moment")


def _too_large() -> Response:
    return error_response(
        413,
        "too-large",
        f"A body may have at most {BODY_BYTES_MAX} bytes",
        "send fewer keys, or a shorter query",
    )


class _Answer:
    """Sends an answer with the common headers."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._is_static = scope["path"].startswith("/static/")
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = MutableHeaders(scope=message)
            for name, value in _SAFE.items():
                headers.setdefault(name, value)
            if not self._is_static:
                headers["Cache-Control"] = "no-store"
        await self._send(message)
