"""Rows in a database of state that no epoch needs any more, removed in the background.

Always true here:
- no epoch waits for it, and none fails because of it: what is left over goes another time.
"""

from __future__ import annotations

import threading
from typing import Final, Protocol

from cairn.backends import check_url, has_versions, kind_of
from cairn.backends.registry import url_of
from cairn.backends.versioned.collection import VersionCollector
from cairn.logs import logger
from cairn.storage.store import Store

EVERY_EPOCHS: Final = 10


class Collector(Protocol):
    def collect(self) -> int:
        """Remove what no kept epoch needs; return the number of rows or keys."""


class Versions:
    """The rows of one job, from its takeover on."""

    def __init__(self, backend: str, store: Store, job_id: str, term: int) -> None:
        self._collector: Collector | None = None
        self._epochs = 0
        self._thread: threading.Thread | None = None
        if has_versions(backend):
            check_url(backend)
            self._collector = VersionCollector(store, job_id, term)
        elif kind_of(backend) == "redis":
            # Not at the top: a driver with state elsewhere does not load the client.
            from cairn.backends.redis.cleaning import OperatorCollector

            self._collector = OperatorCollector(store, url_of(backend), job_id, term)

    def after_epoch(self) -> None:
        """Begin to collect, if it is time and the last turn is over."""
        if self._collector is None:
            return
        self._epochs += 1
        is_at_work = self._thread is not None and self._thread.is_alive()
        if self._epochs % EVERY_EPOCHS == 0 and not is_at_work:
            self._thread = threading.Thread(target=self._collect, daemon=True, name="versions")
            self._thread.start()

    def _collect(self) -> None:
        assert self._collector is not None
        try:
            self._collector.collect()
        except Exception as error:
            logger.warning("cairn could not remove old rows of state: %s", error)
