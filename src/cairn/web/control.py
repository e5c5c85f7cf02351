"""What changes the job: savepoint, rescale, stop. Only with the control token, one at a time.

A client names a savepoint; where it goes is the server's business: a folder that was
configured, or `<checkpoint>-savepoints`, beside the checkpoint.

Always true here:
- no path of a client's is ever written to: a name is one plain part of a path;
- a savepoint that was asked for together with the stop is written before the process ends;
- what a stop is refused for, as far as it can be known, is told before anything is stopped.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.errors import CairnError
from cairn.logs import logger
from cairn.report.status import ACTIVE
from cairn.web.answers import json_body, json_response
from cairn.web.auth import check_control
from cairn.web.errors import ApiError
from cairn.web.openapi import BOOLEAN, INTEGER, STRING, Docs, nullable, objekt, operation
from cairn.web.site import LiveRun, Site

NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
PARALLELISM_MAX: Final = 1 << 15


class _Savepoint(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None


class _Rescale(msgspec.Struct, forbid_unknown_fields=True):
    parallelism: Annotated[int, msgspec.Meta(ge=1, le=PARALLELISM_MAX)]


class _Stop(msgspec.Struct, forbid_unknown_fields=True):
    savepoint: str | None = None


def routes(site: Site) -> list[Route]:
    control = _Control(site)
    return [
        Route("/api/control/savepoint", control.savepoint, methods=["POST"]),
        Route("/api/control/rescale", control.rescale, methods=["POST"]),
        Route("/api/control/stop", control.stop, methods=["POST"]),
    ]


class _Control:
    """The routes of one site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._turn = threading.Lock()

    async def savepoint(self, request: Request) -> Response:
        check_control(self._site, request)
        asked: _Savepoint = await json_body(request, _Savepoint)
        return await run_in_threadpool(self._savepoint, asked)

    def _savepoint(self, asked: _Savepoint) -> Response:
        with self._one_at_a_time() as run:
            name = time.strftime("%Y%m%d-%H%M%S") if asked.name is None else asked.name
            url = savepoint_url(self._site, name)
            logger.info("a client asks job %r for a savepoint", run.name)
            saved = run.savepoint(url)
        return json_response(
            {"url": url, "epoch": saved.epoch, "rows": saved.rows, "bytes": saved.bytes}
        )

    async def rescale(self, request: Request) -> Response:
        check_control(self._site, request)
        asked: _Rescale = await json_body(request, _Rescale)
        return await run_in_threadpool(self._rescale, asked)

    def _rescale(self, asked: _Rescale) -> Response:
        with self._one_at_a_time() as run:
            logger.info("a client rescales job %r to %d", run.name, asked.parallelism)
            run.rescale(asked.parallelism)
        return json_response({"parallelism": asked.parallelism}, 202)

    async def stop(self, request: Request) -> Response:
        check_control(self._site, request)
        asked: _Stop = await json_body(request, _Stop)
        return await run_in_threadpool(self._stop, asked)

    def _stop(self, asked: _Stop) -> Response:
        url = None if asked.savepoint is None else savepoint_url(self._site, asked.savepoint)
        run = self._take_turn()
        try:
            _check_stop(run, url)
            logger.info("a client stops job %r", run.name)
            # Not waited for: the server ends with the run. No daemon: a savepoint is finished.
            threading.Thread(target=self._stop_run, args=(run, url), name="cairn-stop").start()
        except BaseException:
            self._turn.release()
            raise
        return json_response({"stopping": True, "savepoint": url}, 202)

    def _stop_run(self, run: LiveRun, savepoint: str | None) -> None:
        try:
            run.stop(savepoint=savepoint)
        except Exception:
            logger.exception("job %r could not be stopped as a client asked", run.name)
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
        """Who takes it gives it back."""
        run = self._site.run
        if run is None or run.status not in ACTIVE:
            raise ApiError(
                409,
                "not-running",
                "The job does not run here",
                "ask the server that `job.start(serve=...)` has started",
            )
        if not self._turn.acquire(blocking=False):
            raise ApiError(409, "busy", "Another change is under way", "try again when it is done")
        return run


def _check_stop(run: LiveRun, savepoint: str | None) -> None:
    try:
        run.check_stop(savepoint)
    except CairnError:
        raise
    except Exception as error:  # Stores fail in many ways.
        logger.warning("no savepoint can be written to %s: %s", savepoint, error)
        raise ApiError(
            409,
            "conflict",
            "No savepoint can be written there; the job goes on",
            "see the log of the server, and Serve(savepoints=...)",
        ) from None


def savepoint_url(site: Site, name: str) -> str:
    """Where a savepoint of this name goes."""
    if not re.fullmatch(NAME, name):
        raise ApiError(
            400,
            "bad-request",
            "A savepoint's name has letters, digits, '_' and '-', at most 64",
            "give a plain name; the server knows the folder",
        )
    folder = site.settings.savepoints or f"{site.checkpoint.rstrip('/')}-savepoints"
    return f"{folder.rstrip('/')}/{name}"


def _body(required: tuple[str, ...] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "additionalProperties": False,
        "properties": properties,
    }


_NAME: Final = STRING | {"pattern": f"^{NAME}$"}

DOCS: Final[Docs] = {
    "/api/control/savepoint": {
        "post": operation(
            "Write the newest committed epoch to a folder of its own; the run goes on",
            body=_body(name=nullable(_NAME)),
            answer=objekt(url=STRING, epoch=INTEGER, rows=INTEGER, bytes=INTEGER),
            errors=(409,),
            control=True,
        )
    },
    "/api/control/rescale": {
        "post": operation(
            "From the next epoch on, run with this many subtasks",
            body=_body(
                ("parallelism",),
                parallelism=INTEGER | {"minimum": 1, "maximum": PARALLELISM_MAX},
            ),
            answer=objekt(parallelism=INTEGER),
            status=202,
            errors=(409,),
            control=True,
        )
    },
    "/api/control/stop": {
        "post": operation(
            "End the run after the epoch under way, with a savepoint if one is named",
            body=_body(savepoint=nullable(_NAME)),
            answer=objekt(stopping=BOOLEAN, savepoint=nullable(STRING)),
            status=202,
            errors=(409,),
            control=True,
        )
    },
}
