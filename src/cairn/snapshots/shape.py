"""The shape of a state as a table: its columns, and the conversion of stored rows.

    key_group, the key columns, …
        map                     entry, value          a row per entry
        list, operator list     position, value       a row per item, in the order of the list
        feedback                position, value       a row per record on its way back
        timers                  time                  a row per timer
        others                  value                 a row per key
    … and written_at, for state that expires

Always true here:
- no column name occurs twice, whatever the key columns are called, even for readers that ignore
  case;
- rows are converted by Arrow, not in a Python loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.errors import QueryError
from cairn.functions import EVENT_TIMERS, PROCESSING_TIMERS
from cairn.snapshots.columns import GROUP, StateColumns
from cairn.storage.manifest import Scope

KEY_GROUP: Final = "key_group"
OURS: Final = frozenset({KEY_GROUP, "entry", "position", "value", "time", "written_at"})
TIME: Final = pa.timestamp("us", "UTC")
_TIMERS: Final = (EVENT_TIMERS, PROCESSING_TIMERS)


def table_kind(columns: StateColumns, scope: Scope) -> str:
    """Return the kind of a state, as users know it."""
    if scope == "feedback":
        return "feedback"
    if columns.name in _TIMERS and columns.decl.kind == "map":
        return "timers"
    return columns.decl.kind.replace("_", "-")


class Shape:
    """The columns of one state, and the conversion of its stored rows."""

    def __init__(self, columns: StateColumns, scope: Scope) -> None:
        self.columns = columns
        self.kind = table_kind(columns, scope)
        self.key_names = key_columns(columns.key_names)
        self._has_parts = len(columns.key_names) > 1
        types = [f.type for f in columns.key_type] if self._has_parts else [columns.key_type]
        self.key_types: list[pa.DataType] = types
        fields = [pa.field(KEY_GROUP, pa.int32(), nullable=False)]
        fields += [pa.field(n, t) for n, t in zip(self.key_names, types, strict=True)]
        if self.kind in ("list", "operator-list", "feedback"):
            fields.append(pa.field("position", pa.int64(), nullable=False))
        elif self.kind == "timers":
            fields.append(pa.field("time", TIME, nullable=False))
        elif columns.entries is not None:
            fields.append(pa.field("entry", columns.entries.arrow))
        if self.kind != "timers":
            fields.append(pa.field("value", columns.values.arrow))
        if columns.ttl is not None:
            fields.append(pa.field("written_at", TIME))
        self.schema = pa.schema(fields)

    def batches(self, stored: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield rows of the table, given plain rows from EpochReader or Savepoint."""
        if self.kind == "operator-list":
            # Lists of subtasks are small, and positions need all rows.
            whole = _in_order(list(stored))
            stored = [] if whole is None else [whole]
        for batch in stored:
            rows = self._list_rows(batch) if self.kind == "list" else self._rows(batch)
            if rows.num_rows:
                yield rows

    def _rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        found = [batch[GROUP], *self.key_parts(batch["key"])]
        if self.kind == "operator-list":
            found.append(_ranks(batch["key"]))
        elif self.kind == "timers":
            found.append(times(batch["entry"]))
        elif "entry" in batch.schema.names:
            found.append(batch["entry"])
        if self.kind != "timers":
            found.append(batch["value"])
        if self.columns.ttl is not None:
            found.append(times(batch["at"]))
        return pa.RecordBatch.from_arrays(found, schema=self.schema)

    def _list_rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        lengths = pc.list_value_length(batch["value"]).fill_null(0).to_numpy(zero_copy_only=False)
        row = np.repeat(np.arange(batch.num_rows), lengths)
        first = np.cumsum(lengths) - lengths
        position = np.arange(len(row)) - first[row]
        at_row = pa.array(row)
        found = [batch[GROUP].take(at_row)]
        found += [column.take(at_row) for column in self.key_parts(batch["key"])]
        found += [pa.array(position, pa.int64()), batch["value"].flatten()]
        if self.columns.ttl is not None:
            found.append(times(batch["at"].flatten()))
        return pa.RecordBatch.from_arrays(found, schema=self.schema)

    def key_parts(self, keys: pa.Array) -> list[pa.Array]:
        return list(keys.flatten()) if self._has_parts else [keys]


def key_columns(names: list[str], ours: frozenset[str] = OURS) -> list[str]:
    """Return the names of the key columns in the table: prefixed if they clash with ours."""
    taken = ours | {name.lower() for name in names}
    found = []
    for name in names:
        shown = name
        while (shown.lower() in ours) if shown == name else (shown.lower() in taken):
            shown = f"key_{shown}"
        taken |= {shown.lower()}
        found.append(shown)
    return found


def _in_order(batches: list[pa.RecordBatch]) -> pa.RecordBatch | None:
    """Return the lists of subtasks, each in the order of its items."""
    batches = [batch for batch in batches if batch.num_rows]
    if not batches:
        return None
    rows = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    at, copy = rows["entry"].flatten()
    places = pa.table({"key": rows["key"], "at": at, "copy": copy})
    order = pc.sort_indices(places, sort_keys=[(name, "ascending") for name in places.column_names])
    return rows.take(order)


def _ranks(keys: pa.Array) -> pa.Array:
    """Return the position of each row among those of its key. Equal keys are adjacent."""
    numbers = keys.to_numpy(zero_copy_only=False)
    row = np.arange(len(numbers))
    begins = np.concatenate([[True], numbers[1:] != numbers[:-1]])
    first = np.maximum.accumulate(np.where(begins, row, 0))
    return pa.array(row - first, pa.int64())


def times(millis: pa.Array) -> pa.Array:
    """Return timestamps. QueryError for a time that a timestamp cannot hold."""
    try:
        return pc.multiply_checked(millis, 1000).cast(TIME)
    except pa.ArrowInvalid:
        raise QueryError(
            "a time is out of the range of a timestamp\n"
            f"  found: {pc.min_max(millis)} ms since 1970"
        ) from None
