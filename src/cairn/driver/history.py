"""What the epochs of a run have measured: the newest in full, a thousand before it in short."""

from __future__ import annotations

from collections import deque
from typing import Any

from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.measured import slender, summary

EPOCHS_MAX = 1000


class History:
    """Of one run, in its driver's memory."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._spent_ms = (-1, 0.0)
        """The newest epoch of this run, and how long its batches took."""
        self._epochs: deque[dict[str, Any]] = deque(maxlen=EPOCHS_MAX)

    @property
    def is_empty(self) -> bool:
        """True until an epoch of this run is committed."""
        return not self._epochs

    def add(self, number: int, spent_ms: float) -> None:
        """A batch of an epoch has run, in so much time. An epoch may have several."""
        before, before_ms = self._spent_ms
        self._spent_ms = number, spent_ms + (before_ms if before == number else 0.0)
        measured = self.newest()
        if measured and (not self._epochs or self._epochs[-1]["epoch"] < measured["epoch"]):
            # A thousand of them: what is long would take the driver's memory.
            self._epochs.append({**measured, "operators": slender(measured["operators"])})

    def newest(self) -> dict[str, Any]:
        """The newest committed epoch of this run; empty before the first."""
        committed, (number, spent_ms) = self._coordinator.committed, self._spent_ms
        if committed is None or committed.term != self._coordinator.term or number < 0:
            return {}
        measured = summary(committed, spent_ms if committed.number == number else None)
        measured["commit_ms"] = round(self._coordinator.last_commit_ms, 1)
        measured["dropped_batches"] = self._coordinator.dropped_batches
        return measured

    def epochs(self) -> list[dict[str, Any]]:
        """Oldest first, without what is long."""
        return list(self._epochs)
