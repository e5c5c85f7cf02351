"""The status of a job, in one word and a few figures: computed here, and nowhere else.

    starting     a driver leads the job and has not committed its first epoch
    running      epochs are committed
    idle         no epoch is under way, and none was committed for a while: no input
    behind       rows arrive, and the watermark is over a minute further back than declared
    paused       a sink cannot publish; no epoch begins until it can
    failing      an attempt at the epoch under way has failed, and it is tried again
    failed       the run ended with an error, or its driver was killed
    stopped      the run was stopped
    finished     a run with trigger="available-now" has read all of its input
    standby      another driver leads the job, and this one waits
    restarting   the run failed, and begins again after a pause
    superseded   another driver has taken the job over from this run, or a rollback has ended it
    unknown      the driver is on another machine, and has left no sign for a minute

Dashboard, command line, HTTP, metrics and `run.status` give `Signs` to `status_of`, each as far
as it can see them: a checkpoint alone does not show that an epoch is under way, or a pause.

Always true here:
- nothing is read or measured: the same signs give the same word;
- rates and ages are of now: without new epochs a rate falls to 0, and ages grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from cairn.report.epoch import EpochReport

Status = Literal[
    "starting",
    "running",
    "idle",
    "behind",
    "paused",
    "failing",
    "failed",
    "stopped",
    "finished",
    "superseded",
    "standby",
    "restarting",
    "unknown",
]
STATUSES: Final[tuple[Status, ...]] = Status.__args__  # type: ignore[attr-defined]
ACTIVE: Final[frozenset[Status]] = frozenset(
    {"starting", "running", "idle", "behind", "paused", "failing"}
)
"""A driver leads the job."""
FAILING: Final[frozenset[Status]] = frozenset({"failing", "failed", "restarting"})
"""The cause of a failure is shown."""
Ending = Literal["failed", "stopped", "finished", "superseded"]

QUIET_MS: Final = 10_000
"""Without an epoch for this long, and for two triggers, a job is idle."""
BEHIND_MS: Final = 60_000
"""This much further back than the declared delay, the watermark is behind."""
SEEN_MS: Final = 60_000
"""A driver that left a sign within this time is taken to be there."""
WINDOW_MS: Final = 10_000
"""Rates are of the epochs committed within this time; within two epochs or two triggers, if those
are longer."""


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """A run that failed, and begins again after a pause."""

    number: int
    """Restarts of its process so far, this one included."""
    wall_ms: int
    """The time of the failure."""
    pause_ms: int
    kind: str
    """The type of the error."""
    cause: str
    """The first line of the error."""
    host: str
    pid: int

    @property
    def until_ms(self) -> int:
        """The end of the pause."""
        return self.wall_ms + self.pause_ms


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a job at one moment, as far as they can be seen."""

    now_ms: int
    ending: Ending | None = None
    """The end of the last run, if it has ended."""
    restart: Restart | None = None
    """The last restart of the driver."""
    is_announced: bool = False
    """That restart was announced after the end of the run."""
    is_alive: bool | None = None
    """True if the driver lives; None if that cannot be seen from here."""
    is_busy: bool = False
    """An epoch is under way."""
    is_paused: bool = False
    failed_attempts: int = 0
    """At the epoch under way."""
    started_ms: int
    committed_ms: int | None = None
    """The commit of the newest epoch."""
    has_committed: bool = False
    """That one is of the driver that leads the job now."""
    watermark_ms: int | None = None
    delay_ms: int = 0
    """The largest delay that the job declares for its watermarks."""
    trigger_ms: int = 0


def status_of(signs: Signs) -> Status:
    if signs.ending == "failed" and _is_restarting(signs):
        return "restarting"
    if signs.ending is not None:
        return signs.ending
    if signs.is_alive is False:
        return "failed"
    quiet_ms = signs.now_ms - _last_sign_ms(signs)
    if signs.is_alive is None and quiet_ms > SEEN_MS:
        return "unknown"
    if signs.is_paused:
        return "paused"
    if signs.failed_attempts:
        return "failing"
    if not signs.is_busy and quiet_ms > max(QUIET_MS, 2 * signs.trigger_ms):
        return "idle"
    if not signs.has_committed:
        return "starting"
    if signs.watermark_ms is not None:
        behind_ms = signs.now_ms - signs.watermark_ms - signs.delay_ms
        if behind_ms > BEHIND_MS:
            return "behind"
    return "running"


def _is_restarting(signs: Signs) -> bool:
    """True while the driver pauses, or should have begun again a moment ago."""
    if signs.restart is None or not signs.is_announced or signs.is_alive is False:
        return False
    return signs.now_ms <= signs.restart.until_ms + SEEN_MS


def _last_sign_ms(signs: Signs) -> int:
    committed_ms = signs.committed_ms if signs.has_committed else None
    return max(signs.started_ms, committed_ms or 0)


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rows a second, of now."""

    rows_per_s: float
    operators: dict[str, float]
    window_ms: int


def rates_of(
    epochs: Iterable[EpochReport], now_ms: int, *, started_ms: int = 0, trigger_ms: int = 0
) -> Rates:
    """Return the rates of the last moments, from epochs newest first.

    `started_ms` is when the driver took over: before that there was nothing to count.
    """
    rows: dict[str, int] = {}
    window_ms = max(WINDOW_MS, 2 * trigger_ms)
    for at, epoch in enumerate(epochs):
        if at == 0:
            window_ms = max(window_ms, round(2 * epoch.epoch_ms))
        if epoch.wall_ms <= now_ms - window_ms:
            break
        for uid, measured in epoch.operators.items():
            rows[uid] = rows.get(uid, 0) + measured.rows_in
    window_ms = max(1000, min(window_ms, now_ms - started_ms))
    per_s = {uid: round(count * 1000 / window_ms, 1) for uid, count in rows.items()}
    total = round(sum(rows.values()) * 1000 / window_ms, 1)
    return Rates(rows_per_s=total, operators=per_s, window_ms=window_ms)


FIX_FUNCTION: Final = (
    "fix the function and start the job again: it goes on with this epoch; or put such rows "
    'aside, with on_error="dead-letter"'
)
"""The next step after an error of the user's function."""


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job fails, or has failed."""

    cause: str
    """The first line of the error."""
    kind: str
    operator: str | None
    key: str | None
    row: str | None
    timer: str | None
    at: str | None
    """The place in the user's code: FILE:LINE in FUNCTION."""
    log: str | None
    """The log file of the slot, on its machine."""
    next: str
    """The next step for the user."""
    wall_ms: int
    """The time of the first failure with this cause."""
    epoch: int
    attempts: int
    """Attempts at the epoch."""
    times: int
    """Epochs or runs that failed with this cause, as far as is kept."""
    ended_run: bool


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Status, rates and ages of a job at one moment, as every view of it shows them."""

    status: Status
    why: str | None
    """The cause of a pause or a failure, in a line."""
    now_ms: int
    rates: Rates
    epoch_age_ms: int | None
    """Time since the newest epoch was committed."""
    lag_ms: int | None
    """Distance from the watermark to the clock now; None without a watermark."""
    failure: FailureReport | None
    """While it fails, after it has failed, and until it begins again."""
    restart: Restart | None = None
    """The last restart of the driver: while the job fails, after it has failed, and until it begins
    again."""


def health_of(
    status: Status,
    *,
    now_ms: int,
    epochs: Sequence[EpochReport],
    watermark_ms: int | None,
    started_ms: int = 0,
    trigger_ms: int = 0,
    why: str | None = None,
    failure: FailureReport | None = None,
    restart: Restart | None = None,
) -> Health:
    """Return the health of a job; `epochs` newest first."""
    newest = epochs[0] if epochs else None
    is_moving = status in ACTIVE and status != "idle"
    counted = epochs if is_moving else []
    is_failing = status in FAILING
    return Health(
        status=status,
        why=why or (failure.cause if is_failing and failure is not None else None),
        now_ms=now_ms,
        rates=rates_of(counted, now_ms, started_ms=started_ms, trigger_ms=trigger_ms),
        epoch_age_ms=None if newest is None else max(0, now_ms - newest.wall_ms),
        lag_ms=None if watermark_ms is None else max(0, now_ms - watermark_ms),
        failure=failure if is_failing else None,
        restart=restart if is_failing else None,
    )
