"""Dead letters: rows that a function failed on, with what there is to know about it.

    operator     the uid
    input        of connected streams the name of the row's; of a broadcast row "broadcast"
    error        type and message
    traceback    where, in the user's code
    key          the key of the row: text as it is, other values as JSON
    row          the row as a JSON object, to be read back with Spark's from_json; of a timer
                 {"timer": "event" or "processing", "time_ms": its time}
    event_time   of the row, or of an event timer
    epoch        in which it failed

Always true here:
- a letter is a function of the row, the error and the epoch: attempts at an epoch agree in it.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
import re
import traceback
from typing import Any, Final, Literal

import msgspec

from cairn.errors import PlanError
from cairn.sinks.json_lines import float_text, interval_text
from cairn.types import parse_schema
from cairn.user_code import raised_at

SCHEMA: Final = parse_schema(
    "operator string, input string, error string, traceback string, key string, row string, "
    "event_time timestamp, epoch bigint"
)

BROADCAST: Final = "broadcast"
"""What the input of broadcast rows is called."""

OnError = Literal["fail", "dead-letter"]
ON_ERROR: Final[tuple[OnError, ...]] = ("fail", "dead-letter")

SAMPLE_MAX: Final = 5
"""Letters of an operator that an epoch's record shows; the others are only counted there."""
SAMPLE_CHARS_MAX: Final = 400
ERROR_CHARS_MAX: Final = 4000
TRACEBACK_CHARS_MAX: Final = 20_000
_OURS: Final = "cairn.slot."
_MICROSECOND = dt.timedelta(microseconds=1)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_REPEATED = re.compile(r"\[Previous line repeated \d+ more times\]")


class LetterSample(msgspec.Struct, frozen=True):
    """A row that was put aside, cut short: for people who look at the epoch."""

    error: str
    key: str | None
    row: str
    input: str | None = None
    at: str | None = None
    """The place in the user's code: FILE:LINE in FUNCTION."""


def sample_of(error: BaseException, *, key: Any, row: str, input: str | None) -> LetterSample:
    """Return what is shown of a row that was put aside."""
    return LetterSample(
        error=_cut(error_text(error)),
        key=None if key is None else _cut(sendable(key_text(key) or "")),
        row=_cut(sendable(row)),
        input=input,
        at=raised_at(error),
    )


def _cut(text: str) -> str:
    return text if len(text) <= SAMPLE_CHARS_MAX else text[: SAMPLE_CHARS_MAX - 1] + "…"


def check_on_error(on_error: str) -> None:
    if on_error not in ON_ERROR:
        raise PlanError(f"on_error must be 'fail' or 'dead-letter', found {on_error!r}")


def json_text(value: Any) -> str:
    """A value as JSON that Spark reads back: rows by the names of their columns."""
    try:
        return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return steady(repr(value))


def key_text(key: Any) -> str | None:
    """A key for people, and to search for."""
    return key if key is None or isinstance(key, str) else json_text(key)


def timer_json(kind: str, time_ms: int) -> str:
    return json.dumps({"timer": kind, "time_ms": time_ms})


def error_text(error: BaseException) -> str:
    """Type and message."""
    name, message = type(error).__name__, message_of(error)
    return sendable(steady(f"{name}: {message}" if message else name)[:ERROR_CHARS_MAX])


def message_of(error: BaseException) -> str:
    """Return the message of an error of the user's, whose class may be broken itself."""
    try:
        return str(error)
    except Exception as broken:
        return f"(its message could not be made: {type(broken).__name__})"


def traceback_text(error: BaseException) -> str:
    """The user's frames: what lies above them is ours."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        frames = frames.tb_next
    try:
        lines = traceback.format_exception(type(error), error, frames)
    except Exception:
        # Of an error that cannot be printed.
        lines = traceback.format_tb(frames)
    # How deep a recursion went depends on how deep it began.
    text = _REPEATED.sub("[Previous line repeated many times]", "".join(lines))
    return sendable(steady(text)[-TRACEBACK_CHARS_MAX:])


def time_of(time_ms: int | None) -> dt.datetime | None:
    """Milliseconds since 1970 as a timestamp; None beyond the calendar."""
    if time_ms is None:
        return None
    try:
        return _EPOCH + dt.timedelta(milliseconds=time_ms)
    except OverflowError:
        return None


def _plain(value: Any) -> Any:
    """What JSON has a form for, in the form that Spark's own `to_json` gives it."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return sendable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else float_text(value)
    if isinstance(value, decimal.Decimal):
        return format(value, "f")  # As text: a number would be rounded by who reads it.
    if isinstance(value, dt.datetime):
        text = value.isoformat()
        return text.removesuffix("+00:00") + "Z" if text.endswith("+00:00") else text
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return interval_text(value // _MICROSECOND)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, tuple) and (names := getattr(type(value), "_fields", None)):
        return {name: _plain(part) for name, part in zip(names, value, strict=True)}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {_name(name): _plain(part) for name, part in value.items()}
    raise TypeError(f"no JSON for {type(value).__name__}")


def _name(key: Any) -> str:
    plain = _plain(key)
    return plain if isinstance(plain, str) else json.dumps(plain)


def steady(text: str) -> str:
    """Without addresses: they differ between attempts."""
    return _ADDRESS.sub("at 0x…", text)


def sendable(text: str) -> str:
    """Return a text without half characters: no file and no message takes those."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
