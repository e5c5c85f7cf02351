"""Targets of functions in the driver: folders of JSON lines, one file a publication."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cairn.sinks import Foreach, PublishedEpoch, Wal
from cairn.sinks.base import Sink, SinkContext
from cairn.sinks.staged import StagedFile
from cairn.storage.store import open_store
from tests.places.base import Place, Row


class Table:
    """Takes rows; knows which publications it has taken and rejects them when they come again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, rows: list[Row], epoch: PublishedEpoch) -> None:
        target = self.folder / epoch.key.replace("/", "~")
        if not target.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            hidden = self.folder / f".{target.name}"
            hidden.write_text(json.dumps([list(row) for row in rows]))
            hidden.rename(target)

    def rows(self) -> list[Row]:
        files = sorted(file for file in self.folder.glob("*") if file.name[0] != ".")
        return [tuple(row) for file in files for row in json.loads(file.read_text())]


class TableWal(Wal):
    """A Wal without Spark: what it writes is a list of rows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Table(folder), idempotent=True)
        self.folder = folder

    def open(self, context: SinkContext) -> None:
        super().open(context)
        self.function = Table(self.folder)

    def dataframe(self, files: Sequence[StagedFile]) -> Any:
        batches = [batch for file in files for batch in self.batches(file)]
        return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


class TableForeach(Foreach):
    """Writes to a table row by row, or all rows at once."""

    def __init__(self, folder: Path, *, batch: bool) -> None:
        super().__init__(print, batch=batch)
        self.folder = folder

    def open(self, context: SinkContext) -> None:
        super().open(context)
        self.function = self._all if self.batch else self._one

    def _all(self, rows: list[Row], epoch: PublishedEpoch) -> None:
        Table(self.folder)(rows, epoch)

    def _one(self, row: Row, epoch: PublishedEpoch) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "rows").open("a") as file:
            file.write(json.dumps(list(row)) + "\n")


class WalPlace(Place):
    has_target = False

    def make(self) -> Sink:
        return TableWal(self.folder / "table")

    def rows(self, driver: Sink) -> list[Row]:
        return Table(self.folder / "table").rows()

    def leftovers(self) -> list[str]:
        return list_staged(self.folder) + [str(path) for path in self.scratch.iterdir()]


class ForeachBatchPlace(WalPlace):
    def make(self) -> Sink:
        return TableForeach(self.folder / "table", batch=True)


class ForeachPlace(WalPlace):
    """Row by row, so a crash in the middle shows rows twice."""

    is_in_pieces = True

    def make(self) -> Sink:
        return TableForeach(self.folder / "table", batch=False)

    def rows(self, driver: Sink) -> list[Row]:
        file = self.folder / "table" / "rows"
        lines = file.read_text().splitlines() if file.exists() else []
        return [tuple(json.loads(line)) for line in lines]


def list_staged(folder: Path) -> list[str]:
    """Rows that wait in the checkpoint of a place."""
    found = open_store(str(folder / "checkpoint")).list("wal")
    return [stored.path for stored in found if "/published/" not in stored.path]
