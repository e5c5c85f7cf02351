"""Folders of files."""

from __future__ import annotations

import pyarrow.parquet as pq

from cairn.sinks import Files
from cairn.sinks.base import Sink
from cairn.storage.store import open_store
from tests.places.base import Place, Row


class FilesPlace(Place):
    def make(self) -> Sink:
        return Files(str(self.folder / "out"))

    def rows(self, driver: Sink) -> list[Row]:
        files = sorted((self.folder / "out").glob("*.parquet"))
        return [tuple(row.values()) for file in files for row in pq.read_table(file).to_pylist()]

    def leftovers(self) -> list[str]:
        store = open_store(str(self.folder / "out"))
        staged = [found.path for found in store.list() if "/staged/" in found.path]
        return staged + [str(path) for path in self.scratch.iterdir()]


class OneRowFilesPlace(FilesPlace):
    def make(self) -> Sink:
        return Files(str(self.folder / "out"), file_bytes_target=1)
