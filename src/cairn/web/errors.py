"""Errors as answers: one JSON shape, `{"error": {"code", "message", "next"}}`.

Always true here:
- what nobody foresaw is logged and answered without a word about it;
- a message of ours is one that a client may read: it names things of the checkpoint only.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cairn.errors import (
    CairnError,
    CommitError,
    EpochError,
    NoEpochError,
    PlanError,
    QueryError,
    RestoreError,
    StaleEpochError,
    StateNotFoundError,
)
from cairn.logs import logger

_HTTP: Final = {
    400: ("bad-request", "The request is not as described"),
    404: ("not-found", "There is nothing here"),
    405: ("method-not-allowed", "That cannot be done here"),
}
# The first that fits: subclasses come before what they are made from.
_OURS: Final[tuple[tuple[type[CairnError], int, str], ...]] = (
    (StateNotFoundError, 404, "not-found"),
    (NoEpochError, 503, "no-epoch"),
    (StaleEpochError, 410, "gone"),
    (QueryError, 400, "bad-request"),
    (PlanError, 400, "bad-request"),
    (EpochError, 409, "conflict"),
    (CommitError, 409, "conflict"),
    (RestoreError, 409, "unreadable"),
)
_SEE: Final = "see /api/openapi.json"


class ApiError(Exception):
    """What a client did that cannot be answered, and what it can do instead."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        next: str = _SEE,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.next = next
        self.headers = headers


def error_response(
    status: int, code: str, message: str, next: str = _SEE, headers: dict[str, str] | None = None
) -> Response:
    if status in (429, 503):
        headers = {"Retry-After": "1", **(headers or {})}
    body = msgspec.json.encode({"error": {"code": code, "message": message, "next": next}})
    return Response(body, status, headers, media_type="application/json")


def of_cairn(error: CairnError) -> tuple[int, str, str, str]:
    """(status, code, message, next) of an error of ours."""
    status, code = next(
        ((status, code) for kind, status, code in _OURS if isinstance(error, kind)),
        (500, "internal"),
    )
    message, _, step = str(error).partition("\n  next: ")
    return status, code, message, step or _SEE


def api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error.status, error.code, error.message, error.next, error.headers)


def cairn_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CairnError)
    status, code, message, step = of_cairn(error)
    if status == 500:
        return unforeseen(request, error)
    return error_response(status, code, message, step)


def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, message = _HTTP.get(error.status_code, ("error", "That did not work"))
    headers = dict(error.headers) if error.headers else None
    return error_response(error.status_code, code, message, headers=headers)


def unforeseen(request: Request, error: Exception) -> Response:
    logger.error("a request failed: %s %s", request.method, request.url.path, exc_info=error)
    return error_response(
        500, "internal", "The server failed on this request", "see the log of the server"
    )


HANDLERS: Final[dict[Any, Any]] = {
    ApiError: api_error,
    CairnError: cairn_error,
    HTTPException: http_error,
}
