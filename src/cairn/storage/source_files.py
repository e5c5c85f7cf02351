"""The folder sources/ of Spark's streaming checkpoint: read, and made again.

    sources/<index>/<n>          the files that a file source saw in its entry n
    sources/<index>/<n>.compact  those of all entries up to n
    sources/<index>/0            of other sources: where they began

Always true here:
- an entry has lines, or it is refused: Spark never adds an empty one;
- a list is made again from its lines alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from cairn.errors import CorruptFileError, RestoreError
from cairn.storage.manifest import SparkPosition
from cairn.storage.seen_files import COMPACT, DEFAULT_INTERVAL
from cairn.storage.store import NotFoundError, Store

FILE_BYTES_MAX: Final = 16 * 1024
"""Larger files than this of other sources are left to Spark's folder."""
_TAIL_BYTES: Final = 64 * 1024
_HEAD_LINES: Final = 2
_VERSION: Final = re.compile(r"v\d+")
_ENTRY: Final = re.compile(r"(\d+)(\.compact)?")


class _Line(msgspec.Struct):
    path: str
    batchId: int  # noqa: N815, as Spark calls it.


_decode_line: Final = msgspec.json.Decoder(_Line).decode


def source_lines(offsets: str) -> list[str]:
    """The line of each source in an offsets file."""
    return offsets.strip().split("\n")[_HEAD_LINES:]


def log_offset(line: str) -> int | None:
    """The file source's offset; None for other sources."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    value = parsed.get("logOffset") if isinstance(parsed, dict) else None
    return value if isinstance(value, int) else None


# Reading


def new_lines(
    store: Store, position: SparkPosition, index: int, after: int, last: int, *, is_known: bool
) -> list[str]:
    """The lines of the entries after one, up to another."""
    folder = f"{position.folder}/sources/{index}"
    if last == after + 1:
        lines = _entry_lines(store, folder, last)
        if lines:
            return lines
    by_entry = _lines_by_entry(store, folder)
    # If the list was never kept, Spark may have removed old entries of it.
    needed = range(after + 1, last + 1) if is_known else [last]
    missing = [number for number in needed if not by_entry.get(number)]
    if missing:
        raise list_is_gone(store, position, index, missing[0])
    return [line for number in range(after + 1, last + 1) for line in by_entry.get(number, ())]


def _entry_lines(store: Store, folder: str, number: int) -> list[str]:
    """The lines of one entry; none when they are not found at once."""
    try:
        lines = lines_of(store.get(f"{folder}/{number}"), f"{store.url}/{folder}/{number}")
    except NotFoundError:
        lines = _compact_tail(store, folder, number)
    return [line for line in lines if entry_of(line) == number]


def _compact_tail(store: Store, folder: str, number: int) -> list[str]:
    """The lines at the end of a compact file that may be of its own entry."""
    path = f"{folder}/{number}.compact"
    size = _size(store, folder, path)
    if size is None:
        return []
    length = _TAIL_BYTES
    while True:
        start = max(0, size - length)
        data = store.get_range(path, start, size - start)
        # The first one is the file's head, or cut.
        lines = data.decode(errors="replace").split("\n")[1:]
        if start == 0 or (lines and entry_of(lines[0]) not in (None, number)):
            return lines
        length *= 4


def _size(store: Store, folder: str, path: str) -> int | None:
    """The size of a file in a folder; None when it is not there."""
    local = store.local_path(path)
    if local is not None:
        return os.path.getsize(local) if os.path.exists(local) else None
    return next((found.size for found in store.list(folder) if found.path == path), None)


def _lines_by_entry(store: Store, folder: str) -> dict[int, list[str]]:
    """All lines in a folder, each once."""
    found: dict[int, dict[str, None]] = {}
    for there in store.list(folder):
        if not _ENTRY.fullmatch(there.path.rpartition("/")[2]):
            continue
        try:
            lines = lines_of(store.get(there.path), f"{store.url}/{there.path}")
        except NotFoundError:
            continue  # Spark has cleaned it up since it was listed.
        for line in lines:
            number = entry_of(line)
            if number is not None:
                found.setdefault(number, {})[line] = None
    return {number: list(lines) for number, lines in found.items()}


def lines_of(data: bytes, name: str) -> list[str]:
    """The lines of an entry, without Spark's head."""
    try:
        head, *lines = data.decode().split("\n")
    except UnicodeDecodeError:
        head, lines = "", []
    if not _VERSION.fullmatch(head):
        raise CorruptFileError(
            f"Spark's list of files that a source has read is damaged\n  file: {name}\n"
            f"  expected: v1 in its first line, found: {head[:20]!r}\n"
            "  next: bring the file back from a backup",
            file=name,
        )
    return [line for line in lines if line]


def entry_of(line: str) -> int | None:
    """Return the entry that a line of a list belongs to; None if it is not such a line."""
    try:
        return _decode_line(line.encode()).batchId
    except msgspec.MsgspecError:
        return None


def in_order(names: Iterable[str]) -> list[str]:
    """The files of a list that Spark reads: from the last compact one on."""
    entries = {int(match[1]): name for name in names if (match := _ENTRY.fullmatch(name))}
    start = max((n for n, name in entries.items() if name.endswith(".compact")), default=0)
    return [entries[number] for number in sorted(entries) if number >= start]


def is_entry(name: str) -> bool:
    """True if a file of this name is an entry of a file source's list."""
    return _ENTRY.fullmatch(name) is not None


def is_kept(name: str, size: int) -> bool:
    """True if this is the first entry of a log, which is written once, and small."""
    return name.rpartition("/")[2] == "0" and size <= FILE_BYTES_MAX


def small_files(store: Store, folder: str, index: int) -> dict[str, bytes]:
    """The files of a source that are kept, by path below sources/<index>/."""
    root = f"{folder}/sources/{index}/"
    found = {}
    for there in store.list(root):
        name = there.path[len(root) :]
        if is_kept(name, there.size):
            found[name] = store.get(there.path)
    return found


def read_sources(
    store: Store,
    position: SparkPosition,
    cuts: Mapping[int, int | None],
    only: Collection[int] | None,
) -> tuple[dict[str, bytes], dict[int, dict[str, bytes]]]:
    """(files to be kept as they are, entries of lists that must be cut, by source)."""
    root = f"{position.folder}/sources/"
    files: dict[str, bytes] = {}
    logs: dict[int, dict[str, bytes]] = {}
    for found in store.list(root):
        name = found.path[len(root) :]
        source, _, entry = name.partition("/")
        index = int(source) if source.isdigit() else None
        if only is not None and index not in only:
            continue
        is_list = index is not None and cuts.get(index) is not None and _ENTRY.fullmatch(entry)
        if is_list and index in position.logs:
            continue
        try:
            data = store.get(found.path)
        except NotFoundError:
            continue  # Spark has cleaned it up since it was listed.
        if index is not None and is_list:
            logs.setdefault(index, {})[entry] = data
        else:
            files[name] = data
    return files, logs


# Making


def list_is_gone(store: Store, position: SparkPosition, index: int, number: int) -> RestoreError:
    """The error for an entry of a file source's list that is not there."""
    file = f"{position.folder}/sources/{index}/{number}"
    return RestoreError(
        f"Spark's list of files already read by source {describe_source(position, index)} is gone\n"
        f"  expected: {store.url}/{file}\n"
        "  going on without it would read every file again\n"
        "  next: say where Spark's log is, if elsewhere (spark_checkpoint=, --spark-checkpoint), "
        "or restore that folder from a backup",
        file=file,
    )


def describe_source(position: SparkPosition, index: int) -> str:
    """A source in an error message."""
    names = position.sources
    return f"{index} ({names[index]!r})" if index < len(names) else str(index)


def entry_name(number: int) -> str:
    """The file of an entry, in error messages: as it is called with Spark's default interval."""
    return str(number) if (number + 1) % DEFAULT_INTERVAL else f"{number}{COMPACT}"
