"""The newest row of each key.

    newest    per key: the event time of its newest row in microseconds, and the row

Newest is the row with the latest event time; of several with that time, the one that comes last
in the order of `row_order`. Without event time it is the row that came last.

Always true here:
- a key is emitted at the end of an epoch that has brought a newer row, and then once;
- with event time the result does not depend on the order of rows, nor on how they are cut into
  batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.functions import BatchContext
from cairn.operators.aggregates.grouping import Ints, number_values
from cairn.operators.idle import RowKeeper
from cairn.operators.row_order import is_greater, row_order
from cairn.state import TTL, Declaration, Value

if TYPE_CHECKING:
    from cairn.backends.handles.batch import ColumnValueHandle

EMIT_ROWS_MAX = 64 * 1024


class Latest(RowKeeper):
    newest: ColumnValueHandle

    def __init__(self, schema: pa.Schema, ttl: TTL | None, *, is_timed: bool) -> None:
        super().__init__(schema, ttl)
        self._is_timed = is_timed
        self._fields = [pa.field("time", pa.int64()), pa.field("row", self.row_type)]

    def declare_state(self) -> dict[str, Declaration]:
        newest: Value[Any] = Value(pa.struct(self._fields))
        newest.name = "newest"
        return {"newest": newest, **super().declare_state()}

    def forget(self, keys: pa.Array) -> None:
        self.newest.put_many(keys, pa.nulls(len(keys), pa.struct(self._fields)))

    def process(self, batch: pa.RecordBatch, ctx: BatchContext) -> None:
        rows = self.rows_of(batch)
        keys, times = ctx.keys, ctx.times_us
        at, count = number_values(keys)
        if count < len(at):
            chosen = pa.array(self._newest(at, count, rows, ctx))
            keys, rows = keys.take(chosen), rows.take(chosen)
            times = None if times is None else times.take(chosen)
        self.see(keys, at, ctx)
        if self._is_timed:
            assert times is not None, "rows without a time are put aside before"
            is_newer = self._newer_than_held(keys, times, rows)
            if is_newer.false_count:
                keys, times, rows = (each.filter(is_newer) for each in (keys, times, rows))
        else:
            times = pa.nulls(len(keys), pa.int64())
        if len(keys):
            values = pa.StructArray.from_arrays([times, rows], fields=self._fields)
            self.newest.put_many(keys, values)

    def _newest(self, at: Ints, count: int, rows: pa.StructArray, ctx: BatchContext) -> Ints:
        """Return the newest row of each key."""
        chosen = np.empty(count, np.int64)
        # The last of several assignments to one place wins.
        if not self._is_timed:
            chosen[at] = np.arange(len(at))
            return chosen
        assert ctx.times_us is not None
        times = ctx.times_us.to_numpy()
        newest = np.full(count, np.iinfo(np.int64).min)
        np.maximum.at(newest, at, times)
        last = np.flatnonzero(times == newest[at])
        chosen[at[last]] = last
        if len(last) > count:
            is_tied = np.bincount(at[last], minlength=count) > 1
            tied = last[is_tied[at[last]]]
            tied = tied[row_order(rows.take(pa.array(tied)))]
            chosen[at[tied]] = tied
        return chosen

    def _newer_than_held(self, keys: pa.Array, times: pa.Array, rows: pa.StructArray) -> pa.Array:
        """Mark the rows that are newer than the one in state; there is one row per key."""
        held = self.newest.get_field(keys, "time")
        is_newer = pc.fill_null(pc.greater(times, held), True)
        is_tied = pc.fill_null(pc.equal(times, held), False)
        if not is_tied.true_count:
            return is_newer
        held_rows = self.newest.get_field(keys.filter(is_tied), "row")
        is_first = pa.array(is_greater(rows.filter(is_tied), held_rows))
        return pc.replace_with_mask(is_newer, is_tied, is_first)

    def end_epoch(self, ctx: BatchContext) -> Iterator[pa.RecordBatch]:
        for _, values in self.newest.pieces_set_in_epoch(EMIT_ROWS_MAX):
            yield pa.RecordBatch.from_struct_array(values.field("row"))
