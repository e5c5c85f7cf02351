"""The number of slices that the rows of a batch are read in, where memory is short.

Slots stop an attempt before the kernel kills them (`slot/memory`). The next attempt reads the rows
of the batch in twice as many slices, a round for each: between two rounds the changes go from the
overlay to the backend, and only those of one slice are in the overlay.

Always true here:
- attempts that are divided do not use up the attempts of a batch, and there are few of them;
- batches are read whole again after a while; the longer, the less that has helped before.
"""

from __future__ import annotations

from typing import Final

SLICES_MAX: Final = 64
CALM_BATCHES: Final = 8
"""Batches that fit, before the next one is tried in half as many slices."""
CALM_BATCHES_MAX: Final = 1024


class Slices:
    """The slices of the batches to come."""

    def __init__(self) -> None:
        self.count = 1
        self._calm = 0
        """Batches in a row that have fitted."""
        self._patience = CALM_BATCHES
        self._is_trial = False
        """True if the number was halved, and no batch has fitted since."""

    @property
    def may_grow(self) -> bool:
        return self.count < SLICES_MAX

    def grow(self) -> bool:
        """A slot was short of memory: read batches in more slices. False if there are enough."""
        if not self.may_grow:
            return False
        if self._is_trial:
            self._patience = min(2 * self._patience, CALM_BATCHES_MAX)
        self.count *= 2
        self._calm, self._is_trial = 0, False
        return True

    def note_fit(self) -> None:
        """A batch with rows has fitted."""
        self._is_trial = False
        if self.count == 1:
            return
        self._calm += 1
        if self._calm >= self._patience:
            self.count //= 2
            self._calm, self._is_trial = 0, True
