"""Notes of a run's lives in the checkpoint, written in the background: a store that is away must
make neither a pause nor the first epoch later. A note that cannot be written is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from cairn.logs import logger
from cairn.report.status import Restart
from cairn.storage.notes import write_group, write_restart
from cairn.storage.store import Store, open_store


def note_restart(checkpoint: str, restart: Restart) -> None:
    """Note a restart, for people who look later."""
    _write("restart", checkpoint, lambda store: write_restart(store, restart))


def note_group(checkpoint: str, term: int, url: str | None) -> None:
    """Note where the group of the driver with this term is, for readers; None without a group."""
    _write("group", checkpoint, lambda store: write_group(store, term, url))


def _write(what: str, checkpoint: str, write: Callable[[Store], object]) -> None:
    def run() -> None:
        try:
            write(open_store(checkpoint))
        except Exception as error:
            logger.warning("the %s could not be noted in the checkpoint: %s", what, error)

    threading.Thread(target=run, daemon=True, name=f"cairn-{what}").start()
