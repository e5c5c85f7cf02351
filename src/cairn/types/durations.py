"""Durations, written as text ("10 seconds", "1 day 12 hours") or given as `datetime.timedelta`."""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

from cairn.errors import PlanError

Duration = str | dt.timedelta
"""A duration as users give it: "10 seconds", "1 hour", `timedelta(days=7)`."""

MIN_MS: Final = -62_135_596_800_000
"""The first millisecond of year 1: no watermark is earlier."""
MAX_MS: Final = 253_402_300_799_999
"""The last millisecond of year 9999: the watermark when the input has ended."""

_UNITS_MS = {
    "millisecond": 1,
    "ms": 1,
    "second": 1_000,
    "s": 1_000,
    "minute": 60_000,
    "min": 60_000,
    "hour": 3_600_000,
    "h": 3_600_000,
    "day": 86_400_000,
    "d": 86_400_000,
    "week": 7 * 86_400_000,
}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


def duration_ms(
    duration: Duration, what: str, *, positive: bool = False, signed: bool = False
) -> int:
    """Return the duration in milliseconds, rounded; PlanError calls it `what`.

    A duration is not negative unless `signed` ("-5 minutes"), and not zero if `positive`.
    """
    if isinstance(duration, dt.timedelta):
        ms = round(duration / dt.timedelta(milliseconds=1))
    else:
        ms = _parse_ms(duration, what)
    if ms < 0 and not signed:
        raise PlanError(f"{what} must not be negative, found {duration!r}")
    if ms <= 0 and positive:
        raise PlanError(f"{what} must be positive, found {duration!r}")
    return ms


def _parse_ms(text: object, what: str) -> int:
    lowered = text.strip().lower() if isinstance(text, str) else ""
    sign, unsigned = (-1, lowered[1:]) if lowered.startswith("-") else (1, lowered)
    total = 0.0
    at = 0
    while match := _PART.match(unsigned, at):
        unit = match[2] if match[2] in _UNITS_MS else match[2].removesuffix("s")
        if unit not in _UNITS_MS:
            break
        total += float(match[1]) * _UNITS_MS[unit]
        at = match.end()
    if not unsigned or at != len(unsigned):
        raise PlanError(
            f"{what} must be a span of time, found {text!r}\n"
            "  expected: a number and a unit, such as '10 seconds', '1 hour' or '7 days', "
            "or a datetime.timedelta"
        )
    return sign * round(total)


def span_text(ms: int) -> str:
    """Return a duration as one would write it: "10 seconds", "1 day", "90 minutes"."""
    units = ("week", "day", "hour", "minute", "second")
    unit = next((u for u in units if ms and ms % _UNITS_MS[u] == 0), "millisecond")
    count = ms // _UNITS_MS[unit]
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"
