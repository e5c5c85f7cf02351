"""The published files of a folder, in order.

    <folder>/_cairn/<job>/<sink>/epochs/<epoch>[-<batch>].json   a mark: the files of an epoch
    <folder>/_spark_metadata/…                                    the list, if the folder has one

Always true here:
- in a folder with a list, the files in the list are published, and no others;
- in a folder without one, the files that a mark names are published; a mark names a whole epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from cairn.errors import CorruptFileError
from cairn.sinks.files.spark_list import SparkList
from cairn.storage.store import (
    LocalStore,
    NotFoundError,
    Store,
    StoredObject,
    hadoop_url,
    open_store,
)

CAIRN_FOLDER: Final = "_cairn"
_MARK: Final = re.compile(rf"{CAIRN_FOLDER}/(.+)/epochs/(\d{{12}})(?:-(\d+))?\.json")
# Files of the sink, by name: part-<epoch>-<subtask, or "merged">-<owner>-<digest>.<extension>
_NAME: Final = re.compile(r"part-(\d{12})-(\d{5}|merged)-([0-9a-f]{12})-[0-9a-f]{32}(\..+)")


class FileName(NamedTuple):
    """The parts of a file's name."""

    epoch: int
    is_merged: bool
    owner: str
    extension: str
    """The format, with the settings a reader needs."""


def parse_name(path: str) -> FileName | None:
    """Return the parts of a file's name, or None if no Files sink wrote it."""
    found = _NAME.fullmatch(path.rpartition("/")[2])
    return FileName(int(found[1]), found[2] == "merged", *found.group(3, 4)) if found else None


class _File(msgspec.Struct):
    name: str
    rows: int
    bytes: int


class _Mark(msgspec.Struct):
    files: list[_File]


class MarkPath(NamedTuple):
    home: str
    epoch: int
    batch: int
    path: str


def mark_path(home: str, epoch: int, batch: int) -> str:
    return f"{home}/epochs/{epoch:012d}{f'-{batch}' if batch else ''}.json"


def find_marks(store: Store, home: str = CAIRN_FOLDER) -> list[MarkPath]:
    """Return the marks below a folder: by sink, oldest sink first, then by epoch and batch."""
    marks: list[MarkPath] = []
    began: dict[str, float] = {}
    for found in store.list(home):
        match = _MARK.fullmatch(found.path)
        if match:
            sink = f"{CAIRN_FOLDER}/{match[1]}"
            marks.append(MarkPath(sink, int(match[2]), int(match[3] or 0), found.path))
            began[sink] = min(found.modified_s, began.get(sink, found.modified_s))
    return sorted(marks, key=lambda mark: (began[mark.home], mark))


def read_mark(store: Store, path: str) -> list[dict[str, Any]]:
    """Return the files that a mark names: name, rows, bytes."""
    data = store.get(path)
    try:
        files = msgspec.json.decode(data, type=_Mark).files
    except msgspec.MsgspecError as error:
        raise CorruptFileError(
            f"the list of an epoch's files is damaged: {error}\n  file: {store.url}/{path}",
            path=f"{store.url}/{path}",
        ) from error
    return [msgspec.structs.asdict(file) for file in files]


def is_data(path: str) -> bool:
    """True if Spark would read a file at this path in a folder without a list."""
    return not any(
        part.startswith(".") or (part.startswith("_") and "=" not in part)
        for part in path.split("/")
    )


def files_without_list(store: Store) -> Iterator[StoredObject]:
    """Yield the published files of a folder without a list; files of sinks need a mark."""
    marked = {file["name"] for mark in find_marks(store) for file in read_mark(store, mark.path)}
    for found in store.list():
        if is_data(found.path) and (parse_name(found.path) is None or found.path in marked):
            yield found


def spark_url(store: Store) -> str:
    """Return the folder as Spark names it: encoded, and S3 under Hadoop's scheme."""
    if isinstance(store, LocalStore):
        return f"file://{quote(store.root)}"
    scheme, rest = hadoop_url(store.url).split("://", 1)
    # Not urlsplit: `#` and `?` are part of names in the url of a store.
    bucket, slash, path = rest.partition("/")
    return f"{'s3a' if scheme == 's3' else scheme}://{bucket}{slash}{quote(path)}"


def list_published(path: str) -> list[str]:
    """Return the files of all committed epochs in a folder of `sinks.Files`, oldest first.

    They are paths on a local disk and urls elsewhere, for `spark.read.parquet(*files)`, pandas
    or DuckDB. Only whole epochs, of every job and sink that writes there.
    """
    try:
        store = open_store(str(path), create=False)
    except NotFoundError:
        return []
    spark_list = SparkList(store, spark_url(store))
    listing = spark_list.read()
    if listing.next_number:
        return [
            unquote(file.path) if name is None else _address(store, name)
            for file, name in ((file, spark_list.name(file)) for file in listing.files)
        ]
    return [
        _address(store, file["name"])
        for mark in find_marks(store)
        for file in read_mark(store, mark.path)
    ]


def _address(store: Store, name: str) -> str:
    local = store.local_path(name)
    return f"{store.url}/{name}" if local is None else local
