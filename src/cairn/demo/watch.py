"""Watch a job from outside by its log: committed epochs, and a batch under way.

Always true here:
- an epoch counts when its manifest is in the log, even if its driver was killed right after;
- an epoch is under way when Spark has planned a batch that no epoch in the log records.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cairn.driver.coordinator.leadership.in_store import StoreLeadership
from cairn.driver.coordinator.reports import report_of
from cairn.report.epoch import EpochReport
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch
from cairn.storage.store import open_store


@dataclass
class Watch:
    """The log of a checkpoint, followed."""

    checkpoint: Path
    newest: Epoch | None = None
    rows: int = 0
    epochs: int = 0
    report: EpochReport | None = None
    """The newest epoch."""
    record: int = 0
    """The number of the newest record: an epoch, or a takeover."""

    def __post_init__(self) -> None:
        self._log = Log(open_store(str(self.checkpoint)))
        self._group = StoreLeadership(open_store(str(self.checkpoint)))

    def new_epochs(self) -> list[EpochReport]:
        """Return the epochs committed since the last call, oldest first."""
        found = []
        for record in self._log.records(self.record + 1):
            self.record = record.number
            if isinstance(record, Epoch):
                self.newest = record
                self.epochs += 1
                self.report = report_of(record)
                self.rows += self.report.rows_in
                found.append(self.report)
        return found

    def find_standby(self, pid: int) -> int | None:
        """Return the epoch that the slots of a standby hold; None if there are none yet."""
        for member in self._group.waiting():
            if member.pid == pid:
                return member.epoch
        return None

    def find_planned(self) -> int | None:
        """Return the batch that Spark has planned and no epoch has committed, if any."""
        if self.newest is None:
            return None
        position = self.newest.spark
        offsets = self.checkpoint / position.folder / "offsets"
        batches = [int(file.name) for file in offsets.iterdir() if file.name.isdigit()]
        last = max(batches, default=-1)
        return last if last > position.batch_id else None
