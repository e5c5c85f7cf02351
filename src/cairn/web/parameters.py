"""Refuse query parameters that the OpenAPI document does not describe.

Always true here:
- a route under /api/ only gets parameters that its description names: a typo such as ?limt=5 is
  an error, and is not ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cairn.web.errors import ApiError
from cairn.web.openapi import Schema


def check_parameters(routes: Iterable[Route], paths: Mapping[str, Schema]) -> None:
    """Put a check in front of every route under /api/."""
    for route in routes:
        described = paths.get(re.sub(r":\w+}", "}", route.path), {})
        if route.path.startswith("/api/"):
            known = {method: _names(operation) for method, operation in described.items()}
            route.app = _Checked(route.app, known)


def _names(operation: Mapping[str, list[dict[str, str]]]) -> list[str]:
    return [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]


class _Checked:
    """A route behind the check of its parameters."""

    def __init__(self, app: ASGIApp, known: dict[str, list[str]]) -> None:
        self._app = app
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "get" if scope["method"] == "HEAD" else scope["method"].lower()
        # None: the route refuses the method itself.
        known = self._known.get(method)
        given = () if known is None else Request(scope).query_params.keys()
        unknown = next((name for name in given if name not in (known or ())), None)
        if unknown is not None:
            raise ApiError(
                400,
                "bad-request",
                f"Unknown parameter {unknown[:100]!r}",
                f"known parameters: {', '.join(known)}" if known else "leave it out",
            )
        await self._app(scope, receive, send)
