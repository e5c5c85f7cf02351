"""When windows and running aggregates emit, as it is written."""

from __future__ import annotations

import pytest

from cairn.errors import PlanError
from cairn.operators.triggers import (
    FINAL,
    ON_CHANGE,
    Trigger,
    parse_emit,
    running_interval_ms,
)


@pytest.mark.parametrize(
    ("emit", "trigger"),
    [
        ("final", FINAL),
        (" Change ", ON_CHANGE),
        ("every 10 seconds", Trigger(ms=10_000)),
        ("every 1 minute 30 seconds", Trigger(ms=90_000)),
        ("every 100 rows", Trigger(rows=100)),
        ("every 1 row", ON_CHANGE),
        ("every 100 rows or 10 seconds", Trigger(100, 10_000)),
        ("every 10 seconds or 100 rows", Trigger(100, 10_000)),
    ],
)
def test_emit_is_read(emit: str, trigger: Trigger) -> None:
    assert parse_emit(emit, "windows") == trigger


@pytest.mark.parametrize(
    ("emit", "why"),
    [
        ("changes", 'expected: "final"'),
        ("every", 'expected: "final"'),
        ("count(*)", 'expected: "final"'),
        (10, 'expected: "final"'),
        ("every 0 rows", "positive number of rows"),
        ("every 0 seconds", "must be positive"),
        ("every now and then", "every now and then"),
        ("every 10 rows or 20 rows", "or both"),
        ("every 10 seconds or 1 minute", "or both"),
    ],
)
def test_an_emit_that_says_nothing_is_refused(emit: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        parse_emit(emit, "windows")


def test_a_running_aggregate_emits_on_change_or_at_intervals() -> None:
    assert running_interval_ms("change", "aggregation 'sums'") is None
    assert running_interval_ms("every 2 seconds", "aggregation 'sums'") == 2000


@pytest.mark.parametrize(
    ("emit", "why"), [("final", "has no end"), ("every 5 rows", "does not count rows")]
)
def test_a_running_aggregate_refuses_what_only_windows_have(emit: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        running_interval_ms(emit, "aggregation 'sums'")
