"""Pause Python's garbage collector while the driver works on one epoch.

An epoch of a large job makes a hundred thousand short-lived objects, none of them in a cycle. The
collector would look at all that live several times per epoch, and take as long as the work itself.

Always true here:
- a collector that the user has turned off stays off;
- the last of several pauses at once turns it on again.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def pause_collector() -> Iterator[None]:
    """Within the block, nothing is collected but what has no reference left."""
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()
