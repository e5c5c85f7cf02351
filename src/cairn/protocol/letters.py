"""Dead letters: rows that a function failed on, with the error.

    operator     the uid
    input        the name of the connected stream, or "broadcast" for a broadcast row
    error        type and message
    traceback    the frames of the user's code
    key          the key of the row: text as it is, other values as JSON
    row          the row as a JSON object for Spark's from_json; for a timer
                 {"timer": "event" or "processing", "time_ms": its time}
    event_time   the event time of the row or timer
    epoch        the epoch in which it failed

Always true here:
- a letter depends only on the row, the error and the epoch: all attempts make the same one.
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

from cairn.errors import PlanError
from cairn.report.epoch import LetterSample
from cairn.sinks.json_lines import float_text, interval_text
from cairn.types import parse_schema
from cairn.user_code import find_raise

SCHEMA: Final = parse_schema(
    "operator string, input string, error string, traceback string, key string, row string, "
    "event_time timestamp, epoch bigint"
)

BROADCAST: Final = "broadcast"
"""The `input` of broadcast rows."""

OnError = Literal["fail", "dead-letter"]
ON_ERROR: Final[tuple[OnError, ...]] = ("fail", "dead-letter")

SAMPLE_MAX: Final = 5
"""Letters of an operator that an epoch's record contains; it counts the others."""
SAMPLE_CHARS_MAX: Final = 400
ERROR_CHARS_MAX: Final = 4000
TRACEBACK_CHARS_MAX: Final = 20_000
_OURS: Final = "cairn.slot."
_MICROSECOND = dt.timedelta(microseconds=1)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_REPEATED = re.compile(r"\[Previous line repeated \d+ more times\]")


def sample_of(error: BaseException, *, key: Any, row: str, input: str | None) -> LetterSample:
    """Return the short form of a letter, for an epoch's record."""
    return LetterSample(
        error=_cut(error_text(error)),
        key=None if key is None else _cut(sendable(key_text(key) or "")),
        row=_cut(sendable(row)),
        input=input,
        at=find_raise(error),
    )


def _cut(text: str) -> str:
    return text if len(text) <= SAMPLE_CHARS_MAX else text[: SAMPLE_CHARS_MAX - 1] + "…"


def check_on_error(on_error: str) -> None:
    if on_error not in ON_ERROR:
        raise PlanError(f"on_error must be 'fail' or 'dead-letter', found {on_error!r}")


def json_text(value: Any) -> str:
    """Return a value as JSON that Spark reads back: rows become objects."""
    try:
        return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return steady(repr(value))


def key_text(key: Any) -> str | None:
    """Return a key as text, for people and for searches."""
    return key if key is None or isinstance(key, str) else json_text(key)


def timer_json(kind: str, time_ms: int) -> str:
    return json.dumps({"timer": kind, "time_ms": time_ms})


def error_text(error: BaseException) -> str:
    """Return the type and the message of an error."""
    name, message = type(error).__name__, message_of(error)
    return sendable(steady(f"{name}: {message}" if message else name)[:ERROR_CHARS_MAX])


def message_of(error: BaseException) -> str:
    """Return the message of a user's error, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception as broken:
        return f"(str() of it raised {type(broken).__name__})"


def traceback_text(error: BaseException) -> str:
    """Return the traceback from the first frame of the user's code."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        frames = frames.tb_next
    try:
        lines = traceback.format_exception(type(error), error, frames)
    except Exception:
        # The error itself cannot be printed.
        lines = traceback.format_tb(frames)
    # The depth of a recursion depends on the stack it began on, which differs between attempts.
    text = _REPEATED.sub("[Previous line repeated many times]", "".join(lines))
    return sendable(steady(text)[-TRACEBACK_CHARS_MAX:])


def time_of(time_ms: int | None) -> dt.datetime | None:
    """Return milliseconds since 1970 as a timestamp; None beyond the calendar."""
    if time_ms is None:
        return None
    try:
        return _EPOCH + dt.timedelta(milliseconds=time_ms)
    except OverflowError:
        return None


def _plain(value: Any) -> Any:
    """Return a value of types that JSON has, in the form of Spark's `to_json`."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return sendable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else float_text(value)
    if isinstance(value, decimal.Decimal):
        return format(value, "f")  # As text: readers would round a number.
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
    """Replace memory addresses: they differ between attempts."""
    return _ADDRESS.sub("at 0x…", text)


def sendable(text: str) -> str:
    """Replace lone surrogates: neither files nor messages can hold them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
