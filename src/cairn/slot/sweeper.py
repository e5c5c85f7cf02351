"""Expired state is removed while the slot has nothing else to do.

Each epoch removes a little by itself, so that it goes on in a slot that is never idle.

Always true here:
- a call that comes meanwhile waits for one slice at most, a few milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cairn.logs import logger

SLICE_S = 0.003
REST_S = 0.006
LOOK_AGAIN_S = 3.0


class Sweeper:
    """Calls `sweep(seconds)` from a thread of its own, until it says that nothing is left."""

    def __init__(self, sweep: Callable[[float], bool], is_busy: Callable[[], bool]) -> None:
        self._sweep = sweep
        self._is_busy = is_busy
        self._woken = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """An epoch has ended."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._loop, daemon=True, name="sweeper")
            self._thread.start()
        self._woken.set()

    def close(self) -> None:
        """Returns when it does nothing any more."""
        self._closed = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        is_second_look = True
        while True:
            # A second look when it has been quiet for a while: memory is given back then.
            is_second_look = not self._woken.wait(None if is_second_look else LOOK_AGAIN_S)
            self._woken.clear()
            while not self._closed and not self._is_busy():
                try:
                    if not self._sweep(SLICE_S):
                        break
                except Exception:
                    # The next epoch meets the same state and says what is wrong with it.
                    logger.exception("expired state could not be removed")
                    break
                time.sleep(REST_S)
            if self._closed:
                return
