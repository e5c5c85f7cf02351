"""Hive-style folders: rows of a batch, split by the values of its partition columns.

    day=2026-01-31/country=DE/part-….parquet

Always true here:
- folders have the names Spark would give them, so Spark reads the columns back;
- null and the empty string go to `__HIVE_DEFAULT_PARTITION__`, and are read as null;
- a batch is sorted once; the rows of a folder keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from cairn.errors import PlanError
from cairn.sinks.grouping import sort_by

DEFAULT_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"
# Spark's list, and every control character: stores refuse those in names.
_ESCAPED: Final = {
    code: f"%{code:02X}"
    for code in (*range(0x20), *range(0x7F, 0xA0), *map(ord, "\"#%'*/:=?\\{[]^"))
}


def escape(name: str) -> str:
    """Return a value or a column name as part of a folder's name."""
    return name.translate(_ESCAPED)


class Piece(NamedTuple):
    """Rows of one folder; the folder is "" without partition columns."""

    folder: str
    rows: pa.RecordBatch


class Partitions:
    """Splits the batches of one schema."""

    def __init__(self, columns: Sequence[str], schema: pa.Schema) -> None:
        self.columns = tuple(columns)
        _check(self.columns, schema)
        kept = [field.name for field in schema if field.name not in self.columns]
        self.schema = pa.schema([schema.field(name) for name in kept])
        """The columns in the files."""
        self._kept = kept
        self._folders: dict[tuple[str | None, ...], str] = {}

    def split(self, batch: pa.RecordBatch) -> Iterator[Piece]:
        if not self.columns:
            yield Piece("", batch)
            return
        if not batch.num_rows:
            return
        # Spark's names of values are Arrow's text; timestamps are in UTC and end in Z.
        texts = [batch.column(name).cast(pa.string()) for name in self.columns]
        order, starts = sort_by(texts)
        rows = batch.select(self._kept).take(order)
        firsts = order.take(pa.array(starts))
        names = zip(*(text.take(firsts).to_pylist() for text in texts), strict=True)
        for name, start, end in zip(names, starts, [*starts[1:], len(order)], strict=True):
            yield Piece(self._folder(name), rows.slice(start, end - start))

    def _folder(self, values: tuple[str | None, ...]) -> str:
        found = self._folders.get(values)
        if found is None:
            found = "/".join(
                f"{escape(name)}={escape(value) if value else DEFAULT_FOLDER}"
                for name, value in zip(self.columns, values, strict=True)
            )
            if len(self._folders) < 100_000:
                self._folders[values] = found
        return found


def _check(columns: tuple[str, ...], schema: pa.Schema) -> None:
    for name in columns:
        if name not in schema.names:
            raise PlanError(
                f"cannot partition files by {name!r}: the rows do not have this column\n"
                f"  columns: {', '.join(schema.names)}"
            )
        type = schema.field(name).type
        if (
            pa.types.is_nested(type)
            or pa.types.is_floating(type)
            or pa.types.is_binary(type)
            or pa.types.is_duration(type)
        ):
            raise PlanError(
                f"cannot partition files by {name!r}: it is {type}\n"
                "  next: partition by strings, whole numbers, decimals, booleans, dates "
                "or timestamps"
            )
    if len(set(columns)) < len(columns):
        raise PlanError(f"a column is named twice in partition_by: {', '.join(columns)}")
    if columns and len(columns) == len(schema.names):
        raise PlanError(
            "cannot partition files by all of their columns: nothing would be left to write\n"
            f"  columns: {', '.join(schema.names)}"
        )
