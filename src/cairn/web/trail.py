"""The epochs of a job as a line of figures, newest first: what timelines and charts are made of.

The log keeps few epochs. What was seen once is remembered here, so a dashboard that is open, or
a run that serves one, shows more than is kept.

Always true here:
- an epoch that was rolled back is not on the trail;
- what is remembered is bounded.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

from cairn.driver.coordinator.measured import slender, summary
from cairn.errors import RestoreError
from cairn.report.epoch_time import parts_ms
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch

Facts = dict[str, Any]

REMEMBERED_MAX: Final = 2000


class Trail:
    """What is known of the epochs of one checkpoint. Free for all threads."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, Facts] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, summaries: Iterable[Facts]) -> None:
        """Figures of epochs that this process has committed itself, commit times included."""
        with self._lock:
            for one in summaries:
                if one["epoch"] not in self._seen:
                    self._keep(_lean(one))

    def newest(self, log: Log, limit: int, before: int | None = None) -> list[Facts]:
        """So many epochs, newest first; those before a number, where one is given."""
        epoch = log.newest_epoch()
        if epoch is None:
            return []
        with self._lock:
            return self._walk(log, epoch, limit, before)

    def _walk(self, log: Log, newest: Epoch, limit: int, before: int | None) -> list[Facts]:
        oldest_kept = log.oldest_kept()
        found: list[Facts] = []
        facts: Facts | None = self._of(newest)
        while facts is not None and len(found) < limit:
            if before is None or facts["epoch"] < before:
                found.append(facts)
            facts = self._parent(log, facts, oldest_kept)
        return found

    def _parent(self, log: Log, child: Facts, oldest_kept: int) -> Facts | None:
        number = child["parent"]
        if number is None:
            return None
        facts = self._seen.get(number)
        if facts is None:
            if number < oldest_kept:
                return None
            try:
                facts = self._of(log.epoch(number))
            except RestoreError:
                return None  # Retired meanwhile, or in another checkpoint: this is a branch.
        committed_ms = child["timings"].get("last_commit_ms")
        if facts["commit_ms"] is None and committed_ms is not None:
            facts = {**facts, "commit_ms": float(committed_ms)}
            facts["parts"] = shown_parts_ms(facts)
            self._keep(facts)
        return facts

    def _of(self, epoch: Epoch) -> Facts:
        facts = self._seen.get(epoch.number)
        if facts is None:
            facts = _lean(summary(epoch))
            self._keep(facts)
        return facts

    def _keep(self, facts: Facts) -> None:
        self._seen[facts["epoch"]] = facts
        if len(self._seen) > REMEMBERED_MAX:
            self._seen.popitem(last=False)


def shown_parts_ms(facts: Facts) -> dict[str, float]:
    """Where an epoch's time went, as JSON has it. A commit that is not known yet is none."""
    parts = parts_ms(facts, facts.get("commit_ms") or 0.0)
    return {name: round(ms, 1) for name, ms in parts.items()}


def _lean(facts: Facts) -> Facts:
    """Without what is long: a timeline has hundreds of them."""
    lean = {name: value for name, value in facts.items() if name != "totals"}
    lean["commit_ms"] = facts.get("commit_ms")
    lean["timings"] = {k: v for k, v in facts["timings"].items() if k != "subtasks"}
    lean["operators"] = slender(facts["operators"])
    lean["rows_out"] = sum(each.get("rows_out", 0) for each in lean["operators"].values())
    lean["parts"] = shown_parts_ms(lean)
    return lean
