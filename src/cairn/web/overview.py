"""The data of the dashboard, as JSON: the job, its graph, epochs, key groups, history.

The functions read a checkpoint, with or without a run; routes only wrap them.

Always true here:
- everything is read from committed epochs; nothing is written;
- field names are stable: fields are added, never renamed.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.driver.roster import SlotInfo
from cairn.errors import RestoreError, StaleEpochError
from cairn.query.epochs import (
    EpochDetail,
    ListedEpoch,
    RestoreReport,
    TakeoverReport,
    report_record,
    show_epoch,
)
from cairn.query.health import newest_takeover
from cairn.report.drawing import draw_for_dashboard
from cairn.report.epoch import NOTHING_MEASURED, EpochReport, LetterSample
from cairn.report.job_graph import JobGraph
from cairn.report.scaling import ScalingReport
from cairn.report.status import Health, Restart, Status
from cairn.snapshots.holds import no_epoch
from cairn.storage.failures import FailureNote, read_failures
from cairn.storage.log import Log, job_of
from cairn.storage.manifest import Ancestor, Epoch, JobInfo
from cairn.storage.notes import (
    SavepointNote,
    newest_graph,
    read_restarts,
    read_savepoint_notes,
)
from cairn.storage.removal import branches_of
from cairn.storage.store import Store
from cairn.web.answers import (
    EPOCH_MAX,
    int_in_path,
    json_response,
    query_epoch,
    query_int,
    query_text,
)
from cairn.web.auth import session_of
from cairn.web.errors import ApiError
from cairn.web.groups import spread_of
from cairn.web.openapi import (
    INTEGER,
    STRING,
    Docs,
    array,
    objekt,
    operation,
    path,
    query,
)
from cairn.web.site import Site
from cairn.web.trail import Trail

Facts = dict[str, Any]

EPOCHS_MAX: Final = 1000
POINTS_MAX: Final = 500
PUT_ASIDE_EPOCHS: Final = 200


class Leader(msgspec.Struct, frozen=True):
    """The driver that took the job over last."""

    term: int
    wall_ms: int


class JobOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The job as it is now."""

    checkpoint: str
    name: str | None
    job: JobInfo | None
    status: Status
    paused: str | None
    error: str | None
    live: bool
    health: Health
    control: bool
    """A client may change the job."""
    parallelism: int | None
    now_ms: int
    epoch: EpochReport | None
    slots: list[SlotInfo]
    """Executor and log of each subtask; empty without a run."""
    leader: Leader | None
    scaling: ScalingReport | None = None
    """Autoscaling and the changes of parallelism; None without a run."""
    session: bool = False
    """The browser has a session that it can end."""


class GraphView(msgspec.Struct, frozen=True, kw_only=True):
    """Sources, operators, sinks and their connections, as of the last start."""

    term: int | None = None
    graph: JobGraph | None = None
    drawing: str | None = None
    """An SVG."""


class EpochPage(msgspec.Struct, frozen=True, kw_only=True):
    """Epochs, newest first."""

    epochs: list[EpochReport]
    oldest_kept: int
    limit: int


class BranchPoint(msgspec.Struct, frozen=True):
    url: str
    objects: int


class RolledBack(msgspec.Struct, frozen=True):
    epoch: int
    wall_ms: int


class Points(msgspec.Struct, frozen=True, kw_only=True):
    """Events of the checkpoint as a whole, newest first."""

    origin: Ancestor | None
    savepoints: list[SavepointNote]
    branches: list[BranchPoint]
    records: list[RestoreReport | TakeoverReport]
    rolled_back: list[RolledBack]


class PutAside(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of an operator that an epoch has not processed."""

    epoch: int
    wall_ms: int
    operator: str
    error_rows: int
    late_rows: int
    untimed_rows: int
    sample: list[LetterSample]


class FailureList(msgspec.Struct, frozen=True, kw_only=True):
    """Failures and restarts, newest first; and rows put aside, by epoch and operator."""

    failures: list[FailureNote]
    restarts: list[Restart]
    put_aside: list[PutAside]


def job(site: Site, trail: Trail, *, is_session: bool = False) -> JobOverview:
    newest = trail.newest(site.log, 1)
    run = site.run
    about = job_of(site.store)
    leader = newest_takeover(site.log)
    health, status = site.health(), site.status()
    parallelism = newest[0].parallelism if newest else None
    return JobOverview(
        checkpoint=site.checkpoint,
        name=run.name if run is not None else None if about is None else about.name,
        job=about,
        status=status.status,
        paused=status.paused,
        error=status.error,
        live=status.live,
        health=health,
        control=site.has_control,
        parallelism=parallelism if run is None else run.parallelism,
        now_ms=health.now_ms if run is not None else time.time_ns() // 1_000_000,
        epoch=newest[0] if newest else None,
        slots=[] if run is None else list(run.slots()),
        leader=None if leader is None else Leader(leader.term, leader.wall_ms),
        scaling=None if run is None else run.scaling,
        session=is_session,
    )


def graph(store: Store) -> GraphView:
    """Return the graph of the job as of its last start; before the first, `graph` is None."""
    found = newest_graph(store)
    if found is None:
        return GraphView()
    term, job_graph = found
    return GraphView(term=term, graph=job_graph, drawing=draw_for_dashboard(job_graph))


def epochs(log: Log, trail: Trail, limit: int, before: int | None) -> EpochPage:
    """Return epochs in brief, newest first."""
    found = trail.newest(log, limit, before)
    return EpochPage(epochs=found, oldest_kept=log.oldest_kept(), limit=limit)


def epoch(store: Store, log: Log, trail: Trail, number: int) -> EpochDetail:
    """Return everything that is known of one epoch."""
    try:
        found = show_epoch(store, number, log)
    except RestoreError:
        raise ApiError(
            404, "not-found", f"epoch {number} is not kept, or is not an epoch", "see /api/epochs"
        ) from None
    near = trail.newest(log, 1, number + 1)
    if not near or near[0].epoch != number or near[0].commit_ms is None:
        return found
    return found.with_commit(near[0].commit_ms)


def groups(site: Site, operator: str | None, number: int | None) -> Facts:
    """Return the spread of an operator's keys, as of an epoch."""
    found = _epoch(site.log, number)
    about = job_of(site.store)
    count = _group_count(found) if about is None else about.max_parallelism
    return spread_of(site.store, found, operator, count)


def points(store: Store, log: Log) -> Points:
    """Return savepoints, branches, rollbacks and takeovers, newest first."""
    about = job_of(store)
    # Bounded: each record is an object of the store.
    start = min(log.numbers()[-POINTS_MAX:], default=0)
    records = list(log.records(start))[::-1]
    lineage = itertools.takewhile(lambda each: each.number >= start, log.lineage())
    current = {each.number for each in lineage}
    rest = [report_record(each, current, {}) for each in records if not isinstance(each, Epoch)]
    return Points(
        origin=None if about is None else about.ancestor,
        savepoints=read_savepoint_notes(store),
        branches=[BranchPoint(hold.url, len(hold.paths)) for hold in branches_of(store).values()],
        records=[each for each in rest if not isinstance(each, ListedEpoch)],
        rolled_back=[
            RolledBack(each.number, each.wall_ms)
            for each in records
            if isinstance(each, Epoch) and each.number not in current
        ],
    )


def failures(store: Store, log: Log, trail: Trail) -> FailureList:
    """Return failures and rows that were put aside, newest first."""
    return FailureList(
        failures=read_failures(store),
        restarts=read_restarts(store),
        put_aside=[
            PutAside(
                epoch=each.epoch,
                wall_ms=each.wall_ms,
                operator=uid,
                error_rows=measured.error_rows,
                late_rows=measured.late_rows,
                untimed_rows=measured.untimed_rows,
                sample=_sample(log, each.epoch, uid) if measured.error_rows else [],
            )
            for each in trail.newest(log, PUT_ASIDE_EPOCHS)
            for uid, measured in each.operators.items()
            if measured.error_rows or measured.late_rows or measured.untimed_rows
        ],
    )


def _sample(log: Log, number: int, uid: str) -> list[LetterSample]:
    """Return a few of the rows that an operator put aside in an epoch, while it is kept."""
    try:
        if number < log.oldest_kept():
            return []
        return log.epoch(number).metrics.operators.get(uid, NOTHING_MEASURED).error_sample
    except RestoreError:
        return []


def _epoch(log: Log, number: int | None) -> Epoch:
    try:
        found = log.newest_epoch() if number is None else log.epoch(number)
    except RestoreError:
        found = None
    if found is None and number is None:
        raise no_epoch(log.store)
    if found is None:
        raise StaleEpochError(
            f"epoch {number} is not kept\n  next: /api/epochs lists what there is", epoch=number
        )
    return found


def _group_count(found: Epoch) -> int:
    parts = [part for entry in found.operators.values() for part in entry.ranges]
    return max((part.first_group + part.group_count for part in parts), default=1)


def routes(site: Site) -> list[Route]:
    trail = Trail()

    def read_trail() -> Trail:
        if site.run is not None:
            trail.remember(site.run.history())
        return trail

    def get_job(request: Request) -> Response:
        # A request with a token, or to a site without one, has no session to end.
        is_session = site.settings.token is not None and session_of(site, request) is not None
        return json_response(job(site, read_trail(), is_session=is_session))

    def get_graph(request: Request) -> Response:
        return json_response(graph(site.store))

    def get_epochs(request: Request) -> Response:
        limit = query_int(request, "limit", default=100, least=1, most=EPOCHS_MAX)
        before = query_int(request, "before", default=None, least=1, most=EPOCH_MAX)
        return json_response(epochs(site.log, read_trail(), limit, before))

    def get_epoch(request: Request) -> Response:
        number = int_in_path(request, "epoch", least=1)
        return json_response(epoch(site.store, site.log, read_trail(), number))

    def get_groups(request: Request) -> Response:
        operator, number = query_text(request, "operator"), query_epoch(request)
        with site.heavy():
            return json_response(groups(site, operator, number))

    def get_points(request: Request) -> Response:
        return json_response(points(site.store, site.log))

    def get_failures(request: Request) -> Response:
        return json_response(failures(site.store, site.log, read_trail()))

    return [
        Route("/api/job", get_job),
        Route("/api/graph", get_graph),
        Route("/api/epochs", get_epochs),
        Route("/api/epochs/{epoch}", get_epoch),
        Route("/api/groups", get_groups),
        Route("/api/points", get_points),
        Route("/api/failures", get_failures),
    ]


_NUMBER = INTEGER | {"minimum": 1, "maximum": EPOCH_MAX}
DOCS: Docs = {
    "/api/job": {
        "get": operation(
            "The job: its status, its run, its newest epoch",
            answer=JobOverview,
        )
    },
    "/api/graph": {
        "get": operation(
            "Sources, operators, sinks and their connections, as of the last start",
            answer=GraphView,
        )
    },
    "/api/epochs": {
        "get": operation(
            "Epochs in figures, newest first",
            parameters=[
                query("limit", INTEGER | {"minimum": 1, "maximum": EPOCHS_MAX, "default": 100}),
                query("before", _NUMBER, "Only those before this one"),
            ],
            answer=EpochPage,
            errors=(400,),
        )
    },
    "/api/epochs/{epoch}": {
        "get": operation(
            "Everything that is known of one epoch",
            parameters=[path("epoch", _NUMBER)],
            answer=EpochDetail,
            errors=(400, 404, 409),
        )
    },
    "/api/groups": {
        "get": operation(
            "How the keys of an operator spread over key groups and subtasks",
            parameters=[query("operator", STRING), query("epoch", _NUMBER)],
            answer=objekt(epoch=INTEGER, operators=array(STRING), subtasks=array(objekt())),
            errors=(400, 404, 410, 503),
        )
    },
    "/api/points": {
        "get": operation(
            "Savepoints, branches, rollbacks and takeovers, newest first",
            answer=Points,
        )
    },
    "/api/failures": {
        "get": operation(
            "Failures, restarts, and rows that were put aside",
            answer=FailureList,
        )
    },
}
