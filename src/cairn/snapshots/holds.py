"""Keep an epoch from being collected while somebody reads it.

A hold is a file in the checkpoint. Written first and the log looked at afterwards, it is
either seen by the running job's collector, or we see that the collector was faster.

Always true here:
- inside `held` everything the epoch references is there, and stays;
- the hold is gone afterwards, also after an error.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cairn.errors import StaleEpochError
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch
from cairn.storage.retention import HOLDS_FOLDER
from cairn.storage.store import Store


def hold_path(name: str) -> str:
    return f"{HOLDS_FOLDER}/{name}.json"


@contextmanager
def held(store: Store, number: int | None, name: str) -> Iterator[Epoch]:
    """An epoch, by default the newest, that nobody removes meanwhile."""
    number = newest_number(store) if number is None else number
    # Host and pid are for people who find the hold of a process that was killed.
    said = {
        "epochs": [number],
        "by": f"pid {os.getpid()} on {socket.gethostname()}",
        "since_ms": time.time_ns() // 1_000_000,
    }
    store.put(hold_path(name), json.dumps(said).encode())
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
        store.delete([hold_path(name)])


def newest_number(store: Store) -> int:
    newest = Log(store).newest_epoch()
    if newest is None:
        raise StaleEpochError(
            f"no epoch is committed yet\n  checkpoint: {store.url}\n"
            "  next: `cairn ls --all` shows who has started the job"
        )
    return newest.number
