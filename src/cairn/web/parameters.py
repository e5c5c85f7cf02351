"""Parameters of a query that nobody has described are refused.

Always true here:
- a route under /api/ is asked only with parameters that its description names: a slip such as
  ?limt=5 is told, not left aside.
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
    """Let routes be asked only as they are described."""
    for route in routes:
        described = paths.get(re.sub(r":\w+}", "}", route.path), {})
        if route.path.startswith("/api/"):
            known = {method: _names(operation) for method, operation in described.items()}
            route.app = _Checked(route.app, known)


def _names(operation: Mapping[str, list[dict[str, str]]]) -> list[str]:
    return [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]


class _Checked:
    """A route, behind a look at its parameters."""

    def __init__(self, app: ASGIApp, known: dict[str, list[str]]) -> None:
        self._app = app
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "get" if scope["method"] == "HEAD" else scope["method"].lower()
        # None: it cannot be done here, which the route itself says.
        known = self._known.get(method)
        given = () if known is None else Request(scope).query_params.keys()
        unknown = next((name for name in given if name not in (known or ())), None)
        if unknown is not None:
            raise ApiError(
                400,
                "bad-request",
                f"There is no parameter {unknown[:100]!r} here",
                f"it takes {', '.join(known)}" if known else "it takes none",
            )
        await self._app(scope, receive, send)
