"""The ASGI application: all routes of a site, behind its guards."""

from __future__ import annotations

from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.web import (
    control,
    events,
    leading,
    login,
    openapi,
    overview,
    pages,
    prometheus,
    states,
)
from cairn.web.answers import json_response
from cairn.web.auth import Guard
from cairn.web.errors import HANDLERS
from cairn.web.limits import Bodies, Limits
from cairn.web.parameters import check_parameters
from cairn.web.site import Site
from cairn.web.standing import Standing

_PARTS: Final = (login, states, control, events, leading, overview, pages, prometheus)
"""Each has `routes(site)`; those with an API have DOCS."""


def make_app(site: Site) -> Starlette:
    """Return the application for an ASGI server."""
    routes = [route for part in _PARTS for route in part.routes(site)]
    routes.append(Route("/api/openapi.json", lambda request: _openapi(request, site)))
    check_parameters(routes, description(site)["paths"])
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    # The last one added sees a request first.
    app.add_middleware(Standing, site=site)
    app.add_middleware(Bodies)
    app.add_middleware(Guard, site=site)
    app.add_middleware(Limits, site=site)
    app.router.redirect_slashes = False
    return app


DOCS: Final[openapi.Docs] = {
    "/api/openapi.json": {
        "get": openapi.operation("This description", answer=openapi.objekt(openapi=openapi.STRING))
    }
}


def _openapi(request: Request, site: Site) -> Response:
    return json_response(description(site))


def description(site: Site) -> dict[str, Any]:
    """Return the OpenAPI document of a site."""
    docs = [DOCS, *(getattr(part, "DOCS", {}) for part in _PARTS)]
    return openapi.describe(docs, version="1", has_token=site.settings.token is not None)
