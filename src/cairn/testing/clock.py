"""A clock that moves only when told, in place of the machine's.

Always true here:
- it never goes back, and nothing but `advance_ms` and `sleep` moves it.
"""

from __future__ import annotations


class ManualClock:
    """Called, it gives milliseconds, as the coordinator's clock does; `sleep` only moves it."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms

    @property
    def now_ms(self) -> int:
        return self._now_ms

    def advance_ms(self, by_ms: int) -> None:
        if by_ms < 0:
            raise ValueError(f"a clock does not go back, found {by_ms} ms")
        self._now_ms += by_ms

    def sleep(self, seconds: float) -> None:
        """Let the time pass at once."""
        self.advance_ms(round(seconds * 1000))

    def __call__(self) -> int:
        return self._now_ms

    def __repr__(self) -> str:
        return f"<clock at {self._now_ms} ms>"
