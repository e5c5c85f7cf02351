"""Print the output of a JVM that starts, without the lines that every start prints.

    CAIRN_SPARK_LOG=1        all of it, and warnings later on too
    CAIRN_SPARK_LOG=INFO     the same, with Spark's log at this level

The JVM writes its stderr into a pipe, and a thread copies it to ours.

Always true here:
- only lines that are known, and warnings, are left out, and only until Spark is up;
- the copies go where stderr went when the JVM was started, also when it is redirected later.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from typing import Final

VARIABLE: Final = "CAIRN_SPARK_LOG"
LEVELS: Final = ("ALL", "TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL", "OFF")

NOISE: Final = re.compile(
    rb"WARNING: Using incubator modules: jdk\.incubator\.vector\s*$"
    rb"|Using Spark's default log4j profile: "
    rb"|Setting default log level to "
    rb"|To adjust logging level use sc\.setLogLevel"
    rb"|Setting Spark log level to "
    rb"|\d\d/\d\d/\d\d \d\d:\d\d:\d\d WARN "
)


def log_level() -> str | None:
    """Return the level of Spark's log that the environment asks for; None for a quiet start."""
    asked = os.environ.get(VARIABLE, "").upper()
    if asked in ("", "0", "FALSE", "NO"):
        return None
    return asked if asked in LEVELS else "WARN"


class Relay:
    """Copies a JVM's stderr to ours: `pipe` is what it writes to."""

    def __init__(self) -> None:
        # First: without a stderr the pipe would get its number, and be copied into itself.
        self._target = _copy_of_stderr()
        self._source, self.pipe = os.pipe()
        self._is_up = False
        self._thread = threading.Thread(target=self._copy, daemon=True, name="cairn-spark-stderr")
        self._thread.start()

    def close_pipe(self) -> None:
        """Close our end of the pipe, once the JVM has its own."""
        with contextlib.suppress(OSError):
            os.close(self.pipe)
        self.pipe = -1

    def pass_everything(self) -> None:
        """From now on nothing is left out."""
        self._is_up = True

    def finish(self, timeout_s: float = 2.0) -> None:
        """Wait until the last words of a JVM that has failed are copied."""
        self.close_pipe()
        self._thread.join(timeout_s)

    def _copy(self) -> None:
        rest = b""
        while chunk := os.read(self._source, 1 << 16):
            if self._is_up:
                self._write(rest + chunk)
                rest = b""
                continue
            *lines, rest = (rest + chunk).split(b"\n")
            self._write(b"".join(line + b"\n" for line in lines if not NOISE.match(line)))
        self._write(rest)
        os.close(self._source)
        os.close(self._target)

    def _write(self, text: bytes) -> None:
        # A terminal that is gone takes nothing more; the JVM must not wait for it.
        with contextlib.suppress(OSError):
            while text:
                text = text[os.write(self._target, text) :]


def _copy_of_stderr() -> int:
    try:
        return os.dup(2)
    except OSError:  # It is closed, as for some services.
        return os.open(os.devnull, os.O_WRONLY)
