"""Write local files that survive a power cut: fsync of the file, then of its folder.

Content is written under a hidden name beside the target. The caller renames it, and so decides
what happens to an existing file.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from typing import Final

_COPY_CHUNK_BYTES: Final = 4 << 20
_TEMPORARY: Final = re.compile(r"\.(.+)\.[0-9a-f]{32}#0")


def temporary_path(target: str) -> str:
    """Return a hidden name beside the target. `#` makes obstore's listing skip it too."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.{uuid.uuid4().hex}#0")


def target_of_temporary(path: str) -> str | None:
    """Return the target of a temporary file by its name; None for other files."""
    folder, name = os.path.split(path)
    found = _TEMPORARY.fullmatch(name)
    return os.path.join(folder, found[1]) if found else None


def write_temporary(target: str, fill: Callable[[int], None]) -> str:
    """Write a durable hidden file beside the target, and return its path."""
    temporary = temporary_path(target)
    file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        try:
            fill(file)
            os.fsync(file)
        finally:
            os.close(file)
    except BaseException:
        os.unlink(temporary)
        raise
    return temporary


def write_all(file: int, data: bytes) -> None:
    """Write all bytes: a single `os.write` may write fewer."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(file, rest) :]


def copy_all(file: int, local_file: str) -> None:
    """Copy the content of a local file into an open one."""
    with open(local_file, "rb", buffering=0) as source:
        while chunk := source.read(_COPY_CHUNK_BYTES):
            write_all(file, chunk)


def make_folders(root: str, folder: str) -> None:
    """Make a folder below `root`, and those between the two."""
    missing = []
    while len(folder) > len(root) and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(missing):
        os.makedirs(path, exist_ok=True)
        # The parent lists the new folder: without this a power cut may lose it.
        fsync_folder(os.path.dirname(path))


def fsync_folder(folder: str) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
