"""Server-sent events: committed epochs and changes of status.

    event: epoch     an epoch was committed; its figures, as in run.metrics()
    event: status    the run pauses, continues, ends; also sent first to every listener

One task polls the run or the log, and only while there are listeners.

Always true here:
- a listener gets every epoch once, in order. One that is too slow is disconnected: the browser
  reconnects with the id of the last epoch it got;
- the number of listeners is limited. They end with the server, or when their session ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final, NamedTuple

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from cairn.driver.coordinator.reports import report_of
from cairn.errors import CairnError
from cairn.report.epoch import EpochReport
from cairn.storage.manifest import Epoch
from cairn.web.auth import may_read
from cairn.web.errors import ApiError
from cairn.web.openapi import Docs, operation
from cairn.web.site import Site, StatusFacts

LISTENERS_MAX: Final = 64
MISSED_MAX: Final = 100
"""Epochs sent to a listener that reconnects, and queued for one that is slow."""
HEARTBEAT_S: Final = 15.0
LIVE_S: Final = 0.25
POLL_S: Final = 1.0


class _Event(NamedTuple):
    epoch: int | None
    text: bytes


_END: Final = _Event(None, b"")
_HEARTBEAT: Final = _Event(None, b": still here\n\n")


def routes(site: Site) -> list[Route]:
    watch = Watch(site)
    site.on_closing(watch.close)

    async def events(request: Request) -> Response:
        if watch.listeners >= LISTENERS_MAX:
            raise ApiError(429, "too-many", "Too many listeners", "poll /api/epochs instead")
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        last = request.headers.get("last-event-id", "")
        known = int(last) if last.isascii() and last.isdecimal() and len(last) < 13 else None
        return StreamingResponse(
            watch.listen(known, lambda: may_read(site, request.scope)),
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},
        )

    return [Route("/api/events", events)]


class Watch:
    """Polls for new epochs, and queues them for every listener."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._queues: set[asyncio.Queue[_Event]] = set()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over = False
        self._turn = asyncio.Lock()
        """Held to add a listener and to poll: all listeners get the same order."""
        self._newest: int | None = None
        """The last epoch that was sent; None without listeners."""
        self._status: StatusFacts | None = None

    @property
    def listeners(self) -> int:
        return len(self._queues)

    def close(self) -> None:
        """Disconnect all listeners. Any thread may call it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._is_over = True
        last = _Event(None, _text("status", self._site.status()))
        for queue in self._queues:
            _put(queue, last)
            _put(queue, _END)

    async def listen(
        self, known: int | None, may_read: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[bytes]:
        """Yield the events of one listener, from the current status on, while it may read."""
        if self._is_over or self._site.closing.is_set():
            return
        self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue[_Event] = asyncio.Queue(MISSED_MAX + 2)
        try:
            async with self._turn:
                if len(self._queues) >= LISTENERS_MAX:
                    return
                first = await run_in_threadpool(self._first, known)
                if self._is_over:
                    return
                self._queues.add(queue)
                self._watch()
            for event in first:
                yield event.text
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        event = await queue.get()
                except TimeoutError:
                    event = _HEARTBEAT
                if event is _END or not may_read():
                    return
                yield event.text
        finally:
            self._queues.discard(queue)

    def _watch(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._poll())

    async def _poll(self) -> None:
        try:
            while True:
                async with self._turn:
                    if not self._queues or self._is_over:
                        return
                    for event in await run_in_threadpool(self._new):
                        for queue in self._queues:
                            _put(queue, event)
                await asyncio.sleep(LIVE_S if self._site.run is not None else POLL_S)
        finally:
            self._newest = self._task = None

    # These run in a thread of the pool: they read files.

    def _first(self, known: int | None) -> list[_Event]:
        """Return the first events of a new listener, up to the epoch that others have got."""
        status = self._site.status()
        if self._newest is None:
            self._status = status
        events = [_Event(None, _text("status", status))]
        try:
            newest = (
                self._newest_epoch() if self._newest is None else self._site.log.epoch(self._newest)
            )
            missed = [] if newest is None else [newest]
            if newest is not None and known is not None:
                missed = self._between(known, newest)
            events += [self._epoch_event(epoch) for epoch in missed]
        except Exception:
            return events  # The next poll finds it, unless the log is gone.
        if self._newest is None:
            self._newest = 0 if newest is None else newest.number
        return events

    def _new(self) -> list[_Event]:
        """Return the events since the last poll."""
        events: list[_Event] = []
        try:
            newest = self._newest_epoch()
            if newest is not None and newest.number != self._newest:
                found = [] if self._newest is None else self._between(self._newest, newest)
                # After a rollback the newest epoch is an older one.
                events = [self._epoch_event(epoch) for epoch in found or [newest]]
                self._newest = newest.number
        except Exception:
            pass  # Records may be removed while they are read; the next poll finds the rest.
        status = self._site.status()
        if status != self._status:
            self._status = status
            events.append(_Event(None, _text("status", status)))
        return events

    def _newest_epoch(self) -> Epoch | None:
        """Return the newest epoch; of a run, the newest whose output is published."""
        run = self._site.run
        newest, log = None if run is None else run.metrics(), self._site.log
        return log.newest_epoch() if newest is None else log.epoch(newest.epoch)

    def _between(self, known: int, newest: Epoch) -> list[Epoch]:
        """Return the epochs after a known one, oldest first, at most the last MISSED_MAX."""
        found: list[Epoch] = []
        epoch: Epoch | None = newest
        while epoch is not None and epoch.number > known and len(found) < MISSED_MAX:
            found.append(epoch)
            epoch = self._parent(epoch)
        return found[::-1]

    def _parent(self, epoch: Epoch) -> Epoch | None:
        try:
            return None if epoch.parent is None else self._site.log.epoch(epoch.parent)
        except CairnError:
            return None  # It is retired.

    def _epoch_event(self, epoch: Epoch) -> _Event:
        newest = None if self._site.run is None else self._site.run.metrics()
        if newest is None or newest.epoch != epoch.number:
            newest = report_of(epoch)
        return _Event(epoch.number, _text("epoch", newest, epoch.number))


def _text(name: str, data: EpochReport | StatusFacts, number: int | None = None) -> bytes:
    head = f"event: {name}\n" if number is None else f"event: {name}\nid: {number}\n"
    return head.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


def _put(queue: asyncio.Queue[_Event], event: _Event) -> None:
    if queue.full():
        # The listener is too slow: it is disconnected, and reconnects for what it missed.
        while not queue.empty():
            queue.get_nowait()
        event = _END
    queue.put_nowait(event)


DOCS: Final[Docs] = {
    "/api/events": {
        "get": operation(
            "Epochs and changes of status, as server-sent events",
            content_type="text/event-stream",
        )
    }
}
