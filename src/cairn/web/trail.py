"""The epochs of a job in brief, newest first, for timelines and charts.

The log keeps few epochs. The trail remembers those it has seen, so a dashboard shows more.

Always true here:
- an epoch that was rolled back is not on the trail;
- the number of remembered epochs is bounded.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec

from cairn.driver.coordinator.reports import report_of
from cairn.errors import RestoreError
from cairn.report.epoch import EpochReport
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch

REMEMBERED_MAX: Final = 2000


class Trail:
    """The epochs of one checkpoint. Safe to use from any thread."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, EpochReport] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, epochs: Iterable[EpochReport]) -> None:
        """Add epochs that this process has committed itself, with the times of their commits."""
        with self._lock:
            for epoch in epochs:
                known = self._seen.get(epoch.epoch)
                # It may have been read from the log before its sinks had published it.
                if known is None or (known.commit_ms is None and epoch.commit_ms is not None):
                    self._keep(_without_lists(epoch))

    def newest(self, log: Log, limit: int, before: int | None = None) -> list[EpochReport]:
        """Return up to `limit` epochs, newest first; those before a number, if given."""
        epoch = log.newest_epoch()
        if epoch is None:
            return []
        with self._lock:
            return self._walk(log, epoch, limit, before)

    def _walk(self, log: Log, newest: Epoch, limit: int, before: int | None) -> list[EpochReport]:
        oldest_kept = log.oldest_kept()
        found: list[EpochReport] = []
        report: EpochReport | None = self._of(newest)
        while report is not None and len(found) < limit:
            if before is None or report.epoch < before:
                found.append(report)
            report = self._parent(log, report, oldest_kept)
        return found

    def _parent(self, log: Log, child: EpochReport, oldest_kept: int) -> EpochReport | None:
        number = child.parent
        if number is None:
            return None
        report = self._seen.get(number)
        if report is None:
            if number < oldest_kept:
                return None
            try:
                report = self._of(log.epoch(number))
            except RestoreError:
                return None  # Retired meanwhile, or in another checkpoint: this is a branch.
        commit_ms = child.timings.last_commit_ms
        if report.commit_ms is None and commit_ms is not None:
            report = report.with_commit(commit_ms)
            self._keep(report)
        return report

    def _of(self, epoch: Epoch) -> EpochReport:
        report = self._seen.get(epoch.number)
        if report is None:
            report = _without_lists(report_of(epoch))
            self._keep(report)
        return report

    def _keep(self, report: EpochReport) -> None:
        self._seen[report.epoch] = report
        if len(self._seen) > REMEMBERED_MAX:
            self._seen.popitem(last=False)


def _without_lists(report: EpochReport) -> EpochReport:
    """Return it without the parts that are long: a timeline has hundreds of them."""
    timings = msgspec.structs.replace(report.timings, subtasks=[])
    return msgspec.structs.replace(report.brief(), totals=None, timings=timings)
