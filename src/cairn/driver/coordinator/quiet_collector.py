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
                _count_as_old()
                gc.enable()


def _count_as_old() -> None:
    """Move all objects to the oldest generation, as if they had survived its collection.

    Otherwise the collector would go through all new ones at once. Most of them are gone before it
    looks at the oldest generation again.
    """
    # Both calls only join lists. A user's own frozen objects would be thawed.
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
