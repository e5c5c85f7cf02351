"""The application: all routes of a site, behind its guards."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.web import openapi
from cairn.web.answers import json_response
from cairn.web.auth import Guard
from cairn.web.errors import HANDLERS
from cairn.web.limits import Limits
from cairn.web.site import Site

_PARTS: Final = ("login", "states", "control", "events", "overview", "pages", "prometheus")


def _parts() -> list[Any]:
    names = [f"cairn.web.{name}" for name in _PARTS]
    return [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]


def make_app(site: Site) -> Starlette:
    """What an ASGI server runs."""
    parts = _parts()
    routes = [route for part in parts for route in part.routes(site)]
    routes.append(Route("/api/openapi.json", lambda request: _openapi(request, site)))
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
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
    """The API of a site, as OpenAPI."""
    docs = [DOCS, *(part.DOCS for part in _parts() if hasattr(part, "DOCS"))]
    return openapi.described(docs, version="1", has_token=site.settings.token is not None)
