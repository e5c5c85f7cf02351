"""The clock of a job, for processing timers, TTLs and `ctx.now_ms`.

It shows the time of the driver's machine, as long as that goes forward. The time of a job cannot
go back: timers have fired, and expired state is gone from some slots and not from others. If the
machine's clock is set back, or the next driver's is behind, the job's clock runs at half speed
until the machine's has caught up. If it stopped instead, all timers would be late by the time
that the machine's clock was ahead.

Always true here:
- a reading is never before an earlier one, nor before the `now` of the epoch it follows;
- a reading is never before the machine's clock;
- while the machine's clock goes forward, so does this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from cairn.storage.manifest import Epoch

SLOWDOWN: Final = 2
"""A clock that is ahead goes forward by a millisecond while the machine's goes by this many."""


class JobClock:
    """Reads the time of a job. Any thread may use it."""

    def __init__(self, machine_ms: Callable[[], int]) -> None:
        self._machine_ms = machine_ms
        self._lock = threading.Lock()
        self._now_ms = self._read_ms = 0
        """The last reading of the job's clock and of the machine's."""
        self._slow_from = (0, 0)
        """Both readings when the machine's clock was last found to be set back."""

    def follow(self, epoch: Epoch) -> None:
        """Continue from an epoch that another driver has run, maybe with another clock."""
        with self._lock:
            self._read_ms = self._machine_ms()
            self._now_ms = max(self._now_ms, epoch.now_ms)
            self._slow_from = (self._now_ms, self._read_ms)

    def read_ms(self) -> int:
        """Return the time of the job, in milliseconds since 1970."""
        with self._lock:
            machine_ms = self._machine_ms()
            if machine_ms < self._read_ms:
                self._slow_from = (self._now_ms, machine_ms)
            self._read_ms = machine_ms
            slow_ms, since_ms = self._slow_from
            slow_ms += (machine_ms - since_ms) // SLOWDOWN
            self._now_ms = max(self._now_ms, machine_ms, slow_ms)
            return self._now_ms
