"""Spans of time as people write them: "10 seconds", "1 hour", "7 days"."""

from __future__ import annotations

import re
from typing import Final

from cairn.errors import PlanError

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


def duration_ms(text: str, what: str) -> int:
    """Milliseconds of "1 day 12 hours". PlanError names `what` when it is no such thing."""
    total = 0.0
    at = 0
    lowered = text.lower() if isinstance(text, str) else ""
    while match := _PART.match(lowered, at):
        unit = match[2] if match[2] in _UNITS_MS else match[2].removesuffix("s")
        if unit not in _UNITS_MS:
            break
        total += float(match[1]) * _UNITS_MS[unit]
        at = match.end()
    if not lowered.strip() or at != len(lowered):
        raise PlanError(
            f"{what} must be a span of time, found {text!r}\n"
            "  expected: a number and a unit, such as '10 seconds', '1 hour' or '7 days'"
        )
    return round(total)


def span_text(ms: int) -> str:
    """A span as it would be written: "10 seconds", "1 day", "90 minutes"."""
    units = ("week", "day", "hour", "minute", "second")
    unit = next((u for u in units if ms and ms % _UNITS_MS[u] == 0), "millisecond")
    count = ms // _UNITS_MS[unit]
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"
