"""How much may be asked: sizes, rates, requests at once; and what every answer carries.

Always true here:
- a request that is refused for its size, or has no token, has not been read;
- requests without a token have a rate of their own, so they take nothing from those with one;
- a client that stalls in the middle of its body is let go after BODY_S seconds;
- an answer, also one to an error that nobody foresaw, has the headers that keep a browser safe.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cairn.web.auth import is_public, may_read
from cairn.web.errors import error_response, unforeseen

if TYPE_CHECKING:
    from cairn.web.site import Site

BODY_BYTES_MAX: Final = 64 << 10
URL_BYTES_MAX: Final = 8 << 10
BODY_S: Final = 10.0
AT_ONCE_MAX: Final = 128
OPEN_BODIES_MAX: Final = 8
"""Bodies that are read at once of those who need no token: forms of /login."""
STRANGERS_SHARE: Final = 0.1
"""Share of `requests_per_s` for requests without a valid token or session: pages of /login."""
STRANGERS_PER_S_MIN: Final = 20.0
"""So that a browser can load the login page with all its parts, however low the rate is."""
LASTING: Final = "/api/events"
"""Bounded by a number of its own, and never done."""

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
    """ASGI middleware, the outermost one: rates, and the last word on errors."""

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
            response = unforeseen(Request(scope), error)
            if not answer.has_begun:
                await response(scope, receive, answer)

    def _refusal(self, scope: Scope) -> Response | None:
        # The token first: which rate a request takes from depends on it.
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
                f"The URL has {url_bytes} bytes, at most {URL_BYTES_MAX} are taken",
                "send many or long keys with POST .../lookup",
            )
        return None


class Bodies:
    """ASGI middleware, behind the guard: bodies are read whole, and requests counted."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._at_once = 0
        self._open_bodies = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == LASTING:
            await self._app(scope, receive, send)
        elif is_public(scope["path"]):
            await self._public(scope, receive, send)
        elif self._at_once >= AT_ONCE_MAX:
            await _too_many()(scope, receive, send)
        else:
            self._at_once += 1
            try:
                await self._answered(scope, receive, send)
            finally:
                self._at_once -= 1

    async def _public(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _has_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
        elif self._open_bodies >= OPEN_BODIES_MAX:
            await _too_many()(scope, receive, send)
        else:
            self._open_bodies += 1
            try:
                await self._answered(scope, receive, send)
            finally:
                self._open_bodies -= 1

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = await self._bounded(scope, receive, send)
        if refusal is not None:
            await refusal(scope, receive, send)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        """Run the request with its body, read whole; or what is wrong with the body."""
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 9 or int(length) > BODY_BYTES_MAX:
            return _too_large()
        if not _has_body(headers):
            await self._app(scope, receive, send)
            return None
        body = b""
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None  # The client is gone.
                    body += message.get("body", b"")
                    if len(body) > BODY_BYTES_MAX:
                        return _too_large()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            return error_response(
                408, "too-slow", f"The body did not come within {BODY_S:.0f} s", "send it again"
            )
        await self._app(scope, _Again(body, receive), send)
        return None


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _too_many() -> Response:
    return error_response(429, "too-many", "Too many requests", "come again in a moment")


def _too_large() -> Response:
    return error_response(
        413,
        "too-large",
        f"A body may have at most {BODY_BYTES_MAX} bytes",
        "ask for fewer things at once",
    )


class _Again:
    """Receives a body that has been read already."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Answer:
    """Sends an answer, with the headers that are on all of them."""

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
