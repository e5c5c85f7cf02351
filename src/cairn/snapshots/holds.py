"""Keep an epoch from being collected while somebody reads it.

A hold is a file in the checkpoint. Written first and the log looked at afterwards, it is
either seen by the running job's collector, or we see that the collector was faster.

Always true here:
- inside `held` everything the epoch references is there, and stays;
- the hold is gone afterwards, also after an error.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from cairn.errors import StaleEpochError
from cairn.storage.holds import HOLDS_FOLDER, Hold, write_hold
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch
from cairn.storage.store import Store


@contextmanager
def held(store: Store, number: int | None, name: str) -> Iterator[Epoch]:
    """An epoch, by default the newest, that nobody removes meanwhile."""
    number = newest_number(store) if number is None else number
    path = f"{HOLDS_FOLDER}/{name}.json"
    # Host and pid are for people who find the hold of a process that was killed.
    by = f"pid {os.getpid()} on {socket.gethostname()}"
    write_hold(store, path, Hold(epochs=[number], by=by))
    try:
        # A log of our own, made after the hold: nothing in it is from before.
        log = Log(store)
        if number < log.retired_below():
            raise StaleEpochError(
                f"epoch {number} is retired; its files may be gone\n"
                f"  checkpoint: {store.url}, where the oldest record kept is "
                f"{log.retired_below()}\n"
                "  next: `cairn ls` shows the epochs that are kept",
                epoch=number,
            )
        yield log.epoch(number)
    finally:
        store.delete([path])


def newest_number(store: Store) -> int:
    newest = Log(store).newest_epoch()
    if newest is None:
        raise StaleEpochError(
            f"no epoch is committed yet\n  checkpoint: {store.url}\n"
            "  next: `cairn ls --all` shows who has started the job"
        )
    return newest.number
