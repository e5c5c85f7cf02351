"""The runtime folder: where the slots of one user on one machine keep sockets, state and logs.

    <runtime>/<run>/<executor>/
        slot-<i> -> p-<id>      the process that is slot i now
        slot-<i>.lock           held while one is started
        slot-<i>.log            output and log of slot i; slot-<i>.log.1 is the part before
        p-<id>/                 of one process: pid, socket, door, scratch
            memory              how near its limit of memory it is, read if it is killed
            scratch -> <local folder>/cairn-slot-<id>     where Spark has local folders
        p-spark/                Spark's streaming checkpoint, if <executor> is a driver
    <runtime>/nursery-<executor>/       socket, lock, log
    <runtime>/driver-<pid>-<time>/      log of a driver's JVM
    <runtime>/hadoop-<digest>/          pipe, address, lock, log of a JVM for Hadoop's client

State on disk lies in a local folder of Spark (SPARK_LOCAL_DIRS, on YARN LOCAL_DIRS) where the
executor has one: these are the disks that a cluster gives to its jobs.

The name of an executor has its pid, its start and its pid namespace: containers may share the
folder. Paths are short, because that of a Unix socket holds about a hundred characters.

Always true here:
- the runtime folder belongs to this user, and no other can enter it or put a link in its place;
- a process that lives in a folder of an executor has a shared lock on it. systemd-tmpfiles leaves
  locked folders alone however old their files are, and so does `sweep`, which needs no process id
  to see who is alive;
- logs outlive their processes by a week, everything else goes with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from cairn.process_identity import ProcessIdentity, parse_identity, pid_namespace
from cairn.runtime_folder import runtime_root

LOG_BYTES_MAX: Final = 10 << 20
"""Limit of the part of a log that is written to; the part before is kept too."""
LOGS_KEPT_S: Final = 7 * 24 * 3600.0
SOCKET_PATH_BYTES_MAX: Final = 103 if sys.platform == "darwin" else 107
_SCRATCH: Final = "cairn-slot-"
_EXCESS: Final = "memory"
_RUN: Final = re.compile(r"[0-9a-f]{12}")
_EXECUTOR: Final = re.compile(r"\d+-\d+-[0-9a-f]+")
_OTHERS: Final = re.compile(rf"nursery-{_EXECUTOR.pattern}|driver-\d+-\d+|hadoop-[0-9a-f]{{12}}")


def run_folder(run_id: str) -> Path:
    return runtime_root() / run_id[:12]


def executor_name(executor: ProcessIdentity) -> str:
    return f"{executor}-{pid_namespace()}"


class Living(NamedTuple):
    """A slot that can be called: a process, and its folder."""

    slot: int
    process: ProcessIdentity
    folder: Path

    @property
    def location(self) -> str:
        return f"grpc+unix://{self.folder / 'socket'}"

    @property
    def executor_pid(self) -> int:
        return int(self.folder.parent.name.partition("-")[0])


def living_slot(link: Path) -> Living | None:
    """Return the slot that a link `slot-<i>` leads to, if it lives and was not told to end."""
    try:
        folder = link.parent / os.readlink(link)
        process = parse_identity((folder / "pid").read_text())
        slot = int(link.name.removeprefix("slot-"))
    except (OSError, ValueError):
        return None
    return Living(slot, process, folder) if process.is_alive else None


def living_slots(folder: Path) -> list[Living]:
    """Return the living slots of a run, by its folder; of all executors on this machine."""
    links = sorted(link for link in folder.glob("*/slot-*") if not link.suffix)
    return [found for link in links if (found := living_slot(link)) is not None]


def check_socket_path(folder: Path) -> None:
    """Raise OSError unless a socket in this folder can be bound."""
    path = os.fsencode(folder / "socket")
    if len(path) > SOCKET_PATH_BYTES_MAX:
        raise OSError(
            f"the path of a slot's socket is too long: {os.fsdecode(path)}\n"
            f"  expected: at most {SOCKET_PATH_BYTES_MAX} bytes\n  found: {len(path)}\n"
            "  next: set CAIRN_RUNTIME_DIR to a shorter path"
        )


# Locks


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Yield True if no process lives in the folder; then none moves in meanwhile."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_alone = True
    except OSError:
        is_alone = False
    try:
        yield is_alone
    finally:
        os.close(descriptor)


# State on disk


def local_folders() -> list[Path]:
    """Return the local folders that Spark gives to this executor; empty: none are set."""
    for name in ("LOCAL_DIRS", "SPARK_LOCAL_DIRS"):
        given = os.environ.get(name, "")
        if given:
            return [Path(each.strip()) for each in given.split(",") if each.strip()]
    return []


def make_scratch(process: Path, slot: int) -> Path:
    """Make the folder for the state of a slot's process: on a local folder of Spark, if it has any.

    Slots take the local folders in turn, so that all disks are used. One that cannot be written to
    is left out.
    """
    scratch = process / "scratch"
    folders = local_folders()
    for turn in range(len(folders)):
        folder = folders[(slot + turn) % len(folders)]
        target = folder / f"{_SCRATCH}{process.parent.name}-{process.name}"
        try:
            target.mkdir(mode=0o700)
        except OSError:
            continue
        scratch.symlink_to(target)
        return scratch
    scratch.mkdir(mode=0o700)
    return scratch


def remove_process(folder: Path) -> None:
    """Remove the folder of a process, and its state on another disk."""
    with contextlib.suppress(OSError):
        target = Path(os.readlink(folder / "scratch"))
        if target.name.startswith(_SCRATCH):
            shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


# Leftovers


def remove_dead(executor: Path) -> None:
    """Remove the folders of processes beside an executor that were killed."""
    for folder in executor.glob("p-*"):
        for name in ("pid", "ended"):
            try:
                process = parse_identity((folder / name).read_text())
            except (OSError, ValueError):
                continue
            if not process.is_alive:
                remove_process(folder)


def sweep(root: Path, now_s: float) -> None:
    """Remove what is left of ended runs: state at once, logs when they are old enough."""
    for folder in list(root.iterdir()):
        if _OTHERS.fullmatch(folder.name):
            _sweep_folder(folder, now_s)
        elif _RUN.fullmatch(folder.name):
            for executor in list(folder.iterdir()):
                if _EXECUTOR.fullmatch(executor.name):
                    _sweep_folder(executor, now_s)
            with contextlib.suppress(OSError):
                folder.rmdir()  # Only when it is empty.


def _sweep_folder(folder: Path, now_s: float) -> None:
    with _alone(folder) as is_alone:
        if not is_alone:
            return
        for process in folder.glob("p-*"):
            remove_process(process)
        with contextlib.suppress(OSError):
            logs = [entry for entry in folder.iterdir() if entry.suffix not in ("", ".lock")]
            newest_s = max(entry.lstat().st_mtime for entry in (*logs, folder))
            if now_s - newest_s > LOGS_KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)


def keep_excess(process: Path, excess: str) -> None:
    """Note how near a slot's process is to its limit of memory, to be read if it is killed."""
    with contextlib.suppress(OSError):
        if excess:
            # It may be killed while it writes.
            new = process / f"{_EXCESS}.new"
            new.write_text(excess)
            new.replace(process / _EXCESS)
        else:
            (process / _EXCESS).unlink(missing_ok=True)


def read_excess(process: Path) -> str:
    """Return what `keep_excess` noted last; "" if there is nothing."""
    try:
        return (process / _EXCESS).read_text()
    except OSError:
        return ""


def link_log(log: Path, executor_pid: int) -> None:
    """Link a slot's log from the folder in which Spark keeps the output of the executor.

    On YARN that is a folder of LOG_DIRS, on a standalone worker the working folder of the executor.
    Elsewhere there is none: the working folder may be anything.
    """
    folders = [Path(each) for each in os.environ.get("LOG_DIRS", "").split(",") if each]
    if not folders:
        with contextlib.suppress(OSError):
            working = Path(f"/proc/{executor_pid}/cwd").resolve(strict=True)
            if (working / "stdout").is_file() and (working / "stderr").is_file():
                folders = [working]
    for folder in folders[:1]:
        with contextlib.suppress(OSError):
            link = folder / f"cairn-{log.name}"
            if link.is_symlink():
                link.unlink()  # An earlier run on this executor made it.
            link.symlink_to(log)


def bound_log(log: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
    """Let stdout and stderr of this process go on in a new file when this one is long."""
    with contextlib.suppress(OSError):
        if os.fstat(1).st_size <= bytes_max:
            return
        os.replace(log, f"{log}.1")
        redirect_output(log)


def redirect_output(log: Path) -> None:
    """Append stdout and stderr of this process to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
