"""`memory:` checkpoints: folders in memory that are removed with their process.

For tests and first tries, on one machine. Slots are other processes, so this cannot be memory
of the driver: it is a private folder in /dev/shm, or without that in the temporary folder.
Other processes open it by its file url.

Always true here:
- a folder is removed when the process that made it exits; when that was killed, the
  next process that makes one removes it;
- the folder of a living process is never removed by another.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import tempfile
import threading
import uuid
from typing import Final

from cairn.process_identity import identify, parse_identity, pid_namespace

SHARED_MEMORY: Final = "/dev/shm"
_PREFIX: Final = "cairn-memory"
_ROOT_NAME: Final = re.compile(rf"{_PREFIX}-ns([0-9a-f]+)-(\d+-\d+)-\w+")
_NAME: Final = re.compile(r"[\w.-]+")

_lock = threading.Lock()
_root: str | None = None


def memory_folder(name: str = "") -> str:
    """Return a new folder; for a name, the same one each time in this process."""
    global _root
    if name and (not _NAME.fullmatch(name) or name.startswith(".")):
        raise ValueError(
            f"cannot open a store at 'memory:{name}'\n"
            "  expected: memory: or memory:name, the name of letters, digits, '-', '_' and '.'"
        )
    with _lock:
        if _root is None or not os.path.isdir(_root):
            _remove_stale(_parent())
            prefix = f"{_PREFIX}-ns{pid_namespace()}-{identify()}-"
            _root = tempfile.mkdtemp(prefix=prefix, dir=_parent())
            atexit.register(_remove, _root, os.getpid())
        return os.path.join(_root, name or uuid.uuid4().hex)


def _parent() -> str:
    usable = os.path.isdir(SHARED_MEMORY) and os.access(SHARED_MEMORY, os.W_OK)
    return SHARED_MEMORY if usable else tempfile.gettempdir()


def _remove(root: str, owner: int) -> None:
    # A forked child exits too, while its parent still works.
    if os.getpid() == owner:
        shutil.rmtree(root, ignore_errors=True)


def _remove_stale(parent: str) -> None:
    with os.scandir(parent) as entries:
        for entry in entries:
            match = _ROOT_NAME.fullmatch(entry.name)
            if match is None:
                continue
            namespace, owner = match.groups()
            # A process id of another container may be in use here.
            if namespace != pid_namespace() or parse_identity(owner).is_alive:
                continue
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    shutil.rmtree(entry.path, ignore_errors=True)
