"""Write Parquet files for a Delta table, named by their content, in the slots.

Always true here:
- a file is named by its sink, epoch, batch, round, subtask and content, so an attempt that runs
  again cannot change a file, and no file replaces another;
- a note is written before each data file, so abandoned files can be found without listing the
  table.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cairn.errors import EpochError
from cairn.ids import digest
from cairn.sinks.base import Committable, Execution, Writer
from cairn.sinks.grouping import sort_by

if TYPE_CHECKING:
    from cairn.sinks.delta.sink import Delta

TEXT_LENGTH_MAX = 32
"""Longer text has no bounds in a file's statistics."""

PUTS_AT_ONCE = 8
SPLIT_BYTES = 8 * 1024 * 1024
"""The bytes of rows that are sorted into partitions at a time."""

Partition = tuple[str | None, ...]


class _FilesWriter(Writer, ABC):
    """Holds rows by partition and stores them as files, the largest first if memory is full."""

    def __init__(self, sink: Delta, epoch: int, subtask: int, execution: Execution) -> None:
        self._sink = sink
        self._prefix = f"part-{epoch:012d}-{subtask:05d}"
        self._place = [execution.batch, execution.round, subtask]
        self._new: list[pa.RecordBatch] = []
        self._new_bytes = 0
        self._held: dict[Partition, list[pa.Table]] = {}
        self._bytes: dict[Partition, int] = {}
        self._files: list[dict[str, Any]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        for name in self._sink.required.union(self._sink.key).intersection(batch.schema.names):
            if batch[name].null_count:
                what = "is in the key" if name in self._sink.key else "is NOT NULL in the table"
                raise EpochError(
                    f"sink {self._sink.context.uid!r}: column {name!r} {what}, and a row has "
                    "null\n  next: filter such rows out before the sink",
                    sink=self._sink.context.uid,
                )
        self._new.append(batch)
        self._new_bytes += batch.nbytes
        if self._new_bytes >= min(SPLIT_BYTES, self._sink.buffer_bytes_max):
            self._hold_new()

    def _hold_new(self) -> None:
        table = pa.Table.from_batches(self._new, self._sink.context.schema)
        self._new, self._new_bytes = [], 0
        for partition, rows in self._split(table):
            self._held.setdefault(partition, []).append(rows)
            self._bytes[partition] = self._bytes.get(partition, 0) + rows.nbytes
        while sum(self._bytes.values()) >= self._sink.buffer_bytes_max:
            self._store([max(self._bytes, key=self._bytes.__getitem__)])

    def prepare(self) -> Committable | None:
        self._hold_new()
        self._store(list(self._held))
        if not self._files:
            return None
        return {"files": self._files, "columns": self._sink.context.schema.names}

    def abort(self) -> None:
        # Stored files stay until `recover`: equal rows have equal names, so a later attempt may
        # have stored the same file.
        self._new, self._held, self._bytes, self._files = [], {}, {}, []

    def _split(self, rows: pa.Table) -> Iterator[tuple[Partition, pa.Table]]:
        if rows.num_rows:
            yield (), rows

    def _store(self, partitions: Sequence[Partition]) -> None:
        encoded = [self._encode(*item) for item in enumerate(partitions, len(self._files))]
        if len(encoded) == 1:
            self._put(*encoded[0][1:])
        elif encoded:
            with ThreadPoolExecutor(PUTS_AT_ONCE) as pool:
                list(pool.map(lambda item: self._put(*item[1:]), encoded))
        self._files += [file for file, _, _ in encoded]

    def _encode(self, index: int, partition: Partition) -> tuple[dict[str, Any], str, bytes]:
        rows = pa.concat_tables(self._held.pop(partition)).combine_chunks()
        del self._bytes[partition]
        stream = pa.BufferOutputStream()
        pq.write_table(rows, stream, compression=self._sink.compression)
        data = stream.getvalue().to_pybytes()
        # Equal rows of another sink, or of the next file, batch or round, are other rows.
        place = [*self._place, index]
        content = digest(self._sink.home.encode(), str(place).encode(), data)
        name = f"{self._prefix}-{content}.parquet"
        file = {"name": name, "rows": rows.num_rows, "bytes": len(data)}
        return file | self._describe(rows, partition, place), name, data

    @abstractmethod
    def _describe(self, rows: pa.Table, partition: Partition, place: list[int]) -> dict[str, Any]:
        """Return further facts of a file for the driver."""

    @abstractmethod
    def _put(self, name: str, data: bytes) -> None: ...


class MergeWriter(_FilesWriter):
    """Stores rows beside the table, for the driver to merge."""

    def prepare(self) -> Committable | None:
        prepared = super().prepare()
        return prepared and prepared | {"key": list(self._sink.key)}

    def _describe(self, rows: pa.Table, partition: Partition, place: list[int]) -> dict[str, Any]:
        return {"place": place}

    def _put(self, name: str, data: bytes) -> None:
        self._sink.store.put(self._sink.staging_path(name), data)


class AppendWriter(_FilesWriter):
    """Stores data files of the table, for the driver to name in its log."""

    def _split(self, rows: pa.Table) -> Iterator[tuple[Partition, pa.Table]]:
        columns = self._sink.partitions
        if not columns or not rows.num_rows:
            yield from super()._split(rows)
            return
        values = [rows[name].combine_chunks() for name in columns]
        order, starts = sort_by(values)
        rest = rows.drop_columns(list(columns)).take(order)
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            first = order[start].as_py()
            yield (
                tuple(self._value(column[first]) for column in values),
                rest.slice(start, end - start),
            )

    def _value(self, value: pa.Scalar) -> str | None:
        try:
            return _text(value.as_py())
        except (OverflowError, ValueError):
            uid = self._sink.context.uid
            raise EpochError(
                f"sink {uid!r}: {value.cast(pa.string())} cannot be the value of a partition: only "
                "dates of the years 1 to 9999 can\n  next: filter such rows out before the sink",
                sink=uid,
            ) from None

    def _describe(self, rows: pa.Table, partition: Partition, place: list[int]) -> dict[str, Any]:
        values = dict(zip(self._sink.partitions, partition, strict=True))
        return {"partition": values, "stats": statistics(rows)}

    def _put(self, name: str, data: bytes) -> None:
        self._sink.store.put(self._sink.staging_path(name), b"")
        self._sink.store.put(name, data)


def statistics(rows: pa.Table) -> str:
    """Return the statistics of a file for the log, by which readers skip files."""
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if pa.types.is_nested(field.type):
            continue
        nulls[field.name] = column.null_count
        if (bounds := _bounds(column)) is not None:
            lows[field.name], highs[field.name] = bounds
    found = {"numRecords": rows.num_rows, "minValues": lows, "maxValues": highs}
    return json.dumps({**found, "nullCount": nulls}, ensure_ascii=False)


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    kind = column.type
    if pa.types.is_floating(kind) and pc.any(pc.is_nan(column)).as_py():
        return None
    if not (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_string(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
    ):
        return None
    found = pc.min_max(column)
    try:
        low, high = found["min"].as_py(), found["max"].as_py()
        if high is not None and pa.types.is_timestamp(kind):
            # The log has milliseconds, and the bound must still hold.
            high += dt.timedelta(microseconds=999)
    except (OverflowError, ValueError):
        return None  # Beyond the year 9999, or before the year 1.
    if low is None:
        return None
    if pa.types.is_floating(kind) and not (math.isfinite(low) and math.isfinite(high)):
        return None
    if pa.types.is_string(kind) and max(len(low), len(high)) > TEXT_LENGTH_MAX:
        return None
    if pa.types.is_date(kind):
        return low.isoformat(), high.isoformat()
    if pa.types.is_timestamp(kind):
        zone = "Z" if kind.tz else ""
        return tuple(
            t.replace(tzinfo=None).isoformat(timespec="milliseconds") + zone for t in (low, high)
        )
    return low, high


def _text(value: Any) -> str | None:
    """Return a partition's value as the log stores it: the empty string is null."""
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, dt.date) else str(value)
