"""Find the oldest epoch to keep of the current lineage, without walking back each time.

A manifest is resolved from a full one, so epochs are kept in whole runs that begin with a full
manifest. A run is dropped when enough epochs follow it and its youngest is old enough.

Always true here:
- following one more epoch costs the same, however many are kept;
- the result equals that of a walk back from the newest epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cairn.storage.log import FIRST_NUMBER, Log
from cairn.storage.manifest import Epoch, is_full


@dataclass(slots=True)
class _Run:
    first: int
    epochs: int
    youngest_ms: int


class Window:
    """The last `keep` epochs, and with `keep_s` all younger ones."""

    def __init__(
        self,
        log: Log,
        keep: int,
        keep_s: float | None = None,
        clock_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        assert keep >= 1, "the newest epoch is always kept"
        self._log = log
        self._keep = keep
        self._keep_ms = None if keep_s is None else keep_s * 1000
        self._clock_ms = clock_ms
        self._runs: deque[_Run] = deque()
        self._epochs = 0
        self._newest: int | None = None

    def oldest(self) -> int:
        """Return the number of the oldest epoch to keep; FIRST_NUMBER in an empty log."""
        self._follow()
        now_ms = self._clock_ms()
        while len(self._runs) > 1:
            run = self._runs[0]
            if self._epochs - run.epochs < self._keep or self._is_young(run, now_ms):
                break
            self._epochs -= run.epochs
            self._runs.popleft()
        return self._runs[0].first if self._runs else FIRST_NUMBER

    def _is_young(self, run: _Run, now_ms: int) -> bool:
        return self._keep_ms is not None and now_ms - run.youngest_ms < self._keep_ms

    def _follow(self) -> None:
        newest = self._log.newest_epoch()
        if newest is None or newest.number == self._newest:
            return
        if self._newest is not None and newest.parent == self._newest:
            self._add(newest)
        else:
            self._walk_back()
        self._newest = newest.number

    def _add(self, epoch: Epoch) -> None:
        if is_full(epoch.number, epoch.parent) or not self._runs:
            self._runs.append(_Run(epoch.number, 0, epoch.wall_ms))
        run = self._runs[-1]
        run.epochs += 1
        run.youngest_ms = max(run.youngest_ms, epoch.wall_ms)
        self._epochs += 1

    def _walk_back(self) -> None:
        """Read the lineage from its end: once after a takeover, and after a rollback."""
        now_ms = self._clock_ms()
        self._runs.clear()
        self._epochs = 0
        is_new_run = True
        for epoch in self._log.lineage():
            if is_new_run:
                self._runs.appendleft(_Run(epoch.number, 0, epoch.wall_ms))
            run = self._runs[0]
            run.first = epoch.number
            run.epochs += 1
            run.youngest_ms = max(run.youngest_ms, epoch.wall_ms)
            self._epochs += 1
            is_new_run = is_full(epoch.number, epoch.parent)
            enough = self._epochs >= self._keep and not self._is_young(run, now_ms)
            if is_new_run and enough:
                return
