"""Lines on the terminal about how far a start has come: Spark, takeover, restore, first epoch.

    cairn    6.2 s  Spark 4.1.0 is up on local[*]

Always true here:
- nothing is printed where nobody watches: stderr must be a terminal, and not a notebook's;
- `CAIRN_PROGRESS=1` prints in any case, `CAIRN_PROGRESS=0` never.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Final

VARIABLE: Final = "CAIRN_PROGRESS"

_began_s: float | None = None
_muted = 0


def say(text: str) -> None:
    """Print a stage that was reached, with the seconds since the first one."""
    global _began_s
    now_s = time.monotonic()
    _began_s = now_s if _began_s is None else _began_s
    if not is_watched():
        return
    with contextlib.suppress(OSError, ValueError):  # A terminal that was closed.
        print(f"cairn  {now_s - _began_s:5.1f} s  {text}", file=sys.stderr, flush=True)


def is_watched() -> bool:
    """True if a person reads stderr while the program runs."""
    if _muted:
        return False
    asked = os.environ.get(VARIABLE)
    if asked:
        return asked != "0"
    try:
        return sys.stderr.isatty() and "ipykernel" not in sys.modules
    except (AttributeError, ValueError):  # There is none, or it is closed.
        return False


@contextlib.contextmanager
def mute(*, if_: bool = True) -> Iterator[None]:
    """Print nothing inside: a live view has the terminal."""
    global _muted
    _muted += if_
    try:
        yield
    finally:
        _muted -= if_
