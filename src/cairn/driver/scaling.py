"""Autoscaling of a run: figures of epochs go to the decision, and decisions to the job.

Always true here:
- a failure to read Spark's progress means only that the backlog is not known;
- with `autoscale="observe"` the parallelism stays.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from cairn.driver.backlog import backlog_of, total_backlog
from cairn.driver.changes import Changes
from cairn.driver.coordinator.autoscale import Autoscaler, Figures, figures_of
from cairn.driver.coordinator.epoch import Coordinator, clock_ms
from cairn.driver.history import History
from cairn.driver.options import Options, parallelism_range
from cairn.logs import logger
from cairn.report.scaling import Decision, ScalingReport

CHANGES_MAX = 100
QUIET_S = 10.0
"""A job without epochs is looked at this often."""


class Scaling:
    """The decisions of one run."""

    def __init__(
        self,
        options: Options,
        coordinator: Coordinator,
        changes: Changes,
        history: History,
        sources: Sequence[str],
        *,
        trigger_ms: int,
        cores: int | None,
        progress: Callable[[], Mapping[str, Any] | None],
    ) -> None:
        """`cores`: those that all slots share; None on a cluster."""
        self._mode = options.autoscale
        self._decision: Decision | None = None
        self._backlog: dict[str, int | None] = {}
        self._coordinator = coordinator
        self._changes = changes
        self._history = history
        self._sources = sources
        self._progress = progress
        self._made: deque[Decision] = deque(maxlen=CHANGES_MAX)
        before = coordinator.committed
        self._epoch = None if before is None else before.number
        """The epoch that was decided about last; at first, the newest one of earlier runs."""
        self._parallelism = coordinator.parallelism
        self._looked_s = time.monotonic()
        self._lock = threading.Lock()
        self._autoscaler: Autoscaler | None = None
        given = parallelism_range(options, coordinator.spec.group_count)
        if self._mode != "off" and given is not None:
            # On one machine more subtasks than cores only wait for each other.
            most = given[-1] if cores is None else max(given[0], min(given[-1], cores))
            self._autoscaler = Autoscaler(given[0], most, trigger_ms=trigger_ms)

    def report(self) -> ScalingReport:
        """Return what was decided so far."""
        return ScalingReport(
            mode=self._mode,
            decision=self._decision,
            changes=list(self._made),
            backlog=dict(self._backlog),
        )

    def after_batch(self) -> None:
        """Decide after a batch that has committed an epoch."""
        committed = self._coordinator.committed
        if committed is None or committed.number == self._epoch:
            return
        self._epoch = committed.number
        self._looked_s = time.monotonic()
        if committed.decision is not None:
            self._made.append(committed.decision)
        if self._autoscaler is None or (report := self._history.newest()) is None:
            return
        if report.parallelism != self._parallelism:
            self._parallelism = report.parallelism
            self._autoscaler.note_change(report.wall_ms)
        self._backlog = self._read_backlog()
        self._decide(
            figures_of(
                report,
                backlog_rows=total_backlog(self._backlog),
                heaviest_share=self._coordinator.subtasks.load.heaviest_share(),
                spec=self._coordinator.spec,
            )
        )

    def while_quiet(self) -> None:
        """Decide in a time without epochs, now and then: nothing came, so less would do."""
        now_s = time.monotonic()
        if self._autoscaler is None or self._epoch is None or now_s - self._looked_s < QUIET_S:
            return
        self._looked_s = now_s
        quiet_ms = QUIET_S * 1000
        self._decide(Figures(wall_ms=clock_ms(), parallelism=self._parallelism, epoch_ms=quiet_ms))

    def _decide(self, figures: Figures) -> None:
        assert self._autoscaler is not None
        with self._lock:  # Batches are on Spark's thread, the times between them on the ticker's.
            self._apply(self._autoscaler, figures)

    def _apply(self, autoscaler: Autoscaler, figures: Figures) -> None:
        decision = autoscaler.decide(figures)
        if decision.kind == "hold":
            self._decision = decision
            return
        is_on = self._mode == "on"
        decision = msgspec.structs.replace(decision, is_applied=is_on)
        self._decision = decision
        facts = {"job": self._coordinator.spec.job_name, "target": decision.target}
        logger.info("autoscale: the job %s", decision.text(), extra=facts)
        if is_on:
            self._changes.rescale(decision.target, decision)
        else:
            self._coordinator.decision = decision
            autoscaler.note_change(decision.wall_ms)

    def _read_backlog(self) -> dict[str, int | None]:
        with suppress(Exception):
            progress = self._progress()
            if progress is not None:
                return backlog_of(progress, self._sources)
        return dict.fromkeys(self._sources)
