"""The JVM's classes in an archive: a JVM that maps it need not load and check them one by one.

Half of a start is class loading. An archive holds the classes that a small job has loaded, for one
Java, one set of jars and one set of options. It lies in the user's cache and is made once, in the
background, after the first program without one has ended (`cairn.driver.archiving`).

    ~/.cache/cairn/classes/<key>.jsa       an archive
    ~/.cache/cairn/classes/<key>.failed    why there is none, so that it is not tried again

    CAIRN_CLASS_ARCHIVE=0                  use none, make none

Always true here:
- nothing depends on an archive: the JVM starts without one that does not fit or is damaged;
- an archive is put in place whole, and only from a folder that no other user can write to;
- a program that brings an archive of its own keeps it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psutil

VARIABLE: Final = "CAIRN_CLASS_ARCHIVE"
FREE_BYTES_MIN: Final = 2 << 30
"""Memory that must be free when one is made: it takes a JVM of its own."""
UNUSED_S_MAX: Final = 30 * 86400
JVM_SETTINGS: Final = (
    "spark.driver.memory",
    "spark.driver.extraJavaOptions",
    "spark.driver.defaultJavaOptions",
    "spark.driver.extraClassPath",
)
JVM_VARIABLES: Final = (
    "SPARK_SUBMIT_OPTS",
    "JDK_JAVA_OPTIONS",
    "JAVA_TOOL_OPTIONS",
    "_JAVA_OPTIONS",
)
_OWN_ARCHIVE: Final = ("SharedArchiveFile", "ArchiveClassesAtExit", "-Xshare", "-XX:AOT")
# The JVM would print why it does not use an archive that does not fit.
_SILENT: Final = "-Xlog:disable -Xlog:all=error:stderr"


class Archive(NamedTuple):
    """The archive of a JVM, which may not be there yet."""

    path: Path
    settings: dict[str, str]
    """Spark settings that the JVM is started with."""

    @property
    def failed(self) -> Path:
        return self.path.with_suffix(".failed")

    @property
    def exists(self) -> bool:
        return self.path.is_file()

    @property
    def options(self) -> str:
        """Return options that make the JVM use the archive, if it exists."""
        return f"-XX:SharedArchiveFile={self.path} {_SILENT}"

    def mark_used(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


def find_archive(java: str, jars: Path, settings: Mapping[str, str]) -> Archive | None:
    """Return where the archive of such a JVM belongs; None if there shall be none.

    `java` identifies the Java: what it says about its version.
    """
    if os.environ.get(VARIABLE) == "0":
        return None
    given = {name: settings[name] for name in JVM_SETTINGS if name in settings}
    variables = {name: os.environ[name] for name in JVM_VARIABLES if name in os.environ}
    options = " ".join([*given.values(), *variables.values()])
    if any(mark in options for mark in (*_OWN_ARCHIVE, "-Xlog")):
        return None
    folder = _folder()
    # Spark splits options at blanks.
    if folder is None or any(c.isspace() or c in "\"'\\" for c in str(folder)):
        return None
    try:
        listed = [(jar.name, jar.stat().st_size, jar.stat().st_mtime_ns) for jar in jars.iterdir()]
    except OSError:
        return None
    parts = [java, str(jars), sorted(listed), sorted(given.items()), sorted(variables.items())]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return Archive(folder / f"{key}.jsa", given)


def make_in_background(archive: Archive) -> subprocess.Popen[bytes] | None:
    """Start a process that makes the archive, unless it is there or there is a reason not to."""
    if archive.exists or archive.failed.exists():
        return None
    if psutil.virtual_memory().available < FREE_BYTES_MIN:
        return None
    command = [sys.executable, "-m", "cairn.driver.archiving", str(archive.path)]
    with contextlib.suppress(OSError, RuntimeError):  # Too late in the life of the interpreter.
        return subprocess.Popen(
            [*command, json.dumps(archive.settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
    return None


def remove_unused(folder: Path, keep: Sequence[Path] = ()) -> None:
    """Remove archives that no JVM has used for a month: each has a hundred megabytes or more."""
    before_s = time.time() - UNUSED_S_MAX
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path not in keep and path.stat().st_mtime < before_s:
                path.unlink()


def _folder() -> Path | None:
    """Return the folder of archives, if it is this user's alone: the JVM runs what is in it."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "cairn" / "classes"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
    except (OSError, RuntimeError):
        return None
    is_ours = info.st_uid == os.getuid() and not info.st_mode & 0o022
    return folder.resolve() if is_ours and os.access(folder, os.W_OK) else None
