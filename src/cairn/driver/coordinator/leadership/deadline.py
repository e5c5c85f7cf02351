"""The end of a grant: a moment of this machine's monotonic clock, moved on by each renewal.

Always true here:
- a renewal counts from the moment it was begun: the service cannot have seen it earlier;
- `lost` is set when the moment is reached, also while a renewal is stuck, and stays set.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Clock = Callable[[], float]


class Deadline:
    """Set `lost` once no renewal has succeeded for `lease_s`."""

    def __init__(self, lease_s: float, begun_s: float, *, clock: Clock = time.monotonic) -> None:
        self.lost = threading.Event()
        self._lease_s = lease_s
        self._clock = clock
        self._until_s = begun_s + lease_s

    def extend(self, begun_s: float) -> None:
        """Note a renewal that succeeded; too late a one changes nothing."""
        self.check()
        self._until_s = max(self._until_s, begun_s + self._lease_s)

    def check(self) -> bool:
        """Return True while the grant is held."""
        if self._clock() >= self._until_s:
            self.lost.set()
        return not self.lost.is_set()

    def watch(self) -> None:
        """Set `lost` in time, from a thread that does nothing else."""
        threading.Thread(target=self._run, name="cairn-lease", daemon=True).start()

    def _run(self) -> None:
        while self.check():
            self.lost.wait(max(self._until_s - self._clock(), 0.001))
