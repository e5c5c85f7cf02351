"""Running aggregates: an accumulator per key, and a row per changed key and epoch.

    aggregates    per key: accumulators, and what is kept of the emitted result
    pending       per key: the time of its next result -> true; only if results come at intervals

Nothing closes, so late rows count like all others.

Always true here:
- without an interval, a key is emitted once in every epoch that has rows of it, with the result of
  all rows so far;
- with an interval, that long after the first row since its last result, at the end of an epoch;
- a key that has no rows left, because all were taken back, has no state once that is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.functions import BatchContext, Hooks, PartialProcess
from cairn.operators.aggregates.accumulate import Accumulators
from cairn.operators.aggregates.emission import CHANGE_FIELD, Emitter
from cairn.operators.aggregates.grouping import first_rows, number_values
from cairn.operators.aggregates.partial import Layout
from cairn.operators.aggregates.parts import Bools, Columns
from cairn.operators.aggregates.sets import ValueSets
from cairn.state import Declaration, Map, Value
from cairn.types.durations import MAX_MS

if TYPE_CHECKING:
    from cairn.backends.handles.batch import (
        ColumnMapHandle,
        ColumnValueHandle,
    )


class Aggregation(Hooks, PartialProcess):
    wants_order = False
    handles_late: bool = True

    def __init__(
        self,
        accumulators: Accumulators,
        layout: Layout,
        schema: pa.Schema,
        *,
        changes: bool = False,
        in_windows: bool = False,
    ) -> None:
        """`schema` is that of the results, without the column of changes."""
        self.accumulators = accumulators
        self.sets = ValueSets(
            accumulators.named_parts,
            list(zip(layout.parts, layout.conditions, strict=True)),
            sources=layout.sources,
            weight=layout.weight,
            in_windows=in_windows,
        )
        self.layout = layout
        self.schema = schema.append(CHANGE_FIELD) if changes else schema
        """Schema of the emitted rows."""
        self._takes_back = layout.weight is not None
        results = [aggregate.field for aggregate in accumulators.aggregates]
        self._hidden = 1 if self._takes_back else 0
        self.emitter = Emitter(
            results[self._hidden :], changes=changes, takes_back=self._takes_back
        )
        self.partial_count = 0

    def begin_epoch(self, ctx: BatchContext) -> None:
        self.partial_count = 0
        self.sets.bind(self)

    def read(self, batch: pa.RecordBatch) -> list[Columns]:
        layout = self.layout
        arrays = []
        for name, condition in zip(layout.parts, layout.conditions, strict=True):
            array = batch[name]
            if condition is not None and name == layout.count:
                array = pc.if_else(batch[condition], array, 0)
            arrays.append(array)
        return self.accumulators.read(arrays)

    def row_count(self, rows: pa.StructArray) -> int:
        return int(pc.sum(rows.field(self.layout.count)).as_py() or 0)

    def late_rows(self, rows: pa.StructArray) -> pa.RecordBatch | None:
        if self.layout.row is None:
            return None
        return pa.RecordBatch.from_struct_array(rows.field(self.layout.row))

    def key_columns(self, keys: pa.Array) -> list[pa.Array]:
        if self.layout.is_keyless:
            return []
        return [keys] if len(self.layout.keys) == 1 else keys.flatten()

    def emit(
        self, prefix: Sequence[pa.Array], columns: list[Columns], before: Sequence[pa.Array]
    ) -> tuple[pa.RecordBatch, list[pa.Array]]:
        """Return the rows to emit, and what state has to hold of them."""
        results = self.accumulators.results(columns)[self._hidden :]
        # Keys that have rows left.
        exists: Bools = np.ones(len(results[0]), np.bool_)
        if self._takes_back:
            exists = columns[0][0] > 0
        rows, held = self.emitter.emit(prefix, results, exists, before)
        return self.result(rows), held

    def result(self, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        arrays = [c.cast(f.type) for c, f in zip(columns, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


class RunningAggregate(Aggregation):
    aggregates: ColumnValueHandle
    pending: ColumnMapHandle

    def __init__(
        self,
        accumulators: Accumulators,
        layout: Layout,
        schema: pa.Schema,
        *,
        changes: bool = False,
        every_ms: int | None = None,
    ) -> None:
        """`every_ms`: the time between two results of a key; None: one per epoch."""
        super().__init__(accumulators, layout, schema, changes=changes)
        self.every_ms = every_ms
        due = [] if every_ms is None else [pa.field("emit_at", pa.int64())]
        self._fields = [*accumulators.fields, *self.emitter.fields, *due]

    def declare_state(self) -> dict[str, Declaration]:
        declaration: Value[Any] = Value(pa.struct(self._fields))
        states: dict[str, Declaration] = {"aggregates": declaration} | self.sets.declare_state()
        if self.every_ms is not None:
            pending: Map[int, bool] = Map("bigint", "boolean")
            pending.by_time = True
            states["pending"] = pending
        for name, state in states.items():
            state.name = name
        return states

    def process(self, batch: pa.RecordBatch, ctx: BatchContext) -> None:
        at, count = number_values(ctx.keys)
        keys = ctx.keys if count == len(at) else ctx.keys.take(pa.array(first_rows(at, count)))
        columns, kept = self._load(self.aggregates.get_many(keys))
        self.accumulators.merge(columns, at, self.read(batch))
        self.partial_count += count
        if self.sets:
            bags, group_count = self.sets.collect(batch, at, count)
            self.sets.add(bags, keys, None, columns)
            self.partial_count += group_count - count
        if self.every_ms is not None:
            kept[-1] = self._set_due(keys, kept[-1], ctx.now_ms + self.every_ms)
        self._store(keys, columns, kept)

    def _load(self, values: pa.Array) -> tuple[list[Columns], list[pa.Array]]:
        """Return the accumulators, and the fields that state has beside them."""
        arrays = values.flatten()
        count = len(self.accumulators.fields)
        return self.accumulators.load(arrays[:count]), arrays[count:]

    def _store(self, keys: pa.Array, columns: list[Columns], kept: Sequence[pa.Array]) -> None:
        stored = [*self.accumulators.store(columns), *kept]
        self.aggregates.put_many(keys, pa.StructArray.from_arrays(stored, fields=self._fields))

    # Results

    def _set_due(self, keys: pa.Array, due: pa.Array, at_ms: int) -> pa.Array:
        """Set the time of the next result for keys that have none, and return all of them."""
        fresh = keys.filter(due.is_null())
        if len(fresh):
            times = pa.array(np.full(len(fresh), at_ms))
            self.pending.put_many(fresh, times, pa.array(np.ones(len(fresh), np.bool_)))
        return due.fill_null(at_ms)

    def end_epoch(self, ctx: BatchContext) -> pa.RecordBatch | None:
        if self.every_ms is None:
            keys, values = self.aggregates.set_in_epoch()
        else:
            # A drain comes at the end of time.
            now_ms = None if ctx.watermark_ms == MAX_MS else ctx.now_ms
            keys, times, _ = self.pending.between(None, now_ms)
            self.pending.put_many(keys, times, pa.nulls(len(keys), pa.bool_()))
            values = self.aggregates.get_many(keys)
        if not len(keys):
            return None
        columns, kept = self._load(values)
        shown = kept[: len(self.emitter.fields)]
        rows, shown = self.emit(self.key_columns(keys), columns, shown)
        if self.every_ms is not None:
            shown.append(pa.nulls(len(keys), pa.int64()))
        if shown:
            self._keep_shown(keys, columns, shown)
        return rows

    def _keep_shown(
        self, keys: pa.Array, columns: list[Columns], shown: Sequence[pa.Array]
    ) -> None:
        self._store(keys, columns, shown)
        if self._takes_back:
            # Less than none are left if a row is taken back before it comes.
            gone = keys.filter(pa.array(columns[0][0] == 0))
            if len(gone):
                self.aggregates.put_many(gone, pa.nulls(len(gone), pa.struct(self._fields)))

    def next_timer(self, ctx: BatchContext) -> tuple[int | None, int | None]:
        """Return the time, by the clock, of the next result without a row."""
        if self.every_ms is None:
            return None, None
        return None, self.pending.entry_above(None)
