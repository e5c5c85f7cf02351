"""A server whose driver waits: it answers for itself, and sends readers to the leader.

    /, /static/, /login, /logout    the page of this driver: its status, and who leads
    /metrics, /api/leader           of this driver
    everything else                 307 to the same path of the leader; 503 if none is known

Always true here:
- only clients with access learn where the leader is: the guard is in front;
- the address of a redirect has the path and query of the request, and nothing else: a token is
  in a header or a cookie, never in an address;
- a redirect never leads to this server, nor to a loopback address of another machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cairn.driver.group import Group
from cairn.driver.serving import is_loopback, public_parts
from cairn.web.auth import is_public
from cairn.web.errors import error_response

if TYPE_CHECKING:
    from cairn.web.site import Site

OWN_PATHS: Final = ("/", "/logout", "/metrics", "/api/leader")
_RETRY: Final = "try again in a moment; /api/leader shows who leads"


class Standing:
    """ASGI middleware, the innermost: answers while the run of this process waits."""

    def __init__(self, app: ASGIApp, site: Site) -> None:
        self._app = app
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = self._site.run
        if scope["type"] != "http" or run is None or is_own(scope["path"]) or not run.is_waiting:
            await self._app(scope, receive, send)
            return
        group = await run_in_threadpool(self._site.group)
        response = answer_elsewhere(group, path_of(scope))
        await response(scope, receive, send)


def is_own(path: str) -> bool:
    """True if a driver that waits answers this path itself."""
    return path in OWN_PATHS or is_public(path)


def path_of(scope: Scope) -> str:
    """Return path and query of a request, as they were sent."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw.partition(b"?")[0].decode("latin-1")
    query = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def answer_elsewhere(group: Group | None, path: str) -> Response:
    """Return a redirect to the leader, or the error that says why there is none."""
    leader = None if group is None else group.leader
    this = None if group is None else group.this
    if leader is None or (this is not None and leader.identity == this.identity):
        return error_response(503, "no-leader", "No driver leads the job at this moment", _RETRY)
    where = f"The driver on {leader.host}, pid {leader.pid}, leads the job"
    if leader.url is None or public_parts(leader.url) is None:
        return error_response(
            503, "no-leader", f"{where}, and serves no HTTP API", "start it with serve="
        )
    is_elsewhere = this is None or this.host != leader.host
    if is_elsewhere and is_loopback(urlsplit(leader.url).hostname or ""):
        return error_response(
            503,
            "no-leader",
            f"{where}, and serves on a loopback address that only its own machine reaches",
            "start all drivers with serve= on an address that the others reach, or a public_url",
        )
    if this is not None and this.url == leader.url:
        return error_response(
            503, "no-leader", f"{where}, at the address of this driver", "give each its public_url"
        )
    body = msgspec.json.encode(
        {
            "error": {
                "code": "standby",
                "message": f"{where}; this one waits",
                "next": f"follow the redirect, or use {leader.url}",
            }
        }
    )
    headers = {"Location": leader.url.rstrip("/") + path, "Cache-Control": "no-store"}
    return Response(body, 307, headers, media_type="application/json")
