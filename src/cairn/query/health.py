"""The status and rates of a job, as far as its checkpoint shows them, with or without its run.

Always true here:
- nothing is written, and looking never fails because of what is being removed meanwhile;
- words and figures are computed by `cairn.report.status`: this module collects their input.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import Final

from cairn.driver.coordinator.reports import report_of
from cairn.errors import PlanError, RestoreError
from cairn.process_identity import is_pid_alive, parse_identity, pid_namespace
from cairn.report.epoch import EpochReport
from cairn.report.job_graph import GraphSource, GraphTime
from cairn.report.status import (
    FAILING,
    FIX_FUNCTION,
    FailureReport,
    Health,
    Restart,
    Signs,
    Status,
    health_of,
    status_of,
)
from cairn.storage.failures import FailureNote, read_failures
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch, Takeover
from cairn.storage.notes import ending_of, newest_graph, read_restarts
from cairn.types.durations import duration_ms

_LINE: Final = re.compile(r"^  (at|log|next): (.*)$", re.MULTILINE)
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
        epochs=[report_of(epoch) for epoch in epochs],
        watermark_ms=None if newest is None else newest.watermark_ms,
        started_ms=signs.started_ms,
        trigger_ms=signs.trigger_ms,
        why=why,
        failure=None if why else failure_report(failures),
        restart=signs.restart,
    )


def run_health(
    log: Log,
    status: Status,
    epochs: Sequence[EpochReport],
    *,
    why: str | None,
    now_ms: int,
    started_ms: int,
    trigger_ms: int = 0,
    restart: Restart | None = None,
) -> Health:
    """Return the health of a job whose run is in this process.

    `epochs` are newest first; `restart` is the last one of the run.
    """
    failure = None
    if status in FAILING:
        failure = failure_report(read_failures(log.store))
    return health_of(
        status,
        now_ms=now_ms,
        epochs=epochs,
        watermark_ms=epochs[0].watermark_ms if epochs else None,
        started_ms=started_ms,
        trigger_ms=trigger_ms,
        why=None if why is None else why.partition("\n")[0],
        failure=failure,
        restart=restart,
    )


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
    log: Log,
    leader: Takeover | None,
    newest: Epoch | None,
    failures: list[FailureNote],
    now_ms: int,
) -> Signs:
    term = leader.term if leader is not None else 0 if newest is None else newest.term
    started_ms = 0 if leader is None else leader.wall_ms
    ending = ending_of(log.store, term) if term else None
    ended_as = None if ending is None else ending.status
    restart = None if leader is None else _last_restart(log, leader)
    recent = [each for each in failures if each.wall_ms >= started_ms]
    if ended_as is None and recent and recent[0].ended_run:
        ended_as = "failed"  # A version that wrote no ending.
    number = 0 if newest is None else newest.number
    under_way = [each for each in recent if each.epoch > number]
    delay_ms, trigger_ms = read_declared(log)
    return Signs(
        now_ms=now_ms,
        ending=ended_as,
        restart=restart,
        is_announced=(
            restart is not None and ending is not None and restart.wall_ms >= ending.wall_ms
        ),
        is_alive=None if leader is None else is_alive(leader),
        failed_attempts=max((each.attempts for each in under_way), default=0),
        started_ms=started_ms,
        committed_ms=None if newest is None else newest.wall_ms,
        has_committed=newest is not None and newest.term == term,
        watermark_ms=None if newest is None else newest.watermark_ms,
        delay_ms=delay_ms,
        trigger_ms=trigger_ms,
    )


def _last_restart(log: Log, leader: Takeover) -> Restart | None:
    """Return the last restart of the process that leads; None if there was none."""
    for found in read_restarts(log.store, limit=1):
        if (found.host, found.pid) == (leader.host, leader.pid):
            return found
    return None


def is_alive(leader: Takeover) -> bool | None:
    """True if the driver's process is on this machine and lives; None if it is elsewhere."""
    if leader.host != os.uname().nodename:
        return None
    if leader.process:
        namespace, _, identity = leader.process.partition("-")
        # Containers may share the name of a host, and their process ids mean nothing outside.
        return parse_identity(identity).is_alive if namespace == pid_namespace() else None
    # An older record has the id alone; a process that began later is another one.
    return is_pid_alive(leader.pid, began_by_ms=leader.wall_ms + 1000)


def read_declared(log: Log) -> tuple[int, int]:
    """Return the largest watermark delay and the trigger's interval, as the last start noted."""
    found = newest_graph(log.store)
    if found is None:
        return 0, 0
    _, graph = found
    nodes: list[GraphSource | GraphTime] = [*graph.sources, *graph.event_times]
    delays = [node.watermark_ms or 0 for node in nodes]
    try:
        trigger_ms = duration_ms(graph.trigger or "", "trigger")
    except PlanError:
        trigger_ms = 0
    return max(delays, default=0), trigger_ms


def failure_report(failures: list[FailureNote]) -> FailureReport | None:
    """Return the newest failure, with the next step for the user."""
    if not failures:
        return None
    newest = failures[0]
    message = newest.message or newest.kind or "unknown"
    cause = message.partition("\n")[0]
    lines = dict(_LINE.findall(message))
    by_default = FIX_FUNCTION if newest.kind == "FunctionError" else _NEXT
    return FailureReport(
        cause=cause,
        kind=newest.kind,
        operator=newest.operator,
        key=newest.key,
        row=newest.row,
        timer=newest.timer,
        at=lines.get("at"),
        log=lines.get("log"),
        next=lines.get("next", by_default),
        wall_ms=newest.wall_ms,
        epoch=newest.epoch,
        attempts=newest.attempts,
        times=sum(each.message.partition("\n")[0] == cause for each in failures),
        ended_run=newest.ended_run,
    )
