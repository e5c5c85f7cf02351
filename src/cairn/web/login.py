"""Log in with a browser: the token once, then a session cookie.

Always true here:
- every wrong token gets the same answer;
- the redirect after a login stays on this server;
- after a logout the session is gone, so a copy of the cookie is useless.
"""

from __future__ import annotations

from html import escape
from typing import Final
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from cairn.web.auth import cookie_name, is_control, is_https, is_token, session_of
from cairn.web.sessions import SESSION_S
from cairn.web.site import Site

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>cairn: log in</title>
<link rel="icon" href="/static/mark.svg" type="image/svg+xml">
<link rel="stylesheet" href="/static/login.css">
<script src="/static/theme.js"></script>
</head>
<body class="login">
<main>
<h1>cairn</h1>
<p role="status">{message}</p>
<form method="post" action="/login">
<input type="hidden" name="next" value="{next}">
<label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button type="submit">Log in</button>
</form>
</main>
</body>
</html>
"""


def routes(site: Site) -> list[Route]:
    async def show(request: Request) -> Response:
        return _page("This dashboard needs a token.", request.query_params.get("next", "/"))

    async def enter(request: Request) -> Response:
        body = (await request.body()).decode(errors="replace")
        try:
            fields = parse_qs(body, max_num_fields=10)
        except ValueError:
            fields = {}  # Our form has two fields.
        given, next = (fields.get(name, [""])[0] for name in ("token", "next"))
        token = site.settings.token
        is_valid = token is None or is_token(given, token)
        if not (is_control(site, given) or is_valid):
            return _page("This token is wrong.", next, 401)
        response = RedirectResponse(_own_path(next), 303)
        _set_cookie(response, request, site, site.sessions.open(), int(SESSION_S))
        return response

    async def leave(request: Request) -> Response:
        session = session_of(site, request)
        if session is not None:
            site.sessions.close(session)
        response = RedirectResponse("/login", 303)
        _set_cookie(response, request, site, "", 0)
        return response

    return [
        Route("/login", show),
        Route("/login", enter, methods=["POST"]),
        Route("/logout", leave, methods=["POST"]),
    ]


def _set_cookie(response: Response, request: Request, site: Site, session: str, age_s: int) -> None:
    response.set_cookie(
        cookie_name(request),
        session,
        max_age=age_s,
        httponly=True,
        samesite="strict",
        secure=is_https(site, request),
    )


def _own_path(path: str) -> str:
    """Return the path, or "/" if it leads to another server, as //name and /\\name do."""
    is_own = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_own else "/"


def _page(message: str, next: str, status: int = 200) -> Response:
    # Without this policy a browser leaves the origin out of the form it sends.
    return HTMLResponse(
        _PAGE.format(message=escape(message), next=escape(_own_path(next))),
        status,
        {"Referrer-Policy": "same-origin"},
    )
