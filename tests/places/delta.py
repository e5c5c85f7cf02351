"""Delta tables."""

from __future__ import annotations

from typing import Any, ClassVar

import pyarrow as pa
from deltalake import DeltaTable, Schema

from cairn.sinks import Delta
from cairn.sinks.base import Sink
from tests.places.base import Place, Row


class DeltaPlace(Place):
    settings: ClassVar[dict[str, Any]] = {}

    @property
    def path(self) -> str:
        return str(self.folder / "table")

    def make(self) -> Sink:
        return Delta(self.path, **self.settings)

    def table(self) -> pa.Table:
        return pa.table(DeltaTable(self.path).to_pyarrow_table())

    def rows(self, driver: Sink) -> list[Row]:
        return [(row["k"], row["s"]) for row in self.table().to_pylist()]

    def add_column(self, name: str) -> None:
        field = Schema.from_arrow(pa.schema([pa.field(name, pa.string())])).fields[0]
        DeltaTable(self.path).alter.add_columns([field])

    def leftovers(self) -> list[str]:
        """Return prepared files, and data files of ours that the log does not name."""
        folder = self.folder / "table"
        staged = [str(path) for path in folder.glob("_cairn/**/*") if path.is_file()]
        known = set(pa.table(DeltaTable(self.path).get_add_actions())["path"].to_pylist())
        ours = [path.name for path in folder.glob("part-????????????-*.parquet")]
        return staged + sorted(set(ours) - known) + [str(p) for p in self.scratch.iterdir()]


class PartitionedDeltaPlace(DeltaPlace):
    settings: ClassVar[dict[str, Any]] = {"partition_by": "s", "buffer_bytes_max": 1}
    has_no_empty_text = True
    needs_text = True


class MergedDeltaPlace(DeltaPlace):
    settings: ClassVar[dict[str, Any]] = {"mode": "merge", "key": "k"}
    is_keyed = True
