"""Sinks in the driver, and one that drops rows: for tests, notebooks and a first look.

Their rows travel with the acknowledgements and are kept in the manifest, so they are for
small output. The rows of an epoch arrive when it is committed.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from cairn.sinks.base import Committable, Execution, Sink, Writer
from cairn.types import row_class
from cairn.types.codec import codec


class RowsWriter(Writer):
    """Sends rows to the driver, all of them or the first few."""

    def __init__(self, limit: int | None = None) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._limit = limit
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if self._limit is None:
            self._batches.append(batch)
        elif self._rows < self._limit:
            self._batches.append(batch.slice(0, self._limit - self._rows))
        self._rows += batch.num_rows

    def prepare(self) -> Committable | None:
        if not self._batches:
            return None
        out = io.BytesIO()
        with pa.ipc.new_stream(out, self._batches[0].schema) as stream:
            # As one batch: equal rows give equal bytes, whatever the size of the batches.
            stream.write_batch(pa.concat_batches(self._batches))
        return {"rows": self._rows, "arrow": base64.b64encode(out.getvalue()).decode()}

    def abort(self) -> None:
        self._batches.clear()


def decode_rows(rows: pa.RecordBatch | pa.Table) -> Iterator[Any]:
    """Return Arrow rows as named tuples."""
    make = partial(tuple.__new__, row_class(rows.schema))
    columns = [codec(column.type).decode(column) for column in rows.columns]
    return map(make, zip(*columns, strict=True))


def _rows(committables: Sequence[Committable]) -> list[Any]:
    rows: list[Any] = []
    for committable in committables:
        stream = pa.ipc.open_stream(base64.b64decode(committable["arrow"]))
        rows += decode_rows(stream.read_all())
    return rows


class _DriverSink(Sink):
    """A sink whose target ends with the driver, so unpublished rows do not matter."""

    @property
    def target(self) -> str:
        return ""


class Collect(_DriverSink):
    """Keeps committed rows in the driver's memory: `sink.rows`, in order of the epochs.

    A run that continues an earlier one holds its own epochs and the newest one before them.
    """

    def __init__(self) -> None:
        self._published: dict[tuple[int, int], list[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_published": {}}

    @property
    def rows(self) -> list[Any]:
        return [row for at in sorted(self._published) for row in self._published[at]]

    @property
    def epochs(self) -> dict[int, list[Any]]:
        """The rows by epoch."""
        found: dict[int, list[Any]] = {}
        for epoch, batch in sorted(self._published):
            found.setdefault(epoch, []).extend(self._published[epoch, batch])
        return found

    def writer(self, epoch: int, subtask: int, execution: Execution) -> Writer:
        return RowsWriter()

    def commit(self, epoch: int, committables: Sequence[Committable], batch: int = 0) -> None:
        self._published[epoch, batch] = _rows(committables)


class Console(_DriverSink):
    """Prints the first rows of each committed epoch. The newest is printed again on restart."""

    def __init__(self, rows_max: int = 20) -> None:
        self.rows_max = rows_max

    def writer(self, epoch: int, subtask: int, execution: Execution) -> Writer:
        return RowsWriter(self.rows_max)

    def commit(self, epoch: int, committables: Sequence[Committable], batch: int = 0) -> None:
        count = sum(committable["rows"] for committable in committables)
        if not count:
            return
        print(f"{self.context.uid}, epoch {epoch}: {count} row{'s' if count != 1 else ''}")
        for row in _rows(committables)[: self.rows_max]:
            print("  " + ", ".join(f"{k}={v}" for k, v in row.asdict().items()))
        if count > self.rows_max:
            print(f"  … {count - self.rows_max} more")
        sys.stdout.flush()


class _NoopWriter(Writer):
    def write(self, batch: pa.RecordBatch) -> None:
        pass

    def prepare(self) -> Committable | None:
        return None

    def abort(self) -> None:
        pass


class Noop(_DriverSink):
    """Drops its rows, like Spark's `noop` format: to measure the job without a sink."""

    drops_rows = True

    def writer(self, epoch: int, subtask: int, execution: Execution) -> Writer:
        return _NoopWriter()

    def commit(self, epoch: int, committables: Sequence[Committable], batch: int = 0) -> None:
        pass
