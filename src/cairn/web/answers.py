"""JSON answers, and checks of the parameters and bodies of requests.

Always true here:
- an invalid parameter raises an ApiError with status 400 that names it, never another exception.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar, overload

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cairn.web.errors import ApiError

EPOCH_MAX: Final = 10**12 - 1
"""The log numbers its records with 12 digits."""
EpochNumber = Annotated[int, msgspec.Meta(ge=1, le=EPOCH_MAX)]

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


def json_response(data: object, status: int = 200) -> Response:
    return Response(_encode(data), status, media_type="application/json")


@overload
def query_int(request: Request, name: str, *, default: int, least: int, most: int) -> int: ...
@overload
def query_int(
    request: Request, name: str, *, default: None, least: int, most: int
) -> int | None: ...
def query_int(
    request: Request, name: str, *, default: int | None, least: int, most: int
) -> int | None:
    """Return a whole number of the query, within bounds."""
    text = query_text(request, name, chars_max=20)
    return default if text is None else _int(name, text, least, most)


def int_in_path(request: Request, name: str, *, least: int = 0, most: int = EPOCH_MAX) -> int:
    return _int(name, str(request.path_params[name]), least, most)


def query_epoch(request: Request, name: str = "epoch") -> int | None:
    return query_int(request, name, default=None, least=1, most=EPOCH_MAX)


def query_text(request: Request, name: str, *, chars_max: int = 1000) -> str | None:
    """Return a text of the query, given at most once; None if it is missing."""
    found = request.query_params.getlist(name)
    if len(found) > 1:
        raise ApiError(400, "bad-request", f"{name} is given {len(found)} times", "give it once")
    if found and len(found[0]) > chars_max:
        raise ApiError(400, "bad-request", f"{name} is longer than {chars_max} characters")
    return found[0] if found else None


def _int(name: str, text: str, least: int, most: int) -> int:
    # int() also accepts "１", " 1 " and "1_000".
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(digits) <= 16 and least <= int(text) <= most:
        return int(text)
    raise ApiError(
        400, "bad-request", f"{name} must be a whole number from {least} to {most}, found {text!r}"
    )


async def json_body(request: Request, shape: type[T]) -> T:
    """Return the body as a value of a msgspec type, or raise an ApiError with 415 or 400."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, "not-json", "A body must be application/json", "set the Content-Type header"
        )
    try:
        return msgspec.json.decode(await request.body(), type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "bad-request", f"The body is invalid: {error}") from None
