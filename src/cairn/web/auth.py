"""Access control: host names, tokens, sessions, and no requests from pages of other sites.

    Host       on a loopback address, only loopback names: this refuses pages of other sites
               whose name points here (DNS rebinding)
    token      `Authorization: Bearer ...`, or the session cookie of a browser that logged in
    control    a token of its own, always in the header: a cookie is not enough to change a job
    Origin     every request but GET must come from our own page, or from no page at all

Always true here:
- tokens are compared in constant time, and never logged or answered;
- headers of a proxy count only if `public_url` is set;
- only /login and /static/ need no token; they contain nothing about the job.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cairn.driver.serving import is_loopback, public_parts
from cairn.web.errors import ApiError, error_response

if TYPE_CHECKING:
    from cairn.web.site import Site

_PUBLIC: Final = ("/login", "/static/")


class Guard:
    """ASGI middleware: refuses requests without access."""

    def __init__(self, app: ASGIApp, site: Site) -> None:
        self._app = app
        self._site = site
        self._is_loopback = is_loopback(site.settings.host_port()[0])
        url = site.settings.public_url
        self._public = None if url is None else public_parts(url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(scope, Headers(scope=scope))
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if self._is_loopback and not self._is_own_host(headers.get("host", "")):
            return error_response(
                421,
                "wrong-host",
                "This server listens on a loopback address, and the Host is another name",
                "use 127.0.0.1 or localhost; behind a proxy, set Serve(public_url=...)",
            )
        if scope["method"] not in ("GET", "HEAD") and not self._is_own_page(headers):
            return error_response(
                403,
                "other-origin",
                "The request comes from a page of another site",
                "use the dashboard of this server",
            )
        path: str = scope["path"]
        if is_public(path) or may_read(self._site, scope):
            return None
        accepts = headers.get("accept", "")
        if scope["method"] == "GET" and "text/html" in accepts and not path.startswith("/api/"):
            return RedirectResponse(f"/login?next={quote(path, safe='/')}", 303)
        return no_token()

    def _is_own_host(self, host: str) -> bool:
        is_public_name = self._public is not None and host.lower() == self._public[1]
        return is_public_name or _is_local_host(host)

    def _is_own_page(self, headers: Headers) -> bool:
        """True if our own page sent the request, or a program that is not a browser."""
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = headers.get("origin")
        if origin is None:
            return True
        # A proxy may send its own name for this server as Host: the browser's is the public one.
        if self._public is not None and public_parts(origin) == self._public:
            return True
        try:
            return urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
        except ValueError:
            return False


def is_https(site: Site, request: HTTPConnection) -> bool:
    """True if the browser uses TLS, to this server or to the proxy in front of it.

    A proxy sends `X-Forwarded-Proto`, which counts only if a proxy is configured.
    """
    if request.url.scheme == "https":
        return True
    if site.settings.public_url is None:
        return False
    public = public_parts(site.settings.public_url)
    if public is not None and public == ("https", request.headers.get("host", "").lower()):
        return True
    # If there are several proxies, the first one faces the browser.
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0]
    return forwarded.strip().lower() == "https"


def is_public(path: str) -> bool:
    """True if the path needs no token."""
    return path == _PUBLIC[0] or path.startswith(_PUBLIC[1])


def no_token() -> Response:
    return error_response(
        401,
        "no-token",
        "The request has no token, or a wrong one",
        "send the header Authorization: Bearer TOKEN, or log in at /login",
        {"WWW-Authenticate": "Bearer"},
    )


def may_read(site: Site, scope: Scope) -> bool:
    """True if a request has a valid token or session, or needs none."""
    if site.settings.token is None:
        return True
    request = HTTPConnection(scope)
    given = bearer(request.headers)
    # Compare both, so that the time does not depend on the result of the first.
    reads, controls = is_token(given, site.settings.token), is_control(site, given)
    return reads or controls or session_of(site, request) is not None


def session_of(site: Site, request: HTTPConnection) -> str | None:
    """Return the session of a browser that has logged in, until it expires."""
    session = request.cookies.get(cookie_name(request))
    return session if site.sessions.is_open(session) else None


def check_control(site: Site, request: HTTPConnection) -> None:
    """Raise ApiError unless the request has the control token."""
    if site.settings.control_token is None:
        raise ApiError(
            403,
            "control-off",
            "The server was started without a control token",
            "start the job with serve=cairn.Serve(control_token=...)",
        )
    if not is_control(site, bearer(request.headers)):
        raise ApiError(
            401,
            "no-token",
            "The request does not have the control token",
            "send the header Authorization: Bearer CONTROL_TOKEN",
            {"WWW-Authenticate": "Bearer"},
        )


def is_control(site: Site, given: str) -> bool:
    token = site.settings.control_token
    return token is not None and is_token(given, token)


def is_token(given: str, token: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(_digest(given), _digest(token))


def _digest(text: str) -> bytes:
    return sha256(text.encode(errors="surrogateescape")).digest()


def bearer(headers: Headers) -> str:
    """Return the bearer token of a request, or an empty string."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def cookie_name(request: HTTPConnection) -> str:
    """Return a name with the port: a browser sends cookies to all ports of a host."""
    server = request.scope.get("server") or ("", 0)
    return f"cairn_session_{server[1]}"


def _is_local_host(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)
