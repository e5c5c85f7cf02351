"""Folders of files: published by renames, and by a list; on a disk, in a bucket, HDFS-like."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import uuid
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from cairn.sinks import Files, list_published
from cairn.sinks.base import Sink
from cairn.sinks.files.published import parse_name
from cairn.storage import hdfs_store
from cairn.storage.store import open_store
from tests.hdfs import FakeClient
from tests.places.base import SCHEMA, Place, Row
from tests.s3 import S3, s3_server


class FilesPlace(Place):
    is_in_pieces = True
    settings: ClassVar[dict[str, Any]] = {}

    @property
    def url(self) -> str:
        return str(self.folder / "out")

    def make(self) -> Sink:
        return Files(self.url, **self.settings)

    def rows(self, driver: Sink) -> list[Row]:
        """As one who reads by the marks or the list sees them."""
        store = open_store(self.url)
        return [row for name in self.names() for row in read_rows(name, store.get(name))]

    def names(self) -> list[str]:
        root = f"{open_store(self.url).url}/"
        return [a.removeprefix(root).removeprefix(f"{self.url}/") for a in list_published(self.url)]

    def leftovers(self) -> list[str]:
        """Also what one who lists the folder would see and should not."""
        store = open_store(self.url)
        stored = {found.path for found in store.list()}
        data = {path for path in stored if parse_name(path) is not None} - {*self.names()}
        plans = {path for path in stored if "/merges/" in path}
        # On a disk by another way than the sink's.
        hidden = map(str, self.folder.rglob(".*"))
        return [*data, *plans, *hidden, *map(str, self.scratch.iterdir())]


class OneRowFilesPlace(FilesPlace):
    settings: ClassVar = {"file_bytes_target": 1}
    is_one_whatever_the_batches = False


class JsonFilesPlace(FilesPlace):
    settings: ClassVar = {"format": "json", "partition_by": "k"}


class ListedFilesPlace(FilesPlace):
    settings: ClassVar = {"listed": True}
    is_in_pieces = False


class CompactedFilesPlace(ListedFilesPlace):
    settings: ClassVar = {"listed": True, "compact": True, "format": "csv", "compact_grace_s": 0}


class BucketFilesPlace(ListedFilesPlace):
    settings: ClassVar = {"partition_by": "s"}
    is_far = True
    text_length = 100  # It is a part of names.
    has_no_empty_text = True
    needs_text = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._name_in_bucket = uuid.uuid4().hex
        self._environment = contextlib.ExitStack()
        self._environment.enter_context(_bucket().in_environment())

    def close(self) -> None:
        self._environment.close()

    @property
    def url(self) -> str:
        return f"{_bucket().url}/{self._name_in_bucket}/out"


class RenamingFilesPlace(FilesPlace):
    """HDFS, by a stand-in. There is one at a time."""

    has_target = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        client = FakeClient(folder / "namenode")
        self._patch = mock.patch.object(hdfs_store, "open_client", lambda url: client)
        self._patch.start()

    def close(self) -> None:
        self._patch.stop()

    @property
    def url(self) -> str:
        return "hdfs://namenode/out"


_ended = contextlib.ExitStack()


@functools.cache
def _bucket() -> S3:
    import atexit

    atexit.register(_ended.close)
    return _ended.enter_context(s3_server())


def read_rows(name: str, data: bytes) -> list[Row]:
    """The rows of a file, as (k, s); partition columns come from its folder."""
    data = gzip.decompress(data) if name.endswith(".gz") else data
    if ".json" in name:
        found = [json.loads(line) for line in data.splitlines()]
    elif ".csv" in name:
        types = pyarrow.csv.ConvertOptions(
            column_types=SCHEMA, strings_can_be_null=True, quoted_strings_can_be_null=False
        )
        parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
        table = pyarrow.csv.read_csv(io.BytesIO(data), convert_options=types, parse_options=parse)
        found = table.to_pylist()
    else:
        found = pq.read_table(pa.BufferReader(data)).to_pylist()
    folders = dict(part.split("=", 1) for part in name.split("/")[:-1])
    for row in found:
        for column, value in folders.items():
            is_null = value.startswith("__HIVE")
            row[column] = None if is_null else int(value) if column == "k" else unquote(value)
    return [(row.get("k"), row.get("s")) for row in found]
