"""Roll a job back to an earlier epoch: a record in the log, nothing else.

The next start continues from that epoch and replays the input after it, under new epoch numbers.
Output that sinks have published since stays published; the plan lists it.

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
    """An epoch that a rollback removes from the job's lineage."""

    epoch: int
    wall_ms: int
    rows_in: int
    committables: dict[str, int]


class RollbackPlan(NamedTuple):
    """The effects of a rollback."""

    url: str
    epoch: int
    newest: int
    undone: list[Undone]
    """Newest first."""
    regained: list[int]
    """Epochs undone by an earlier rollback that this one restores, newest first."""
    offsets: list[str]
    """The offsets from which input is replayed, in the order of the sources."""
    sources: list[str]

    @property
    def rows(self) -> int:
        return sum(epoch.rows_in for epoch in self.undone)

    @property
    def span_ms(self) -> tuple[int, int]:
        """The times at which the first and the last undone epoch were committed."""
        times = [epoch.wall_ms for epoch in self.undone]
        return (min(times), max(times)) if times else (0, 0)

    @property
    def output(self) -> dict[str, dict[int, int]]:
        """The output that stays published: by sink and undone epoch, the number of committables."""
        found: dict[str, dict[int, int]] = {}
        for epoch in self.undone:
            for uid, count in epoch.committables.items():
                if count:
                    found.setdefault(uid, {})[epoch.epoch] = count
        return found


def plan_rollback(store: Store, epoch: int) -> RollbackPlan:
    """Return the effects of a rollback to this epoch. RestoreError if it is impossible."""
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
    """Make an epoch the newest one again, even if others are committed meanwhile.

    RestoreError if that number is not an epoch, is retired, or is the newest already.
    """
    for _ in range(APPEND_ATTEMPTS_MAX):
        log = Log(store)
        # For a better message; the log checks again when it appends.
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
            continue  # A running driver was faster; its new epoch is undone too.
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
    oldest_kept = log.oldest_kept()
    if 0 < number < oldest_kept:
        raise RestoreError(
            f"epoch {number} is retired; its files may be gone\n"
            f"  the oldest record kept is {oldest_kept}\n"
            "  next: `cairn ls` shows the epochs that can be restored; "
            "retained_epochs= sets how many are kept",
            epoch=number,
        )
    return log.epoch(number)


def _ancestors(log: Log, epoch: Epoch) -> list[Epoch]:
    """Return an epoch and all its ancestors that are not retired, newest first."""
    found = [epoch]
    oldest_kept = log.oldest_kept()
    while epoch.parent is not None and epoch.parent >= oldest_kept:
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
