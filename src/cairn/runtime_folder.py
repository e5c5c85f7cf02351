"""The runtime folder of one user on one machine, and locks on folders in it.

Always true here:
- the runtime folder belongs to this user, and no other can enter it or put a link in its place;
- a folder that a process holds is not removed while the process lives, however old its files are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


def runtime_root() -> Path:
    """Return the runtime folder, made if need be. PermissionError when others could use it."""
    given = os.environ.get("CAIRN_RUNTIME_DIR")
    root = Path(given) if given else Path(tempfile.gettempdir()) / f"cairn-{os.getuid()}"
    if not root.is_symlink():
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The link is checked too: its owner decides where it leads.
    for info in (root.lstat(), root.stat()):
        if info.st_uid != os.getuid():
            raise _unsafe(root, f"it belongs to user {info.st_uid}")
    is_folder = stat.S_ISDIR(info.st_mode)
    if not is_folder or info.st_mode & 0o077:
        action = f"`chmod 700 {root}`" if is_folder else "remove it"
        raise _unsafe(root, f"its mode is {stat.filemode(info.st_mode)}", action)
    return root


def _unsafe(root: Path, found: str, action: str = "remove it") -> PermissionError:
    return PermissionError(
        f"the runtime folder {root} must belong to this user and be closed to others\n"
        f"  expected: a folder of user {os.getuid()} with mode drwx------\n  found: {found}\n"
        f"  next: {action}, or set CAIRN_RUNTIME_DIR to a folder of your own"
    )


def hold(folder: Path) -> int:
    """Take a shared lock on a folder; it is held until the descriptor is closed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def hold_made(folder: Path) -> Iterator[None]:
    """Make a folder and hold it, so that `sweep` leaves it alone."""
    while True:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = hold(folder)
        except FileNotFoundError:
            continue  # `sweep` has removed it, or the empty folder that it is in.
        # While this waited for the lock the folder may have been removed.
        if _is_at(descriptor, folder):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False
