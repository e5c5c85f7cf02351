"""Report a service that fails once, and its return once, however often it is tried between.

Only the kind of an error is shown: its text may have secrets in it.
"""

from __future__ import annotations

from cairn.logs import logger


class Outage:
    """The failures of one service in a row. `what` begins its messages."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._kind: str | None = None

    def note(self, error: Exception, *, kind: str | None = None) -> None:
        """Note a failure; log it if its kind is new."""
        kind = kind or type(error).__name__
        if kind != self._kind:
            logger.warning("%s: %s", self._what, kind)
        self._kind = kind

    def end(self) -> None:
        """Note a success."""
        if self._kind is not None:
            logger.info("%s: over", self._what)
        self._kind = None
