"""The list of a folder's files in Spark's format: the log of its file sink, `_spark_metadata`.

    <folder>/_spark_metadata/0, 1, … 8, 9.compact, 10, … 19.compact, …

An entry names files. Every tenth entry, `.compact`, names all files and replaces those before
it. If a folder has this log, Spark reads the files it names and no others. So one entry
publishes a whole epoch, on any store.

Always true here:
- an entry is created by put-if-absent under the next number, so a check against the list as it
  was read still holds when the entry exists;
- files leave the list only in a `.compact` entry, which adds a file with their rows;
- an unreadable entry is an error that names it; the list is never cut short silently.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence, Set
from typing import Final, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import msgspec

from cairn.errors import CorruptFileError
from cairn.storage.store import NotFoundError, Store, StoredObject

LIST_FOLDER: Final = "_spark_metadata"
COMPACT: Final = ".compact"
# Spark's default, spark.sql.streaming.fileSink.log.compactInterval.
COMPACT_INTERVAL: Final = 10
# Spark's default, spark.sql.streaming.fileSink.log.cleanupDelay: readers may be that far behind.
KEPT_S: Final = 600.0
_KEPT_ENTRIES: Final = 2 * COMPACT_INTERVAL
_HEAD: Final = b"v1"
_NUMBERED: Final = re.compile(r"(\d+)(\.compact)?")
_READ_ATTEMPTS_MAX: Final = 5


class Listed(msgspec.Struct, frozen=True):
    """A line of an entry, Spark's SinkFileStatus."""

    path: str
    size: int
    isDir: bool  # noqa: N815
    modificationTime: int  # noqa: N815
    blockReplication: int  # noqa: N815
    blockSize: int  # noqa: N815
    action: str


_decoder = msgspec.json.Decoder(Listed)


class Listing(NamedTuple):
    """The list at the time of reading: all entries before `next_number`."""

    next_number: int
    files: list[Listed]
    names: Set[str]
    """The paths of the files inside the folder."""


class _Entry(NamedTuple):
    size: int
    files: list[Listed]
    names: frozenset[str]


Change = Callable[[Listing], "Replacement | None"]


class Replacement(NamedTuple):
    """The change of an entry: it adds files, and a `.compact` entry may replace the others."""

    added: Sequence[Listed]
    all: Sequence[Listed] | None = None
    """All files from here on, without those added."""


class SparkList:
    """The list of one folder. `spark_url` is the folder as Spark names it."""

    def __init__(self, store: Store, spark_url: str) -> None:
        self.store = store
        self._spark_url = spark_url.rstrip("/")
        self._folder_path = unquote(urlsplit(spark_url).path).rstrip("/")
        # Entries do not change, and a `.compact` one may be long.
        self._entries: dict[str, _Entry] = {}

    # Names

    def line(self, name: str, size: int) -> Listed:
        """Return the line of a file, given its path inside the folder."""
        path = f"{self._spark_url}/{quote(name, safe='/=')}"
        return Listed(path, size, False, int(time.time() * 1000), 1, 32 << 20, "add")

    def name(self, listed: Listed) -> str | None:
        """Return the path of a listed file inside the folder, or None if it lies elsewhere."""
        if listed.path.startswith(self._spark_url + "/") and "%" not in listed.path:
            return listed.path[len(self._spark_url) + 1 :]
        path = unquote(urlsplit(listed.path).path)
        inside = self._folder_path + "/"
        return path[len(inside) :] if path.startswith(inside) else None

    # Entries

    def exists(self) -> bool:
        return bool(self._numbers())

    def read(self) -> Listing:
        """Return all files, in the order of the entries."""
        for attempt in range(_READ_ATTEMPTS_MAX):
            numbers = self._numbers()
            if not numbers:
                return Listing(0, [], frozenset())
            last = max(numbers)
            compact = max((n for n, e in numbers.items() if e.path.endswith(COMPACT)), default=-1)
            wanted = range(max(compact, 0), last + 1)
            missing = [n for n in wanted if n not in numbers]
            if missing:
                raise self._corrupt(_path(missing[0]), "the entry is missing")
            try:
                entries = {numbers[n].path: self._entry(numbers[n]) for n in wanted}
            except NotFoundError:
                # Old entries are removed once a newer `.compact` entry covers them.
                if attempt == _READ_ATTEMPTS_MAX - 1:
                    raise
                continue
            self._entries = entries
            files = [file for entry in entries.values() for file in entry.files]
            names = frozenset().union(*(entry.names for entry in entries.values()))
            return Listing(last + 1, files, names)
        raise AssertionError("not reached")

    def append(self, change: Change) -> None:
        """Create the next entry from what `change` returns for the list, unless that is None.

        `change` is called again if another writer created that entry first.
        """
        while True:
            began_s = time.monotonic(), time.time()
            listing = self.read()
            replacement = change(listing)
            if replacement is None:
                return
            number = listing.next_number
            lines = replacement.added
            if is_compact(number):
                before = listing.files if replacement.all is None else replacement.all
                lines = [*before, *replacement.added]
            data = b"\n".join([_HEAD, *map(msgspec.json.encode, lines)])
            if self.store.put_if_absent(_path(number), data):
                elapsed_s = max(time.monotonic() - began_s[0], time.time() - began_s[1])
                if self._stands(number, elapsed_s):
                    return

    def _stands(self, number: int, elapsed_s: float) -> bool:
        """True if readers use the entry: a writer that was suspended may have filled an old gap."""
        entries = self._numbers().items() if elapsed_s > KEPT_S / 2 else ()
        if any(n > number and entry.path.endswith(COMPACT) for n, entry in entries):
            return False
        if is_compact(number):
            self._remove_old(number)
        return True

    def _remove_old(self, compact: int) -> None:
        entries = self.store.list(LIST_FOLDER)
        newest_s = max((entry.modified_s for entry in entries), default=0.0)
        old = []
        for entry in entries:
            number = _number(entry.path)
            is_past = number is not None and number < compact - _KEPT_ENTRIES
            if is_past and newest_s - entry.modified_s > KEPT_S:
                old.append(entry.path)
        self.store.delete(old)

    def _numbers(self) -> dict[int, StoredObject]:
        found = {}
        for entry in self.store.list(LIST_FOLDER):
            number = _number(entry.path)
            if number is not None:
                found[number] = entry
        return found

    def _entry(self, entry: StoredObject) -> _Entry:
        known = self._entries.get(entry.path)
        if known is not None and known.size == entry.size:
            return known
        path, data = entry.path, self.store.get(entry.path)
        if len(data) != entry.size:
            raise self._corrupt(path, f"{len(data)} of its {entry.size} bytes were read")
        head, *lines = data.split(b"\n")
        if head != _HEAD:
            raise self._corrupt(path, f"it begins with {head[:20]!r}, not {_HEAD!r}")
        try:
            files = [_decoder.decode(line) for line in lines if line]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._corrupt(path, str(error)) from error
        names = (self.name(file) for file in files)
        return _Entry(entry.size, files, frozenset(name for name in names if name is not None))

    def _corrupt(self, path: str, what: str) -> CorruptFileError:
        path = f"{self.store.url}/{path}"
        return CorruptFileError(
            f"the list of published files is damaged: {what}\n"
            f"  file: {path}\n"
            "  next: restore the entry; without it the published files are unknown",
            path=path,
        )


def is_compact(number: int) -> bool:
    return (number + 1) % COMPACT_INTERVAL == 0


def _path(number: int) -> str:
    return f"{LIST_FOLDER}/{number}{COMPACT if is_compact(number) else ''}"


def _number(path: str) -> int | None:
    found = _NUMBERED.fullmatch(path.rpartition("/")[2])
    return int(found[1]) if found else None
