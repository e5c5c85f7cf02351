"""The flat columns in which rows travel between levels.

    lane      the lane of the row; missing if all rows are of one lane
    c0, c1 …  the row: lanes share columns of equal types
    ack       an acknowledgement, in a row that has nothing else

Spark copies each row on its way to Python and back, column by column. A struct per lane costs it
more than the rest of a level's plan, and a null costs as much as a number.

Always true here:
- a row of the widest lane has no more columns than that lane, if the types of the others fit in;
- a column of another lane's row is never read as this lane's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

LANE = "lane"
ACK = "ack"


@dataclass(frozen=True)
class Envelope:
    """Columns for the rows of some lanes."""

    lanes: tuple[tuple[int, pa.Schema], ...]

    @property
    def has_lanes(self) -> bool:
        """True if a row must name its lane."""
        return len(self.lanes) > 1

    @cached_property
    def schemas(self) -> dict[int, pa.Schema]:
        return dict(self.lanes)

    @cached_property
    def columns(self) -> dict[str, pa.DataType]:
        """The columns of rows, with their types."""
        found: dict[str, pa.DataType] = {}
        for lane, schema in self.lanes:
            found |= zip(self.names[lane], schema.types, strict=True)
        return dict(sorted(found.items(), key=lambda column: int(column[0][1:])))

    @cached_property
    def names(self) -> dict[int, tuple[str, ...]]:
        """Per lane, the column for each field of its schema."""
        by_type: dict[pa.DataType, list[str]] = {}
        count = 0
        names: dict[int, tuple[str, ...]] = {}
        for lane, schema in self.lanes:
            taken: dict[pa.DataType, int] = {}
            mine = []
            for type_ in schema.types:
                free = by_type.setdefault(type_, [])
                at = taken.get(type_, 0)
                if at == len(free):
                    free.append(f"c{count}")
                    count += 1
                taken[type_] = at + 1
                mine.append(free[at])
            names[lane] = tuple(mine)
        return names

    @cached_property
    def fields(self) -> dict[int, dict[str, str]]:
        """Per lane, the column for each field, by the field's name."""
        return {
            lane: dict(zip(schema.names, self.names[lane], strict=True))
            for lane, schema in self.lanes
        }

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of a level's output."""
        fields = [pa.field(LANE, pa.int32())] if self.has_lanes else []
        fields += [pa.field(name, type_) for name, type_ in self.columns.items()]
        return pa.schema([*fields, pa.field(ACK, pa.binary())])

    def pack(self, lane: int, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return output with these rows in a lane. Columns are found by name, and cast."""
        count = rows.num_rows
        columns = {
            name: rows[field.name] if rows[field.name].type == field.type else
            rows[field.name].cast(field.type)
            for name, field in zip(self.names[lane], self.schemas[lane], strict=True)
        }  # fmt: skip
        columns[LANE] = pa.array(np.full(count, lane, np.int32))
        return self._output(columns, count)

    def pack_acks(self, acks: pa.Array) -> pa.RecordBatch:
        """Return output with acknowledgements."""
        return self._output({ACK: acks}, len(acks))

    def _output(self, columns: dict[str, pa.Array], count: int) -> pa.RecordBatch:
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(count, field.type)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def open(
        self, batch: pa.RecordBatch, lane: int, *, in_declared_types: bool = False
    ) -> pa.StructArray:
        """Return the rows of a lane without a copy: null where a row is of another lane.

        Spark's columns have the time zone of its session. `in_declared_types` casts them, for
        rows that are put together with others.
        """
        schema = self.schemas[lane]
        columns = [batch[name] for name in self.names[lane]]
        others = pc.not_equal(batch[LANE], lane) if self.has_lanes else None
        if not columns:
            rows = pa.array([{}] * batch.num_rows, pa.struct([]))
            return rows if others is None else pc.if_else(others, None, rows)
        fields = [
            field.with_type(column.type).with_nullable(True)
            for field, column in zip(schema, columns, strict=True)
        ]
        if in_declared_types:
            columns = [c.cast(f.type) for c, f in zip(columns, schema, strict=True)]
            fields = list(schema)
        return pa.StructArray.from_arrays(columns, fields=fields, mask=others)


__all__ = ["ACK", "LANE", "Envelope"]
