"""Sessions of browsers that have logged in: random ids in a cookie, instead of the token.

Always true here:
- a cookie contains nothing that leads to the token;
- sessions are bounded in number and in time, and end when they are closed or with the server.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

SESSIONS_MAX: Final = 1000
SESSION_S: Final = 12 * 3600.0


class Sessions:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def open(self) -> str:
        session = secrets.token_urlsafe(32)
        with self._lock:
            self._ends_at[session] = self._clock() + SESSION_S
            while len(self._ends_at) > SESSIONS_MAX:
                self._ends_at.popitem(last=False)
        return session

    def close(self, session: str) -> None:
        """End the session: its cookie is refused from now on."""
        with self._lock:
            self._ends_at.pop(session, None)

    def is_open(self, session: str | None) -> bool:
        # A lookup by hash takes the same time for every wrong id.
        with self._lock:
            return session is not None and self._ends_at.get(session, 0.0) > self._clock()
