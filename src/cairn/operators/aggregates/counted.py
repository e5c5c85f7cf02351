"""Aggregates of windows of a number of rows.

    counted    per key: the number of its rows so far
    windows    per key: the end of an open window, as a number of rows -> its accumulators

Windows emit when they are full, with the batch that fills them.

Always true here:
- rows of a key are counted in the order of their event time within an epoch, else as they come;
- a window is in state while it has some of its rows, and not all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from cairn.errors import PlanError
from cairn.functions import BatchContext
from cairn.operators.aggregates.accumulate import Accumulators
from cairn.operators.aggregates.grouping import first_rows, number_pairs, number_values
from cairn.operators.aggregates.partial import Layout
from cairn.operators.aggregates.parts import Ints, plain
from cairn.operators.aggregates.running import Aggregation
from cairn.operators.row_order import count_before
from cairn.state import Declaration, Map, Value
from cairn.windows import Count

if TYPE_CHECKING:
    from cairn.backends.handles.batch import (
        ColumnMapHandle,
        ColumnValueHandle,
    )

SPREAD_ROWS_MAX = 4 << 20
"""Rows at once, each counted once for every window that it is in."""


class CountAggregate(Aggregation):
    wants_order = True
    counted: ColumnValueHandle
    windows: ColumnMapHandle

    def __init__(
        self, spec: Count, accumulators: Accumulators, layout: Layout, schema: pa.Schema
    ) -> None:
        super().__init__(accumulators, layout, schema)
        if self.sets:
            raise PlanError(
                "windows of a number of rows have no count(DISTINCT ...)\n"
                "  next: use approx_count_distinct, or .process(...) with a WindowFunction"
            )
        self._spec = spec
        self._windows_per_row = -(-spec.size // spec.every)

    def declare_state(self) -> dict[str, Declaration]:
        counted: Value[int] = Value("bigint")
        windows: Map[int, Any] = Map("bigint", pa.struct(self.accumulators.fields))
        counted.name, windows.name = "counted", "windows"
        return {"counted": counted, "windows": windows}

    def process(self, batch: pa.RecordBatch, ctx: BatchContext) -> Iterator[pa.RecordBatch | None]:
        rows_max = max(1, SPREAD_ROWS_MAX // self._windows_per_row)
        for start in range(0, batch.num_rows, rows_max):
            yield self._take(batch.slice(start, rows_max), ctx.keys.slice(start, rows_max))

    def _take(self, batch: pa.RecordBatch, row_keys: pa.Array) -> pa.RecordBatch | None:
        """Add rows to their windows, and return the results of those that are full."""
        at, count = number_values(row_keys)
        keys = row_keys.take(pa.array(first_rows(at, count)))
        before = plain(self.counted.get_many(keys))
        after = before + np.bincount(at, minlength=count)
        self.counted.put_many(keys, pa.array(after))
        self.partial_count += batch.num_rows
        order = np.argsort(at, kind="stable")
        numbers = np.empty(len(at), np.int64)
        numbers[order] = count_before(at[order], np.ones(len(at), np.bool_))
        row, ends = self._assign(before[at] + numbers)
        if not len(row):
            return None
        # Some keys may have no window among these rows, so they are numbered again.
        window_at, window_count = number_pairs(
            *number_values(pa.array(at[row])), *number_values(pa.array(ends))
        )
        first = first_rows(window_at, window_count)
        key_at, ends = at[row[first]], ends[first]
        window_keys, entries = keys.take(pa.array(key_at)), pa.array(ends)
        held = self.windows.get_many(window_keys, entries)
        columns = self.accumulators.load(held.flatten())
        rows = self.accumulators.take(self.read(batch), row)
        self.accumulators.merge(columns, window_at, rows)
        is_full = ends <= after[key_at]
        stored = pa.StructArray.from_arrays(
            self.accumulators.store(columns),
            fields=self.accumulators.fields,
            mask=pa.array(is_full),
        )
        self.windows.put_many(window_keys, entries, stored)
        full = np.flatnonzero(is_full)
        no_time = pa.nulls(len(full), pa.timestamp("us", "UTC"))
        results = self.accumulators.results(self.accumulators.take(columns, full))
        full_keys = self.key_columns(window_keys.take(pa.array(full)))
        return self.result([*full_keys, no_time, no_time, *results])

    def _assign(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return the windows of rows with these numbers: the row, and the end of the window."""
        size, every = self._spec.size, self._spec.every
        rows, ends = [], []
        for back in range(self._windows_per_row):
            starts = (numbers // every - back) * every
            found = np.flatnonzero((starts >= 0) & (numbers < starts + size))
            rows.append(found)
            ends.append(starts[found] + size)
        return np.concatenate(rows), np.concatenate(ends)
