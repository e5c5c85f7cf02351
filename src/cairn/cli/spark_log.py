"""Send the log of the JVM to a file while a live view uses the terminal.

The JVM keeps the stderr it was started with. If it starts inside `stderr_to`, it writes to the
file for its whole life, and Python's own stderr is still the terminal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def spark_log() -> Path:
    """Return a file beside the logs of the slots, removed with them after a week."""
    from cairn.runtime_folder import hold, runtime_root

    folder = runtime_root() / f"driver-{os.getpid()}-{int(time.time())}"
    folder.mkdir(mode=0o700)
    hold(folder)  # It is not removed while this process lives.
    return folder / "spark.log"


@contextmanager
def stderr_to(log: Path) -> Iterator[None]:
    """Processes that start inside the block have the file as stderr."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
