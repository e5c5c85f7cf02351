"""Roll a job back to an earlier epoch: a record in the log, nothing else.

The next start goes on from that epoch and replays its input from there, under new epoch
numbers. What sinks have published since stays published: cairn says what it is, and leaves it.

Always true here:
- a driver that still runs loses its next put, so nothing more is published on the old lineage;
- epoch numbers are never used again;
- when `rollback` raises CommitConflictError or RestoreError, nothing has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from cairn.errors import CommitConflictError, RestoreError
from cairn.storage.log import Log, new_nonce
from cairn.storage.manifest import Epoch, Restore
from cairn.storage.source_files import source_lines
from cairn.storage.store import Store

APPEND_ATTEMPTS_MAX: Final = 100


class Undone(NamedTuple):
    """An epoch that is no longer part of the job's history after a rollback."""

    epoch: int
    wall_ms: int
    rows_in: int
    committables: dict[str, int]


class RollbackPlan(NamedTuple):
    """What a rollback would do."""

    url: str
    epoch: int
    newest: int
    undone: list[Undone]
    """Newest first."""
    regained: list[int]
    """Epochs undone by an earlier rollback that this one brings back, newest first."""
    offsets: list[str]
    """Input is replayed from here, per source in their order."""
    sources: list[str]

    @property
    def rows(self) -> int:
        return sum(epoch.rows_in for epoch in self.undone)

    @property
    def span_ms(self) -> tuple[int, int]:
        """When the undone epochs were committed, first and last."""
        times = [epoch.wall_ms for epoch in self.undone]
        return (min(times), max(times)) if times else (0, 0)

    @property
    def output(self) -> dict[str, dict[int, int]]:
        """What stays published: per sink the undone epochs that gave it output, and how many."""
        found: dict[str, dict[int, int]] = {}
        for epoch in self.undone:
            for uid, count in epoch.committables.items():
                if count:
                    found.setdefault(uid, {})[epoch.epoch] = count
        return found


def plan_rollback(store: Store, epoch: int) -> RollbackPlan:
    """What a rollback to this epoch undoes. RestoreError when it cannot be done."""
    log = Log(store)
    newest = log.newest_epoch()
    target = _target(log, newest, epoch)
    assert newest is not None
    ancestors = {found.number for found in _ancestors(log, target)}
    undone = []
    for current in log.lineage():
        if current.number in ancestors:
            break
        undone.append(current)
    current_numbers = {found.number for found in log.lineage()}
    return RollbackPlan(
        url=store.url,
        epoch=target.number,
        newest=newest.number,
        undone=[_undone(found) for found in undone],
        regained=[n for n in sorted(ancestors, reverse=True) if n not in current_numbers],
        offsets=source_lines(target.spark.offsets),
        sources=target.spark.sources,
    )


def rollback(
    store: Store,
    epoch: int,
    *,
    clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> Restore:
    """Make an epoch the newest one again, whatever is committed meanwhile.

    RestoreError when that number is no epoch, is retired, or is the newest already.
    """
    for _ in range(APPEND_ATTEMPTS_MAX):
        log = Log(store)
        # For the message; the log itself checks again, against the record it is put behind.
        _target(log, log.newest_epoch(), epoch)
        try:
            return log.append(
                lambda number: Restore(
                    number=number,
                    term=number,
                    nonce=new_nonce(),
                    wall_ms=clock_ms(),
                    epoch=epoch,
                )
            )
        except CommitConflictError:
            continue  # A running driver was quicker; what it has committed is undone too.
    raise CommitConflictError(
        f"a running driver keeps publishing to {store.url}\n  next: stop the job, then roll back",
        url=store.url,
    )


def _target(log: Log, newest: Epoch | None, number: int) -> Epoch:
    if newest is not None and newest.number == number:
        raise RestoreError(
            f"epoch {number} is the newest one already: there is nothing to undo\n"
            f"  checkpoint: {log.store.url}\n"
            "  next: give an older epoch; `cairn ls` shows them",
            epoch=number,
        )
    retired_below = log.retired_below()
    if 0 < number < retired_below:
        raise RestoreError(
            f"epoch {number} is retired; its files may be gone\n"
            f"  the oldest record kept is {retired_below}\n"
            "  next: `cairn ls` shows the epochs that can be gone back to; "
            "retained_epochs= sets how many are kept",
            epoch=number,
        )
    return log.epoch(number)


def _ancestors(log: Log, epoch: Epoch) -> list[Epoch]:
    """An epoch and all before it that are not retired, newest first."""
    found = [epoch]
    retired_below = log.retired_below()
    while epoch.parent is not None and epoch.parent >= retired_below:
        epoch = log.epoch(epoch.parent)
        found.append(epoch)
    return found


def _undone(epoch: Epoch) -> Undone:
    return Undone(
        epoch=epoch.number,
        wall_ms=epoch.wall_ms,
        rows_in=sum(each.rows_in for each in epoch.metrics.operators.values()),
        committables={
            uid: sum(committable is not None for committable in committables)
            for uid, committables in epoch.committables.items()
        }
        | (epoch.metrics.published or {}),
    )
