"""Control of the job: savepoint, rescale, rebalance, hand-over, stop.

Only with the control token, and one change at a time.

A client names a savepoint, and the server chooses the folder: the one in its settings, or
`<checkpoint>-savepoints`, beside the checkpoint.

Always true here:
- a client cannot choose a path: a name is one plain part of a path;
- the savepoint of a stop is written before the process ends;
- a stop is checked before anything is stopped, and refused if it would fail.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.driver.coordinator.leadership.base import Member
from cairn.errors import CairnError
from cairn.logs import logger
from cairn.report.balance import Balance
from cairn.report.status import ACTIVE
from cairn.web.answers import json_body, json_response
from cairn.web.auth import check_control
from cairn.web.errors import ApiError
from cairn.web.openapi import Docs, operation
from cairn.web.site import LiveRun, Site

NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
PARALLELISM_MAX: Final = 1 << 15


SavepointName = Annotated[str, msgspec.Meta(pattern=f"^{NAME}$")]


class Savepoint(msgspec.Struct, forbid_unknown_fields=True):
    name: SavepointName | None = None


class Rescale(msgspec.Struct, forbid_unknown_fields=True):
    parallelism: Annotated[int, msgspec.Meta(ge=1, le=PARALLELISM_MAX)]


class Rebalance(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Stop(msgspec.Struct, forbid_unknown_fields=True):
    savepoint: SavepointName | None = None


class Handover(msgspec.Struct, forbid_unknown_fields=True):
    to: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] | None = None
    """The host or the identity of a standby; None for any."""


class HandedOver(msgspec.Struct):
    successor: Member
    """The standby that takes the lead."""


class Saved(msgspec.Struct):
    url: str
    epoch: int
    rows: int
    bytes: int


class Stopping(msgspec.Struct):
    savepoint: str | None
    stopping: bool = True


def routes(site: Site) -> list[Route]:
    control = _Control(site)
    return [
        Route("/api/control/savepoint", control.savepoint, methods=["POST"]),
        Route("/api/control/rescale", control.rescale, methods=["POST"]),
        Route("/api/control/rebalance", control.rebalance, methods=["POST"]),
        Route("/api/control/handover", control.handover, methods=["POST"]),
        Route("/api/control/stop", control.stop, methods=["POST"]),
    ]


class _Control:
    """The routes of one site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._turn = threading.Lock()

    async def savepoint(self, request: Request) -> Response:
        check_control(self._site, request)
        asked = await json_body(request, Savepoint)
        return await run_in_threadpool(self._savepoint, asked)

    def _savepoint(self, asked: Savepoint) -> Response:
        with self._one_at_a_time() as run:
            name = time.strftime("%Y%m%d-%H%M%S") if asked.name is None else asked.name
            url = savepoint_url(self._site, name)
            logger.info("a client requests a savepoint of job %r", run.name)
            saved = run.savepoint(url)
        return json_response(Saved(url, saved.epoch, saved.rows, saved.bytes))

    async def rescale(self, request: Request) -> Response:
        check_control(self._site, request)
        asked = await json_body(request, Rescale)
        return await run_in_threadpool(self._rescale, asked)

    def _rescale(self, asked: Rescale) -> Response:
        with self._one_at_a_time() as run:
            logger.info("a client rescales job %r to %d", run.name, asked.parallelism)
            run.rescale(asked.parallelism)
        return json_response(Rescale(asked.parallelism), 202)

    async def rebalance(self, request: Request) -> Response:
        check_control(self._site, request)
        await json_body(request, Rebalance)
        return await run_in_threadpool(self._rebalance)

    def _rebalance(self) -> Response:
        with self._one_at_a_time() as run:
            logger.info("a client rebalances job %r", run.name)
            balance = run.rebalance()
        return json_response(balance, 202)

    async def handover(self, request: Request) -> Response:
        check_control(self._site, request)
        asked = await json_body(request, Handover)
        return await run_in_threadpool(self._handover, asked)

    def _handover(self, asked: Handover) -> Response:
        with self._one_at_a_time() as run:
            logger.info("a client hands job %r over to %s", run.name, asked.to or "a standby")
            successor = run.resign(asked.to)
        return json_response(HandedOver(successor), 202)

    async def stop(self, request: Request) -> Response:
        check_control(self._site, request)
        asked = await json_body(request, Stop)
        return await run_in_threadpool(self._stop, asked)

    def _stop(self, asked: Stop) -> Response:
        url = None if asked.savepoint is None else savepoint_url(self._site, asked.savepoint)
        run = self._take_turn()
        try:
            _check_stop(run, url)
            logger.info("a client stops job %r", run.name)
            # The server ends with the run, so this does not wait. The thread is not a daemon:
            # the process does not exit before the savepoint is written.
            threading.Thread(target=self._stop_run, args=(run, url), name="cairn-stop").start()
        except BaseException:
            self._turn.release()
            raise
        return json_response(Stopping(url), 202)

    def _stop_run(self, run: LiveRun, savepoint: str | None) -> None:
        try:
            run.stop(savepoint=savepoint)
        except Exception:
            logger.exception("a client could not stop job %r", run.name)
        finally:
            self._turn.release()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[LiveRun]:
        run = self._take_turn()
        try:
            yield run
        finally:
            self._turn.release()

    def _take_turn(self) -> LiveRun:
        """Acquire the lock and return the run. The caller releases the lock."""
        run = self._site.run
        if run is None or run.status not in ACTIVE:
            raise ApiError(
                409,
                "not-running",
                "The job does not run in this process",
                "use the address of the running job, run.url",
            )
        if not self._turn.acquire(blocking=False):
            raise ApiError(409, "busy", "Another change is in progress", "try again in a moment")
        return run


def _check_stop(run: LiveRun, savepoint: str | None) -> None:
    try:
        run.check_stop(savepoint)
    except CairnError:
        raise
    except Exception as error:  # Stores fail in many ways.
        logger.warning("a savepoint cannot be written to %s: %s", savepoint, error)
        raise ApiError(
            409,
            "conflict",
            "The savepoint cannot be written; the job continues",
            "see the log of the server, and Serve(savepoints=...)",
        ) from None


def savepoint_url(site: Site, name: str) -> str:
    if not re.fullmatch(NAME, name):
        raise ApiError(
            400,
            "bad-request",
            "The name of a savepoint has at most 64 letters, digits, '_' and '-'",
            "give a plain name; the server chooses the folder",
        )
    folder = site.settings.savepoints or f"{site.checkpoint.rstrip('/')}-savepoints"
    return f"{folder.rstrip('/')}/{name}"


DOCS: Final[Docs] = {
    "/api/control/savepoint": {
        "post": operation(
            "Write the newest committed epoch to its own folder; the run continues",
            body=Savepoint,
            answer=Saved,
            errors=(409,),
            control=True,
        )
    },
    "/api/control/rescale": {
        "post": operation(
            "From the next epoch on, run with this many subtasks",
            body=Rescale,
            answer=Rescale,
            status=202,
            errors=(409,),
            control=True,
        )
    },
    "/api/control/rebalance": {
        "post": operation(
            "From the next epoch on, cut the ranges of key groups by their load",
            body=Rebalance,
            answer=Balance,
            status=202,
            errors=(409,),
            control=True,
        )
    },
    "/api/control/handover": {
        "post": operation(
            "Finish the current epoch and pass the lead to a standby of the group",
            body=Handover,
            answer=HandedOver,
            status=202,
            errors=(409,),
            control=True,
        )
    },
    "/api/control/stop": {
        "post": operation(
            "End the run after the current epoch, with a savepoint if one is named",
            body=Stop,
            answer=Stopping,
            status=202,
            errors=(409,),
            control=True,
        )
    },
}
