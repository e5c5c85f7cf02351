"""Read the folder sources/ of Spark's streaming checkpoint.

    sources/<index>/<n>          the log of a file source: the files that it found in its listing n
    sources/<index>/<n>.compact  the files of all listings up to n
    sources/<index>/0            the start of other sources

Always true here:
- a file of a log has lines, or it is refused: Spark never writes an empty one.
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
_LOG_FILE: Final = re.compile(r"(\d+)(\.compact)?")


class _Line(msgspec.Struct):
    path: str
    batchId: int  # noqa: N815, as Spark calls it.


_decode_line: Final = msgspec.json.Decoder(_Line).decode


def source_lines(offsets: str) -> list[str]:
    """Return the line of each source in an offsets file."""
    return offsets.strip().split("\n")[_HEAD_LINES:]


def log_offset(line: str) -> int | None:
    """Return the offset of a file source; None for other sources."""
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
    """Return the lines of a file source's log after file `after`, up to file `last`."""
    folder = f"{position.folder}/sources/{index}"
    if last == after + 1:
        lines = _file_lines(store, folder, last)
        if lines:
            return lines
    by_number = _lines_by_number(store, folder)
    # If the log was never kept, Spark may have removed old files of it.
    needed = range(after + 1, last + 1) if is_known else [last]
    missing = [number for number in needed if not by_number.get(number)]
    if missing:
        raise list_is_gone(store, position, index, missing[0])
    return [line for number in range(after + 1, last + 1) for line in by_number.get(number, ())]


def _file_lines(store: Store, folder: str, number: int) -> list[str]:
    """Return the lines of one file of a log; none if they are not found at once."""
    try:
        lines = lines_of(store.get(f"{folder}/{number}"), f"{store.url}/{folder}/{number}")
    except NotFoundError:
        lines = _compact_tail(store, folder, number)
    return [line for line in lines if listing_of(line) == number]


def _compact_tail(store: Store, folder: str, number: int) -> list[str]:
    """Return the lines at the end of a compact file, those of its own listing among them."""
    path = f"{folder}/{number}.compact"
    size = _size(store, folder, path)
    if size is None:
        return []
    length = _TAIL_BYTES
    while True:
        start = max(0, size - length)
        data = store.get_range(path, start, size - start)
        # The first line is the header, or cut.
        lines = data.decode(errors="replace").split("\n")[1:]
        if start == 0 or (lines and listing_of(lines[0]) not in (None, number)):
            return lines
        length *= 4


def _size(store: Store, folder: str, path: str) -> int | None:
    """Return the size of a file in a folder; None if it does not exist."""
    local = store.local_path(path)
    if local is not None:
        return os.path.getsize(local) if os.path.exists(local) else None
    return next((found.size for found in store.list(folder) if found.path == path), None)


def _lines_by_number(store: Store, folder: str) -> dict[int, list[str]]:
    """Return all lines in a folder by listing, without repetitions."""
    found: dict[int, dict[str, None]] = {}
    for there in store.list(folder):
        if not _LOG_FILE.fullmatch(there.path.rpartition("/")[2]):
            continue
        try:
            lines = lines_of(store.get(there.path), f"{store.url}/{there.path}")
        except NotFoundError:
            continue  # Spark has cleaned it up since it was listed.
        for line in lines:
            number = listing_of(line)
            if number is not None:
                found.setdefault(number, {})[line] = None
    return {number: list(lines) for number, lines in found.items()}


def lines_of(data: bytes, name: str) -> list[str]:
    """Return the lines of a file of a log, without Spark's header."""
    try:
        head, *lines = data.decode().split("\n")
    except UnicodeDecodeError:
        head, lines = "", []
    if not _VERSION.fullmatch(head):
        raise CorruptFileError(
            f"Spark's list of files that a source has read is damaged\n  file: {name}\n"
            f"  expected: v1 in its first line, found: {head[:20]!r}\n"
            "  next: restore the file from a backup",
            file=name,
        )
    return [line for line in lines if line]


def listing_of(line: str) -> int | None:
    """Return the listing that a line of a log belongs to; None if it is not such a line."""
    try:
        return _decode_line(line.encode()).batchId
    except msgspec.MsgspecError:
        return None


def in_order(names: Iterable[str]) -> list[str]:
    """Return the files of a log that Spark reads: from the last compact one on."""
    numbered = {int(match[1]): name for name in names if (match := _LOG_FILE.fullmatch(name))}
    start = max((n for n, name in numbered.items() if name.endswith(".compact")), default=0)
    return [numbered[number] for number in sorted(numbered) if number >= start]


def is_log_file(name: str) -> bool:
    """True if a file of this name belongs to the log of a file source."""
    return _LOG_FILE.fullmatch(name) is not None


def is_kept(name: str, size: int) -> bool:
    """True if this is the first file of a source, which is written once, and small."""
    return name.rpartition("/")[2] == "0" and size <= FILE_BYTES_MAX


def small_files(store: Store, folder: str, index: int) -> dict[str, bytes]:
    """Return the files of a source that an epoch keeps, by path below sources/<index>/."""
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
    """Return the files to keep unchanged, and by source the files of logs that must be cut."""
    root = f"{position.folder}/sources/"
    files: dict[str, bytes] = {}
    logs: dict[int, dict[str, bytes]] = {}
    for found in store.list(root):
        name = found.path[len(root) :]
        source, _, file = name.partition("/")
        index = int(source) if source.isdigit() else None
        if only is not None and index not in only:
            continue
        is_list = index is not None and cuts.get(index) is not None and _LOG_FILE.fullmatch(file)
        if is_list and index in position.logs:
            continue
        try:
            data = store.get(found.path)
        except NotFoundError:
            continue  # Spark has cleaned it up since it was listed.
        if index is not None and is_list:
            logs.setdefault(index, {})[file] = data
        else:
            files[name] = data
    return files, logs


# Making


def list_is_gone(store: Store, position: SparkPosition, index: int, number: int) -> RestoreError:
    """Return the error of a file source whose log has lost a file."""
    file = f"{position.folder}/sources/{index}/{number}"
    return RestoreError(
        f"Spark's list of files already read by source {describe_source(position, index)} is gone\n"
        f"  expected: {store.url}/{file}\n"
        "  without it, every file would be read again\n"
        "  next: say where Spark's log is, if elsewhere (spark_checkpoint=, --spark-checkpoint), "
        "or restore that folder from a backup",
        file=file,
    )


def describe_source(position: SparkPosition, index: int) -> str:
    """Return the name of a source for an error message."""
    names = position.sources
    return f"{index} ({names[index]!r})" if index < len(names) else str(index)


def log_file_name(number: int) -> str:
    """Return the name of a file of a log with Spark's default interval, for error messages."""
    return str(number) if (number + 1) % DEFAULT_INTERVAL else f"{number}{COMPACT}"
