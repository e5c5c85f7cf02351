"""Folders of the files sink, driven by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from cairn.sinks import Files, list_published
from cairn.sinks.base import Committable, Execution, SinkContext
from cairn.types import parse_schema
from tests.places.base import batch
from tests.places.files import read_rows

SCHEMA = parse_schema("k long, s string")


class Folder:
    """A folder that drivers and slots of several jobs write to."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path / "out"
        self.scratch = path / "scratch"
        self.scratch.mkdir(exist_ok=True)
        self.settings = settings

    def sink(self, job_id: str = "job", *, in_slot: bool = False, **settings: Any) -> Files:
        sink = Files(str(self.path), **{**self.settings, **settings})
        scratch = str(self.scratch) if in_slot else None
        sink.open(SinkContext(job_id, "j", "out", SCHEMA, scratch))
        return sink

    def prepared(
        self, epoch: int, *rows: tuple[Any, ...], job_id: str = "job", **settings: Any
    ) -> list[Committable]:
        writer = self.sink(job_id, in_slot=True, **settings).writer(epoch, 0, Execution())
        writer.write(batch(*rows))
        prepared = writer.prepare()
        assert prepared is not None
        return [prepared]

    def commit(self, driver: Files, epoch: int, *rows: tuple[Any, ...]) -> None:
        driver.commit(epoch, self.prepared(epoch, *rows, job_id=driver.context.job_id))

    def names(self) -> list[str]:
        return [address.removeprefix(f"{self.path}/") for address in list_published(str(self.path))]

    def rows(self) -> list[tuple[Any, ...]]:
        """By the list, in its order."""
        return [
            row for name in self.names() for row in read_rows(name, (self.path / name).read_bytes())
        ]

    def data(self) -> list[str]:
        """Data files that are there, listed or not."""
        found = (file.relative_to(self.path) for file in self.path.rglob("part-*"))
        return sorted(str(file) for file in found if not str(file).startswith("_cairn"))


def table(schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=schema)
