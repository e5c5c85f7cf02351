"""The server of a run: its port is taken before the run starts, and closed with it.

Always true here:
- without `serve` no server library is loaded, and nothing listens;
- a server that fails to start raises, and its port is free again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cairn.driver.serving import Serve

if TYPE_CHECKING:
    from cairn.storage.store import Store
    from cairn.web.server import Listening, Served
    from cairn.web.site import LiveRun


class Web:
    """The server of one run, or none."""

    def __init__(self, settings: Serve | None) -> None:
        """Take the port, or raise PlanError."""
        self._settings = settings
        self._listening: Listening | None = None
        self._served: Served | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self.url: str | None = None
        self.flight_url: str | None = None
        if settings is not None:
            from cairn.web.server import Listening

            self._listening = Listening(settings)
            self.url = self._listening.url

    @contextmanager
    def close_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def open(self, run: LiveRun, store: Store) -> None:
        """Start to answer requests."""
        if self._settings is None or self._listening is None:
            return
        from cairn.web.server import serve
        from cairn.web.site import Site

        with self._lock:
            if self._is_closed:
                return  # A bounded run may be over by now.
            site = Site(store.url, self._settings, run=run, store=store)
            self._served = serve(site, self._listening)
            self.flight_url = self._served.flight_url

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            served, listening = self._served, self._listening
        if served is not None:
            served.close()
        elif listening is not None:
            listening.close()
