"""Durations: text and timedelta mean the same, and errors say what is wrong."""

from __future__ import annotations

import datetime as dt

import pytest

from cairn.errors import PlanError
from cairn.types.durations import Duration, duration_ms, span_text


@pytest.mark.parametrize(
    ("duration", "ms"),
    [
        ("10 seconds", 10_000),
        (" 1 Day 12 hours ", 129_600_000),
        ("1.5 min", 90_000),
        ("250ms", 250),
        ("0 seconds", 0),
        (dt.timedelta(seconds=10), 10_000),
        (dt.timedelta(days=1, hours=12), 129_600_000),
        (dt.timedelta(microseconds=1_600), 2),
        (dt.timedelta(0), 0),
    ],
)
def test_text_and_timedelta_become_milliseconds(duration: Duration, ms: int) -> None:
    assert duration_ms(duration, "ttl") == ms


@pytest.mark.parametrize("found", ["", "soon", "10", "10 parsecs", "--1 s", "1 s -2 s", 5, None])
def test_anything_else_is_refused_with_both_accepted_forms(found: Duration) -> None:
    with pytest.raises(PlanError, match="ttl must be a span of time, found") as refused:
        duration_ms(found, "ttl")
    assert "'10 seconds'" in str(refused.value)
    assert "datetime.timedelta" in str(refused.value)


@pytest.mark.parametrize("duration", ["-1 minute", dt.timedelta(minutes=-1)])
def test_negative_duration_is_refused_unless_signed(duration: Duration) -> None:
    with pytest.raises(PlanError, match="watermark must not be negative"):
        duration_ms(duration, "watermark")
    assert duration_ms(duration, "within", signed=True) == -60_000


@pytest.mark.parametrize("duration", ["0 seconds", dt.timedelta(0), dt.timedelta(microseconds=1)])
def test_zero_duration_is_refused_where_it_must_be_positive(duration: Duration) -> None:
    assert duration_ms(duration, "watermark") == 0
    with pytest.raises(PlanError, match="size must be positive"):
        duration_ms(duration, "size", positive=True)


@pytest.mark.parametrize("text", ["1 week", "10 seconds", "90 minutes", "1500 milliseconds"])
def test_duration_is_shown_as_it_would_be_written(text: str) -> None:
    assert span_text(duration_ms(text, "ttl")) == text
