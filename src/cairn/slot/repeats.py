"""Failures of users' functions that would come again, however often the epoch is tried.

The slot is asked, not the driver: where several subtasks fail the driver learns of whichever is
first, and that one may be another in each attempt.
"""

from __future__ import annotations

from cairn.errors import FunctionError
from cairn.protocol.letters import steady


class Repeats:
    """Remembers the failures of the epoch under way, in one slot."""

    def __init__(self) -> None:
        self._epoch = -1
        self._seen: set[str] = set()

    def note(self, epoch: int, error: Exception) -> bool:
        """Remember a failure; True if this very one has come before.

        The same operator, row and error, in every word. What the system reports (a connection, a
        file) may be over soon, and is never counted as a repetition.
        """
        if not isinstance(error, FunctionError) or is_of_system(error):
            return False
        if epoch != self._epoch:
            self._epoch = epoch
            self._seen.clear()
        text = steady(error.message)
        is_known = text in self._seen
        self._seen.add(text)
        return is_known


def is_of_system(error: BaseException | None) -> bool:
    """True if what the system reports is the error, or a cause of it.

    Each operator of a chain wraps an error of the one behind it.
    """
    while error is not None:
        if isinstance(error, OSError):
            return True
        error = error.__cause__
    return False
