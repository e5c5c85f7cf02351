"""Versions of rows in a database of state, collected in the background.

Always true here:
- no epoch waits for it, and none fails because of it: what is left over goes another time.
"""

from __future__ import annotations

import threading
from typing import Final

from cairn.backends import check_url, kind_of
from cairn.logs import logger
from cairn.storage.store import Store

EVERY_EPOCHS: Final = 10


class Versions:
    """The versions of one job, from its takeover on."""

    def __init__(self, backend: str, store: Store, job_id: str, term: int) -> None:
        self._is_external = kind_of(backend) == "postgres"
        self._epochs = 0
        self._thread: threading.Thread | None = None
        if self._is_external:
            # Not at the top: a driver with state elsewhere does not load psycopg.
            from cairn.backends.postgres.collection import VersionCollector

            check_url(backend)
            self._collector = VersionCollector(store, job_id, term)

    def after_epoch(self) -> None:
        """Begin to collect, if it is time and the last turn is over."""
        if not self._is_external:
            return
        self._epochs += 1
        is_at_work = self._thread is not None and self._thread.is_alive()
        if self._epochs % EVERY_EPOCHS == 0 and not is_at_work:
            self._thread = threading.Thread(target=self._collect, daemon=True, name="versions")
            self._thread.start()

    def _collect(self) -> None:
        try:
            self._collector.collect()
        except Exception as error:
            logger.warning("cairn could not remove old versions of state: %s", error)
