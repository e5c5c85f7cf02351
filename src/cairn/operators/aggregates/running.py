"""Running aggregates: an accumulator per key, and a row per changed key and epoch.

Nothing closes, so late rows count like all others.

Always true here:
- a key is emitted once in every epoch that has rows of it, with the result of all rows so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn.functions import BatchContext, Hooks, PartialProcess
from cairn.operators.aggregates.accumulate import Accumulators
from cairn.operators.aggregates.grouping import first_rows, number_values
from cairn.operators.aggregates.partial import Layout
from cairn.operators.aggregates.parts import Columns
from cairn.operators.aggregates.sets import ValueSets
from cairn.state import Declaration, Value

if TYPE_CHECKING:
    from cairn.backends.handles.batch import ColumnValueHandle, RowValueHandle


class Aggregation(Hooks, PartialProcess):
    wants_order = False
    handles_late: bool = True

    def __init__(
        self,
        accumulators: Accumulators,
        layout: Layout,
        schema: pa.Schema,
        *,
        in_windows: bool = False,
    ) -> None:
        self.accumulators = accumulators
        self.sets = ValueSets(
            accumulators.named_parts, layout.parts, weight=None, in_windows=in_windows
        )
        self.layout = layout
        self.schema = schema
        """Schema of the results."""
        self.partial_count = 0

    def begin_epoch(self, ctx: BatchContext) -> None:
        self.partial_count = 0
        self.sets.bind(self)

    def read(self, batch: pa.RecordBatch) -> list[Columns]:
        return self.accumulators.read([batch[name] for name in self.layout.parts])

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

    def result(self, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        arrays = [c.cast(f.type) for c, f in zip(columns, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


class RunningAggregate(Aggregation):
    aggregates: ColumnValueHandle | RowValueHandle

    def declare_state(self) -> dict[str, Declaration]:
        declaration: Value[Any] = Value(pa.struct(self.accumulators.fields))
        declaration.name = "aggregates"
        return {"aggregates": declaration} | self.sets.declare_state()

    def process(self, batch: pa.RecordBatch, ctx: BatchContext) -> None:
        at, count = number_values(ctx.keys)
        keys = ctx.keys if count == len(at) else ctx.keys.take(pa.array(first_rows(at, count)))
        held = self.aggregates.get_many(keys)
        columns = self.accumulators.load(held.flatten())
        self.accumulators.merge(columns, at, self.read(batch))
        self.partial_count += count
        if self.sets:
            bags, group_count = self.sets.collect(batch, at, count)
            self.sets.add(bags, keys, None, columns)
            self.partial_count += group_count - count
        stored = self.accumulators.store(columns)
        struct = pa.StructArray.from_arrays(stored, fields=self.accumulators.fields)
        self.aggregates.put_many(keys, struct)

    def end_epoch(self, ctx: BatchContext) -> pa.RecordBatch | None:
        keys, values = self.aggregates.set_in_epoch()
        if not len(keys):
            return None
        columns = self.accumulators.load(values.flatten())
        return self.result([*self.key_columns(keys), *self.accumulators.results(columns)])
