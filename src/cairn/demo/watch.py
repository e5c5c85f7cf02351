"""Watch a job from outside, by its log: what is committed, and whether an epoch is under way.

Always true here:
- an epoch counts when its manifest is in the log, whether or not its driver lived to tell;
- an epoch is under way when Spark has planned a batch that no epoch in the log records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cairn.query.facts import Facts, epoch_facts
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
    facts: Facts = field(default_factory=dict)
    """Of the newest epoch."""

    def __post_init__(self) -> None:
        self._log = Log(open_store(str(self.checkpoint)))
        self._seen = 0

    @property
    def is_taken_over(self) -> bool:
        """Whether a driver has begun to lead."""
        return self._seen > 0

    def new_epochs(self) -> list[Facts]:
        """The epochs committed since the last call, oldest first."""
        found = []
        for record in self._log.records(self._seen + 1):
            self._seen = record.number
            if isinstance(record, Epoch):
                self.newest = record
                self.epochs += 1
                self.facts = epoch_facts(record)
                self.rows += self.facts["rows_in"]
                found.append(self.facts)
        return found

    def planned(self) -> int | None:
        """The batch under way: planned by Spark, in no epoch. None when there is none."""
        if self.newest is None:
            return None
        position = self.newest.spark
        offsets = self.checkpoint / position.folder / "offsets"
        batches = [int(file.name) for file in offsets.iterdir() if file.name.isdigit()]
        last = max(batches, default=-1)
        return last if last > position.batch_id else None
