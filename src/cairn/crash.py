"""Named places where a process may be made to die, so that tests can try each of them.

A crash point does nothing unless the environment asks for it:

    CAIRN_CRASH_AT=driver.manifest.written:3    die at the third pass of that point
    CAIRN_CRASH_ONCE=/tmp/crashed               and only if this file does not exist yet

A simulation, which has driver and slots in one process, is told of each pass instead:
see `cairn.testing.crash`.

Always true here:
- every step of the epoch protocol after which a crash could matter has a name in POINTS;
- a process dies as by SIGKILL: no handler runs, nothing is flushed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

POINTS: dict[str, str] = {
    "driver.takeover.written": "the takeover record is in the log, nothing else has been done",
    "driver.savepoint.loaded": "a savepoint is the first epoch, no query has started",
    "driver.rewind.laid": "a new Spark folder is laid out, the query has not started",
    "driver.recovered": "the newest epoch's sinks are committed again, the query has not started",
    "driver.epoch.begun": "Spark has planned the epoch, no subtask has begun",
    "driver.round.ran": "a round of a loop is done, the next one of the epoch has not begun",
    "driver.epoch.ran": "every subtask has acknowledged, nothing is written by the driver",
    "driver.pack.written": "the pack of small deltas is stored, the manifest is not",
    "driver.batch.published": "a batch is published before its epoch is in the log",
    "driver.manifest.written": "the manifest is in the log: the epoch is committed",
    "driver.sink.begun": "a sink is told to publish the epoch, nothing of it is done",
    "driver.sink.piece": "a sink has put a piece of the epoch in place, others may be missing",
    "driver.sink.unmarked": "all that a sink publishes is in place, its mark is not yet there",
    "driver.sink.committed": "one sink has published the epoch, others may not have",
    "driver.sinks.committed": "all sinks have published the epoch",
    "driver.collected": "garbage of older epochs is deleted",
    "driver.epoch.ended": "the epoch is done, Spark's own commit log does not know yet",
    "driver.idle.due": "something is due and Spark is silent, no epoch has begun",
    "driver.idle.ended": "an epoch without a batch is done",
    "driver.deployed": "another parallelism or function is planned, no epoch has run with it",
    "slot.restored": "the slot has restored state from files, the epoch has not begun",
    "slot.base.begun": "a base is being written in the background, nothing of it is stored",
    "slot.base.written": "a base is stored, the driver has not heard of it",
    "slot.begun": "the slot has accepted the epoch and holds the parent's state",
    "slot.batch": "the slot has processed a batch of rows",
    "slot.delta.written": "the delta is stored, the acknowledgement is not sent",
    "slot.rows.applied": "the rows of a base are in the database, the base is not stored",
    "slot.sst.uploaded": "an SST file of a base is stored, the base is not",
    "slot.sink.prepared": "a sink's output is durable and invisible, nothing is acknowledged",
    "slot.acknowledged": "the acknowledgement is on its way to the driver",
}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_passes: dict[str, int] = {}
_die_by: Callable[[], None] = _die
_told: Callable[[str], None] | None = None
"""Called at each pass; set by `cairn.testing.crash` only."""


def crash_point(name: str) -> None:
    """Die here, if the environment names this point and this pass."""
    if _told is not None:
        _told(name)
    asked = os.environ.get("CAIRN_CRASH_AT")
    if not asked:
        return
    point, _, nth = asked.partition(":")
    if point not in POINTS:
        raise ValueError(f"CAIRN_CRASH_AT names no crash point: {point!r}")
    if point != name:
        return
    _passes[name] = _passes.get(name, 0) + 1
    if _passes[name] != int(nth or 1):
        return
    once = os.environ.get("CAIRN_CRASH_ONCE")
    if once:
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    _die_by()
