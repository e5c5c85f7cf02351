"""Errors as JSON answers: `{"error": {"code", "message", "next"}}`.

Always true here:
- an unexpected error is logged, and the answer has no details of it;
- a message never shows anything but facts of the checkpoint.
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
    400: ("bad-request", "The request is invalid"),
    404: ("not-found", "This path does not exist"),
    405: ("method-not-allowed", "This path does not take that method"),
}
# The first match counts: subclasses come before their base class.
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
    """A request that is refused: the reason, and the next step for the client."""

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


def describe(error: CairnError) -> tuple[int, str, str, str]:
    """Return (status, code, message, next)."""
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
    status, code, message, step = describe(error)
    if status == 500:
        return answer_unexpected(request, error)
    return error_response(status, code, message, step)


def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, message = _HTTP.get(error.status_code, ("error", "The request failed"))
    headers = dict(error.headers) if error.headers else None
    return error_response(error.status_code, code, message, headers=headers)


def answer_unexpected(request: Request, error: Exception) -> Response:
    logger.error("a request failed: %s %s", request.method, request.url.path, exc_info=error)
    return error_response(
        500, "internal", "The server failed on this request", "see the log of the server"
    )


HANDLERS: Final[dict[Any, Any]] = {
    ApiError: api_error,
    CairnError: cairn_error,
    HTTPException: http_error,
}
