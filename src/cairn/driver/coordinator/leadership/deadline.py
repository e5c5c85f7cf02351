"""The end of a grant: a moment of this machine's monotonic clock, moved on by each renewal.

Always true here:
- a renewal counts from the moment it was begun: the service cannot have seen it earlier;
- `lost` is set when the moment is reached, also while a renewal is stuck, and stays set;
- a process that was paused finds `lost` set at its first look: `is_set` reads the clock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

Clock = Callable[[], float]


class Deadline:
    """Set `lost` once no renewal has succeeded for `lease_s`; without an end until `begin`."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lease_s = math.inf
        self._until_s = math.inf
        self.lost: threading.Event = _Lost(self)

    def begin(self, lease_s: float, begun_s: float) -> None:
        """Let the grant end `lease_s` after the moment `begun_s`."""
        self._lease_s = lease_s
        self._until_s = begun_s + lease_s

    def extend(self, begun_s: float) -> None:
        """Note a renewal that succeeded; too late a one changes nothing."""
        self.check()
        self._until_s = max(self._until_s, begun_s + self._lease_s)

    def check(self) -> bool:
        """Return True while the grant is held."""
        return not self.lost.is_set()

    def is_over(self) -> bool:
        """Return True if the clock has reached the end."""
        return self._clock() >= self._until_s

    def watch(self) -> None:
        """Set `lost` in time, from a thread that does nothing else."""
        threading.Thread(target=self._run, name="cairn-lease", daemon=True).start()

    def _run(self) -> None:
        while self.check():
            self.lost.wait(max(self._until_s - self._clock(), 0.001))


class _Lost(threading.Event):
    """An event that also reads the clock."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def is_set(self) -> bool:
        if not super().is_set() and self._deadline.is_over():
            self.set()
        return super().is_set()
