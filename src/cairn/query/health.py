"""The status and rates of a job, as far as its checkpoint shows them, with or without its run.

Always true here:
- nothing is written, and looking never fails because of what is being removed meanwhile;
- words and figures are computed by `cairn.report.status`: this module collects their input.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import psutil

from cairn.errors import PlanError, RestoreError
from cairn.process_identity import parse_identity, pid_namespace
from cairn.report.status import (
    Committed,
    FailureReport,
    Health,
    Signs,
    Status,
    health_of,
    status_of,
)
from cairn.storage.failures import read_failures
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch, Takeover
from cairn.storage.notes import ending_of, newest_graph
from cairn.types.durations import duration_ms

Facts = dict[str, Any]

_LINE: Final = re.compile(r"^  (at|log|next): (.*)$", re.MULTILINE)
_NEXT_OF_FUNCTION: Final = (
    "fix the function and start the job again: it goes on with this epoch; "
    'on_error="dead-letter" puts such rows aside instead'
)
_NEXT: Final = "see the log of the driver, then start the job again: it goes on with this epoch"
_KILLED: Final = "the driver (pid {pid} on {host}) is gone and noted no end: it was killed"


def checkpoint_health(log: Log, now_ms: int | None = None) -> Health:
    """Return the health of a job, from its checkpoint alone."""
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    epochs: list[Epoch] = []
    try:
        for epoch in log.lineage():
            epochs.append(epoch)
            if epoch.wall_ms < now_ms - 600_000 or len(epochs) == 100:
                break
    except RestoreError:
        pass  # Retired meanwhile.
    newest = epochs[0] if epochs else None
    failures = read_failures(log.store)
    leader = newest_takeover(log)
    signs = _signs(log, leader, newest, failures, now_ms)
    status = status_of(signs)
    why = None
    if status == "failed" and leader is not None and signs.ending is None:
        why = _KILLED.format(pid=leader.pid, host=leader.host)
    return health_of(
        status,
        now_ms=now_ms,
        epochs=[_rates_input(epoch) for epoch in epochs],
        watermark_ms=None if newest is None else newest.watermark_ms,
        started_ms=signs.started_ms,
        trigger_ms=signs.trigger_ms,
        why=why,
        failure=None if why else failure_report(failures),
    )


def run_health(
    log: Log,
    status: Status,
    epochs: Iterable[Facts],
    *,
    why: str | None,
    now_ms: int,
    started_ms: int,
    trigger_ms: int = 0,
) -> Health:
    """Return the health of a job whose run is in this process.

    `epochs` are its summaries, newest first.
    """
    known = list(epochs)
    failure = None
    if status in ("failing", "failed"):
        failure = failure_report(read_failures(log.store))
    return health_of(
        status,
        now_ms=now_ms,
        epochs=[committed_of(each) for each in known],
        watermark_ms=known[0]["watermark_ms"] if known else None,
        started_ms=started_ms,
        trigger_ms=trigger_ms,
        why=None if why is None else why.partition("\n")[0],
        failure=failure,
    )


def committed_of(summary: Mapping[str, Any]) -> Committed:
    """Return what rates need of an epoch in figures."""
    rows = {uid: int(each.get("rows_in", 0)) for uid, each in summary["operators"].items()}
    return Committed(summary["wall_ms"], summary["epoch_ms"], rows)


def _rates_input(epoch: Epoch) -> Committed:
    measured = epoch.metrics.get("operators", {})
    rows = {uid: int(each.get("rows_in", 0)) for uid, each in measured.items()}
    return Committed(epoch.wall_ms, float(epoch.timings.get("run_ms", 0.0)), rows)


def newest_takeover(log: Log) -> Takeover | None:
    """Return the newest takeover; None if there is none, or its record is retired."""
    number = log.newest_number()
    while number is not None and number > 0:
        try:
            record = log.read(number)
        except RestoreError:
            return None
        if isinstance(record, Takeover):
            return record
        number = min(number - 1, record.term)
    return None


def _signs(
    log: Log, leader: Takeover | None, newest: Epoch | None, failures: list[Facts], now_ms: int
) -> Signs:
    term = leader.term if leader is not None else 0 if newest is None else newest.term
    started_ms = 0 if leader is None else leader.wall_ms
    ending = ending_of(log.store, term) if term else None
    ended_as = None if ending is None else ending.status
    recent = [each for each in failures if each.get("wall_ms", 0) >= started_ms]
    if ended_as is None and recent and recent[0].get("ended_run"):
        ended_as = "failed"  # A version that wrote no ending.
    number = 0 if newest is None else newest.number
    under_way = [each for each in recent if each.get("epoch", 0) > number]
    delay_ms, trigger_ms = read_declared(log)
    return Signs(
        now_ms=now_ms,
        ending=ended_as,
        is_alive=None if leader is None else is_alive(leader),
        failed_attempts=max((each.get("attempts", 1) for each in under_way), default=0),
        started_ms=started_ms,
        committed_ms=None if newest is None else newest.wall_ms,
        has_committed=newest is not None and newest.term == term,
        watermark_ms=None if newest is None else newest.watermark_ms,
        delay_ms=delay_ms,
        trigger_ms=trigger_ms,
    )


def is_alive(leader: Takeover) -> bool | None:
    """True if the driver's process is on this machine and lives; None if it is elsewhere."""
    if leader.host != os.uname().nodename:
        return None
    if leader.process:
        namespace, _, identity = leader.process.partition("-")
        # Containers may share the name of a host, and their process ids mean nothing outside.
        return parse_identity(identity).is_alive if namespace == pid_namespace() else None
    return _has_same_pid(leader)


def _has_same_pid(leader: Takeover) -> bool | None:
    """True if the process that has the driver's id may be the driver: for records without more."""
    try:
        # A process that began later only has its number.
        process = psutil.Process(leader.pid)
        is_same = float(process.create_time()) * 1000 <= leader.wall_ms + 1000
        return is_same and str(process.status()) != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return None


def read_declared(log: Log) -> tuple[int, int]:
    """Return the largest watermark delay and the trigger's interval, as the last start noted."""
    found = newest_graph(log.store)
    if found is None:
        return 0, 0
    _, graph = found
    nodes = [*graph.get("sources", ()), *graph.get("transforms", ())]
    delays = [node.get("watermark_ms") or 0 for node in nodes]
    try:
        trigger_ms = duration_ms(str(graph.get("trigger", "")), "trigger")
    except PlanError:
        trigger_ms = 0
    return max(delays, default=0), trigger_ms


def failure_report(failures: list[Facts]) -> FailureReport | None:
    """Return the newest failure, with what to do about it."""
    if not failures:
        return None
    newest = failures[0]
    message = str(newest.get("message") or newest.get("kind") or "unknown")
    cause = message.partition("\n")[0]
    lines = dict(_LINE.findall(message))
    same = [each for each in failures if str(each.get("message", "")).partition("\n")[0] == cause]
    by_default = _NEXT_OF_FUNCTION if newest.get("kind") == "FunctionError" else _NEXT
    return FailureReport(
        cause=cause,
        kind=str(newest.get("kind", "")),
        operator=newest.get("operator"),
        key=newest.get("key"),
        row=newest.get("row"),
        timer=newest.get("timer"),
        at=lines.get("at"),
        log=lines.get("log"),
        next=lines.get("next", by_default),
        wall_ms=int(newest.get("wall_ms", 0)),
        epoch=int(newest.get("epoch", 0)),
        attempts=int(newest.get("attempts", 1)),
        times=len(same),
        ended_run=bool(newest.get("ended_run")),
    )
