"""The epochs of a run as reports: the newest in full, a thousand before it in brief."""

from __future__ import annotations

from collections import deque

import msgspec

from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.reports import report_of
from cairn.report.epoch import EpochReport

EPOCHS_MAX = 1000


class History:
    """The epochs of one run, in its driver's memory."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._has_batch = False
        self._epochs: deque[EpochReport] = deque(maxlen=EPOCHS_MAX)

    @property
    def is_empty(self) -> bool:
        """True until an epoch of this run is committed."""
        return not self._epochs

    def add_newest(self) -> None:
        """Add the newest committed epoch after a batch; a batch may not have committed one."""
        self._has_batch = True
        newest = self.newest()
        if newest is not None and (not self._epochs or self._epochs[-1].epoch < newest.epoch):
            self._epochs.append(newest.brief())

    def newest(self) -> EpochReport | None:
        """Return the newest committed epoch of this run; None before the first."""
        lead = self._coordinator
        committed = lead.committed
        # Before the first batch it may be the epoch of a savepoint, under this run's term.
        if committed is None or committed.term != lead.term or not self._has_batch:
            return None
        commit_ms = round(lead.last_commit_ms, 1) if lead.is_published else None
        report = report_of(committed, commit_ms)
        return msgspec.structs.replace(report, dropped_batches=lead.dropped_batches)

    def epochs(self) -> list[EpochReport]:
        """Return the last epochs, oldest first."""
        found, newest = list(self._epochs), self.newest()
        if newest is not None and (not found or found[-1].epoch < newest.epoch):
            found.append(newest.brief())  # Committed outside a batch, at the end of the input.
        return found
