"""The status of a job is one word, and its rates and ages are those of now."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.report.epoch import EpochReport
from cairn.report.status import (
    ACTIVE,
    BEHIND_MS,
    QUIET_MS,
    SEEN_MS,
    STATUSES,
    WINDOW_MS,
    Signs,
    health_of,
    rates_of,
    status_of,
)
from tests.unit.report.reports import epoch_report, operator_report

NOW = 1_000_000_000


def signs(**more: Any) -> Signs:
    """A job that runs well, but for `more`."""
    given: dict[str, Any] = {
        "now_ms": NOW,
        "is_alive": True,
        "started_ms": NOW - 600_000,
        "committed_ms": NOW - 1000,
        "has_committed": True,
    }
    return Signs(**(given | more))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "running"),
        ({"has_committed": False, "is_busy": True}, "starting"),
        ({"has_committed": False, "committed_ms": None, "started_ms": NOW - 1000}, "starting"),
        # The newest epoch is of the driver before: this one has not begun.
        ({"has_committed": False, "started_ms": NOW - QUIET_MS - 1}, "idle"),
        ({"committed_ms": NOW - QUIET_MS}, "running"),
        ({"committed_ms": NOW - QUIET_MS - 1}, "idle"),
        ({"committed_ms": NOW - 100_000, "is_busy": True}, "running"),
        ({"committed_ms": NOW - 100_000, "trigger_ms": 60_000}, "running"),
        ({"committed_ms": NOW - 120_001, "trigger_ms": 60_000}, "idle"),
        ({"watermark_ms": NOW - BEHIND_MS - 5000, "delay_ms": 5000}, "running"),
        ({"watermark_ms": NOW - BEHIND_MS - 5001, "delay_ms": 5000}, "behind"),
        ({"watermark_ms": 0, "committed_ms": NOW - QUIET_MS - 1}, "idle"),
        ({"is_paused": True, "failed_attempts": 3}, "paused"),
        ({"failed_attempts": 1, "has_committed": False, "is_busy": True}, "failing"),
        ({"failed_attempts": 1, "committed_ms": NOW - 10**6}, "failing"),
        ({"ending": "failed", "is_paused": True}, "failed"),
        ({"ending": "stopped", "failed_attempts": 1}, "stopped"),
        ({"ending": "finished"}, "finished"),
        ({"ending": "superseded"}, "superseded"),
        # From the checkpoint alone.
        ({"is_alive": False}, "failed"),
        ({"is_alive": None}, "running"),
        ({"is_alive": None, "committed_ms": NOW - QUIET_MS - 1}, "idle"),
        ({"is_alive": None, "committed_ms": NOW - SEEN_MS - 1}, "unknown"),
        ({"is_alive": None, "committed_ms": NOW - 10**6, "ending": "stopped"}, "stopped"),
    ],
)
def test_the_same_signs_give_the_same_word(more: dict[str, Any], expected: str) -> None:
    assert status_of(signs(**more)) == expected


def test_every_status_is_either_active_or_an_end() -> None:
    ended = {"failed", "stopped", "finished", "superseded", "unknown"}
    assert set(STATUSES) - ACTIVE == {*ended, "standby", "restarting"}


def epochs(*commits: tuple[int, int], epoch_ms: float = 100.0) -> list[EpochReport]:
    return [
        epoch_report(
            wall_ms=wall_ms,
            epoch_ms=epoch_ms,
            operators=dict.fromkeys("ab", operator_report(rows_in=rows)),
        )
        for wall_ms, rows in commits
    ]


def test_a_rate_is_of_the_last_seconds_and_falls_to_0_when_nothing_comes() -> None:
    done = epochs((NOW, 100), (NOW - 5_000, 100), (NOW - WINDOW_MS, 10**6))
    rates = rates_of(done, NOW)
    assert (rates.rows_per_s, rates.operators) == (40.0, {"a": 20.0, "b": 20.0})
    assert rates_of(done, NOW + 5_000).rows_per_s == 20.0
    assert rates_of(done, NOW + WINDOW_MS).rows_per_s == 0.0


@pytest.mark.parametrize("status", ["idle", "stopped", "failed", "unknown"])
def test_a_job_that_does_nothing_has_no_rate(status: Any) -> None:
    health = health_of(status, now_ms=NOW, epochs=epochs((NOW, 100)), watermark_ms=None)
    assert (health.rates.rows_per_s, health.rates.operators) == (0.0, {})


def test_a_rate_of_long_epochs_is_of_two_of_them() -> None:
    done = epochs((NOW, 60_000), (NOW - 60_000, 60_000), epoch_ms=60_000)
    assert rates_of(done, NOW).rows_per_s == 2000.0
    done = epochs((NOW, 60_000), (NOW - 60_000, 60_000))
    assert rates_of(done, NOW, trigger_ms=60_000).rows_per_s == 2000.0


def test_a_rate_of_a_job_that_has_just_started_is_of_the_time_since() -> None:
    assert rates_of(epochs((NOW, 100)), NOW, started_ms=NOW - 5000).rows_per_s == 40.0
    assert rates_of([], NOW, started_ms=NOW).rows_per_s == 0.0


def test_ages_and_lag_count_up() -> None:
    for later in (0, 47_000):
        health = health_of(
            "running", now_ms=NOW + later, epochs=epochs((NOW, 1)), watermark_ms=NOW - 1000
        )
        assert (health.epoch_age_ms, health.lag_ms) == (later, later + 1000)
