"""Work in the background, started when an epoch begins: bases, merges, changes for a database.

The changes of committed epochs stay in memory until a writer has written them to a database outside
of the slot. A writer at work has its share of memory, and the changes that come meanwhile have
theirs. When theirs is full, an epoch waits for the writer. If the writer fails, both have one
share together. When that is full, an epoch fails with the fact `is_away`: the job is paused, and
each further attempt lets a writer try again.

Always true here:
- the changes of the epoch before come on top of the share: a large epoch alone makes none wait;
- an epoch waits only for work that is under way, and fails only if that work has failed: so
  every pause ends when changes can be written again.
"""

from __future__ import annotations

from collections.abc import Callable

from cairn.errors import EpochError
from cairn.protocol.messages import Begin, Compaction
from cairn.slot.compactor import Compactor, Failure
from cairn.slot.holding import Holding
from cairn.slot.restore import apply_work, base_work, merge_work
from cairn.storage.store import Store


class WriteBehind:
    """Starts the background work of a level."""

    def __init__(self, compactor: Compactor, store: Store, scratch: str) -> None:
        self._compactor = compactor
        self._store = store
        self._scratch = scratch

    def is_full(self, holding: Holding) -> bool:
        """True if unwritten changes fill their share. Called before more are promoted."""
        backend = holding.backend
        is_failing = self._compactor.last_failure(holding.uid) is not None
        return backend.unwritten_bytes(with_frozen=is_failing) > backend.unwritten_bytes_max

    def start(
        self,
        holding: Holding,
        begin: Begin,
        compaction: Compaction | None,
        check: Callable[[], None],
        *,
        is_full: bool,
        is_restored: bool,
    ) -> None:
        """Start what is due; wait for what is under way if memory is full.

        Calls `check` while it waits, which raises if the attempt is superseded.
        """
        if is_restored and not holding.backend.is_settled():
            return  # Rows come first. The next epoch begins what needs a look at the database.
        # Batches and rounds of a running epoch have changes that are not committed.
        is_committed = begin.parent is not None and holding.as_of == begin.parent
        is_full = is_full and is_committed
        is_stuck = is_full and self._compactor.last_failure(holding.uid) is not None
        wants_apply = is_committed and holding.backend.wants_apply()
        is_free = self._compactor.is_free(holding.uid, rests=not is_stuck)
        if is_free:
            if is_stuck and wants_apply and compaction is not None and compaction.kind == "merge":
                compaction = None  # A merge writes nothing to the database.
            self._submit(holding, begin, compaction, wants_apply=wants_apply)
        # A writer that begins now takes all changes that there are, so their share is free again.
        if is_stuck or (is_full and not is_free):
            self._wait(holding, check)

    def _submit(
        self, holding: Holding, begin: Begin, compaction: Compaction | None, *, wants_apply: bool
    ) -> None:
        if compaction is None:
            if wants_apply:
                self._compactor.submit(apply_work(holding, self._store, begin))
        elif compaction.kind == "base":
            self._compactor.submit(base_work(holding, self._store, begin, self._scratch))
        else:
            work = merge_work(holding, compaction, self._store, begin, self._scratch)
            self._compactor.submit(work)

    def _wait(self, holding: Holding, check: Callable[[], None]) -> None:
        """Wait for the work under way; raise if it fails."""
        if not self._compactor.wait(holding.uid, check):
            return
        failure = self._compactor.last_failure(holding.uid)
        if failure is not None:
            raise _full_error(holding, failure)


def _full_error(holding: Holding, failure: Failure) -> EpochError:
    backend = holding.backend
    found = backend.unwritten_bytes(with_frozen=True) / (1 << 20)
    return EpochError(
        f"operator {holding.uid!r}: memory is full of changes of state that cannot be written\n"
        f"  cause: {failure.why}\n"
        f"  expected: at most {backend.unwritten_bytes_max / (1 << 20):.1f} MB, three eighths of "
        "backend_memory_mb\n"
        f"  found: {found:.1f} MB\n"
        "  next: repair the database; the job waits for it, and nothing is lost",
        database=failure.place or f"state of {holding.uid}",
        is_away=True,
    )
