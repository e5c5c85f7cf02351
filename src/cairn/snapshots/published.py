"""Refuse to copy an epoch whose output may be lost.

A sink publishes an epoch after it is in the log. A job that starts from a savepoint or a branch
of the epoch never publishes it, because the output belongs to the first job.

Always true here:
- an epoch that passes is published, or has no output, or a start dropped its output
  (`allow_dropped_output`).
"""

from __future__ import annotations

import time
from typing import Final

from cairn.errors import CommitError
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch
from cairn.storage.published import is_known_published

PATIENCE_S: Final = 3.0
"""A running job publishes its newest epoch within this time, unless a sink fails."""
_LOOK_S: Final = 0.1


def check_published(log: Log, epoch: Epoch) -> None:
    """Wait a few seconds until an epoch is known to be published, or raise CommitError."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_known_published(log, epoch):
        if time.monotonic() >= deadline_s:
            sinks = ", ".join(repr(uid) for uid, given in epoch.committables.items() if given)
            raise CommitError(
                f"epoch {epoch.number} is not known to be published, and a job that starts from "
                "a copy of it would not publish it\n"
                f"  checkpoint: {log.store.url}\n"
                f"  sinks with output in this epoch: {sinks}\n"
                "  next: start the job on this checkpoint once, so that it publishes the epoch, or "
                "give an older epoch; `cairn ls` shows them",
                epoch=epoch.number,
            )
        time.sleep(_LOOK_S)
