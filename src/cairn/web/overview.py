"""What the dashboard shows of a job, as JSON: the job, its graph, epochs, key groups, history.

The functions give plain data of a checkpoint, with or without a run; routes only wrap them.

Always true here:
- everything is read from what is committed; nothing is written;
- names are stable: fields are added, never renamed.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.driver.coordinator.measured import SAMPLE
from cairn.errors import RestoreError, StaleEpochError
from cairn.protocol.letters import LetterSample
from cairn.query.facts import job_facts, job_of, record_facts, show_epoch
from cairn.query.health import newest_takeover
from cairn.report.drawing import dashboard_svg
from cairn.snapshots.holds import no_epoch
from cairn.storage.failures import read_failures
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch, Restore, Takeover
from cairn.storage.notes import newest_graph, read_savepoint_notes
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
    ANYTHING,
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    Docs,
    array,
    nullable,
    objekt,
    operation,
    path,
    query,
)
from cairn.web.site import LiveRun, Site
from cairn.web.trail import Trail, shown_parts_ms

Facts = dict[str, Any]

EPOCHS_MAX: Final = 1000
POINTS_MAX: Final = 500
PUT_ASIDE_EPOCHS: Final = 200


def job(site: Site, trail: Trail) -> Facts:
    """The job as it is now: who runs it, how far it is."""
    newest = trail.newest(site.log, 1)
    run = site.run
    about = job_of(site.store)
    leader = newest_takeover(site.log)
    health = site.health()
    return {
        "checkpoint": site.checkpoint,
        "name": run.name if run is not None else None if about is None else about.name,
        "job": job_facts(about),
        **msgspec.to_builtins(site.status()),
        "health": msgspec.to_builtins(health),
        "control": site.has_control,
        "parallelism": run.parallelism if run is not None else _parallelism(newest),
        "now_ms": health.now_ms if site.run is not None else time.time_ns() // 1_000_000,
        "epoch": newest[0] if newest else None,
        "slots": _slots(run),
        "leader": None if leader is None else {"term": leader.term, "wall_ms": leader.wall_ms},
    }


def graph(store: Store) -> Facts:
    """What the job looks like, as of its last start; without one, `graph` is None."""
    found = newest_graph(store)
    if found is None:
        return {"term": None, "graph": None, "drawing": None}
    term, facts = found
    return {"term": term, "graph": facts, "drawing": dashboard_svg(facts)}


def epochs(log: Log, trail: Trail, limit: int, before: int | None) -> Facts:
    """Epochs in figures, newest first."""
    found = trail.newest(log, limit, before)
    return {"epochs": found, "oldest_kept": log.retired_below(), "limit": limit}


def epoch(store: Store, log: Log, trail: Trail, number: int) -> Facts:
    """Everything that is known of one epoch."""
    try:
        facts = show_epoch(store, number, log)
    except RestoreError:
        raise ApiError(
            404, "not-found", f"epoch {number} is not kept, or is no epoch", "see /api/epochs"
        ) from None
    near = trail.newest(log, 1, number + 1)
    commit_ms = near[0]["commit_ms"] if near and near[0]["epoch"] == number else None
    facts["commit_ms"] = commit_ms
    return {**facts, "parts": shown_parts_ms(facts)}


def groups(site: Site, operator: str | None, number: int | None) -> Facts:
    """How the keys of an operator spread, as of an epoch."""
    found = _epoch(site.log, number)
    about = job_of(site.store)
    count = _group_count(found) if about is None else about.max_parallelism
    return spread_of(site.store, found, operator, count)


def points(store: Store, log: Log) -> Facts:
    """What happened to the checkpoint as a whole, newest first."""
    about = job_of(store)
    # Only so many are read: each is an object of the store.
    start = min(log.numbers()[-POINTS_MAX:], default=0)
    records = list(log.records(start))[::-1]
    lineage = itertools.takewhile(lambda each: each.number >= start, log.lineage())
    current = {each.number for each in lineage}
    return {
        "origin": None if about is None else job_facts(about)["origin"],  # type: ignore[index]
        "savepoints": msgspec.to_builtins(read_savepoint_notes(store)),
        "branches": [
            {"url": hold.url, "objects": len(hold.paths)} for hold in branches_of(store).values()
        ],
        "records": [
            record_facts(each, current, {})
            for each in records
            if isinstance(each, Takeover | Restore)
        ],
        "rolled_back": [
            {"epoch": each.number, "wall_ms": each.wall_ms}
            for each in records
            if isinstance(each, Epoch) and each.number not in current
        ],
    }


def failures(store: Store, log: Log, trail: Trail) -> Facts:
    """What failed, newest first; and rows that were put aside, by epoch and operator."""
    names = ("error_rows", "late_rows", "untimed_rows")
    return {
        "failures": read_failures(store),
        "put_aside": [
            {
                "epoch": each["epoch"],
                "wall_ms": each["wall_ms"],
                "operator": uid,
                **{name: measured.get(name, 0) for name in names},
                "sample": _sample(log, each["epoch"], uid) if measured.get("error_rows") else [],
            }
            for each in trail.newest(log, PUT_ASIDE_EPOCHS)
            for uid, measured in each["operators"].items()
            if any(measured.get(name, 0) for name in names)
        ],
    }


def _slots(run: LiveRun | None) -> list[Facts]:
    """Return where each subtask runs and logs; nothing without a run."""
    found: list[Facts] = [] if run is None else msgspec.to_builtins(run.slots())
    return found


def _sample(log: Log, number: int, uid: str) -> list[LetterSample]:
    """Return a few of the rows that an operator put aside in an epoch, while it is kept."""
    try:
        if number < log.retired_below():
            return []
        measured = log.epoch(number).metrics.get("operators", {}).get(uid, {})
        return msgspec.convert(measured.get(SAMPLE, []), list[LetterSample])
    except (RestoreError, msgspec.ValidationError):
        return []


def _parallelism(newest: list[Facts]) -> int | None:
    return newest[0]["parallelism"] if newest else None


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

    def looked_at() -> Trail:
        if site.run is not None:
            trail.remember(site.run.history())
        return trail

    def get_job(request: Request) -> Response:
        # Whether there is a session to end: whoever brings a token, or needs none, has none.
        is_session = site.settings.token is not None and session_of(site, request) is not None
        return json_response({**job(site, looked_at()), "session": is_session})

    def get_graph(request: Request) -> Response:
        return json_response(graph(site.store))

    def get_epochs(request: Request) -> Response:
        limit = query_int(request, "limit", default=100, least=1, most=EPOCHS_MAX)
        before = query_int(request, "before", default=None, least=1, most=EPOCH_MAX)
        return json_response(epochs(site.log, looked_at(), limit, before))

    def get_epoch(request: Request) -> Response:
        number = int_in_path(request, "epoch", least=1)
        return json_response(epoch(site.store, site.log, looked_at(), number))

    def get_groups(request: Request) -> Response:
        operator, number = query_text(request, "operator"), query_epoch(request)
        with site.heavy():
            return json_response(groups(site, operator, number))

    def get_points(request: Request) -> Response:
        return json_response(points(site.store, site.log))

    def get_failures(request: Request) -> Response:
        return json_response(failures(site.store, site.log, looked_at()))

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
            "The job: who runs it, how far it is",
            answer=objekt(
                checkpoint=STRING,
                name=nullable(STRING),
                status=STRING,
                live=BOOLEAN,
                health=objekt(status=STRING, rates=objekt(rows_per_s=NUMBER), failure=ANYTHING),
                control=BOOLEAN,
                session=BOOLEAN,
                parallelism=nullable(INTEGER),
                epoch=nullable(objekt(epoch=INTEGER)),
            ),
        )
    },
    "/api/graph": {
        "get": operation(
            "Sources, operators, sinks and what connects them, as of the last start",
            answer=objekt(
                term=nullable(INTEGER), graph=nullable(objekt()), drawing=nullable(STRING)
            ),
        )
    },
    "/api/epochs": {
        "get": operation(
            "Epochs in figures, newest first",
            parameters=[
                query("limit", INTEGER | {"minimum": 1, "maximum": EPOCHS_MAX, "default": 100}),
                query("before", _NUMBER, "Only those before this one"),
            ],
            answer=objekt(
                epochs=array(objekt(epoch=INTEGER, wall_ms=INTEGER, parts=objekt())),
                oldest_kept=INTEGER,
            ),
            errors=(400,),
        )
    },
    "/api/epochs/{epoch}": {
        "get": operation(
            "Everything that is known of one epoch",
            parameters=[path("epoch", _NUMBER)],
            answer=objekt(epoch=INTEGER, operators=objekt(), sources=array(ANYTHING)),
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
            answer=objekt(
                savepoints=array(objekt()),
                branches=array(objekt()),
                records=array(objekt()),
                rolled_back=array(objekt()),
            ),
        )
    },
    "/api/failures": {
        "get": operation(
            "What failed, and rows that were put aside",
            answer=objekt(failures=array(objekt()), put_aside=array(objekt())),
        )
    },
}
