"""Identities of processes: ids are used again, so the start of the process counts too.

The start is read as the kernel recorded it: clock ticks after the boot. A start time in seconds
since 1970 is computed from the time of the boot, and that moves when the wall clock is set.

Always true here:
- a step of the wall clock changes no identity;
- a process that has ended and was not collected by its parent yet does not count as alive;
- a process that cannot be looked at for want of files or memory counts as alive;
- an identity means something in one pid namespace only, so names of folders that may be seen
  from several have the namespace in them (`pid_namespace`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import psutil

PROC = Path("/proc")


class ProcessIdentity(NamedTuple):
    """A process, as distinct from others that have had its id or will have it."""

    pid: int
    started: int
    """Clock ticks after the boot. Without /proc: microseconds after 1970, noted at the start."""

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}"

    @property
    def is_alive(self) -> bool:
        try:
            found = _read(self.pid)
        except OSError:
            return True  # Not to see it, with too many files open say, is not to see it gone.
        return found is not None and found.started == self.started and not found.is_zombie


class _Process(NamedTuple):
    parent: int
    name: str
    is_zombie: bool
    started: int


def is_pid_alive(pid: int, *, began_by_ms: int | None = None) -> bool | None:
    """True if a process of this id lives, and began by that time; None if it cannot be seen.

    For records that have no identity: the id alone may belong to another process by now.
    """
    try:
        process = psutil.Process(pid)
        if began_by_ms is not None and float(process.create_time()) * 1000 > began_by_ms:
            return False
        return str(process.status()) != str(psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return None


def parse_identity(text: str) -> ProcessIdentity:
    """Return what `str` made. ValueError for any other text."""
    pid, started = text.split("-")
    return ProcessIdentity(int(pid), int(started))


def identify(pid: int | None = None) -> ProcessIdentity:
    """Return the identity of a living process, by default of this one. ProcessLookupError else."""
    pid = os.getpid() if pid is None else pid
    found = _read(pid)
    if found is None:
        raise ProcessLookupError(f"process {pid} does not exist")
    return ProcessIdentity(pid, found.started)


def parent_of(pid: int) -> int:
    """Return the id of the parent; 0 where there is none to be seen."""
    found = _read(pid)
    return 0 if found is None else found.parent


def is_jvm(pid: int) -> bool:
    """True if the process runs Java: by its name, or by the library that it has loaded."""
    found = _read(pid)
    if found is None:
        return False
    if "java" in found.name.lower():
        return True
    try:
        return b"libjvm" in (PROC / str(pid) / "maps").read_bytes()
    except OSError:
        return False


def pid_namespace() -> str:
    """Return a short name of the namespace in which this process sees process ids."""
    try:
        return f"{os.stat(PROC / 'self/ns/pid').st_ino & 0xFFFFFF:x}"
    except OSError:
        return "0"


def _read(pid: int) -> _Process | None:
    if not (PROC / "self").exists():
        return _read_elsewhere(pid)
    try:
        # Names are cut to fifteen bytes, in the middle of a character too.
        text = (PROC / str(pid) / "stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # It has ended, or it is another user's.
    # The name may have spaces and parentheses in it; nothing after it has.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return _Process(
        parent=int(fields[1]),
        name=head.partition("(")[2],
        is_zombie=fields[0] in ("Z", "X"),
        started=int(fields[19]),
    )


def _read_elsewhere(pid: int) -> _Process | None:
    """Without /proc, as on macOS: there the kernel notes the wall time of the start for good."""
    try:
        process = psutil.Process(pid)
        return _Process(
            parent=process.ppid(),
            name=process.name(),
            is_zombie=process.status() == psutil.STATUS_ZOMBIE,
            started=round(process.create_time() * 1_000_000),
        )
    except psutil.Error:
        return None
