"""The rows that an aggregation emits: results, or changes of results.

Changes come in pairs: the row before with -1 in the column `_change`, the row after with 1. A
stream with this column is one of changes, whatever its origin: an aggregation takes rows with -1
back.

Always true here:
- the rows with 1, less those with -1, are the present results of all keys, after every epoch;
- a key without rows has no result;
- a result that stays the same is not emitted as a change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cairn.operators.aggregates.grouping import number_values
from cairn.operators.aggregates.parts import Bools, join_rows, validity

CHANGE = "_change"
CHANGE_FIELD = pa.field(CHANGE, pa.int8(), nullable=False)
"""1: a row that holds now. -1: a row that held before and no longer does."""


def has_changes(schema: pa.Schema) -> bool:
    """True if rows of this schema are changes."""
    return CHANGE in schema.names and schema.field(CHANGE).type == CHANGE_FIELD.type


class Emitter:
    """Makes rows from results, and keeps in state what was emitted, if that matters."""

    def __init__(
        self, results: Sequence[pa.Field], *, changes: bool = False, takes_back: bool = False
    ) -> None:
        """`changes`: emit pairs. `takes_back`: rows of a key can be taken back."""
        self._results = [field.with_nullable(True) for field in results]
        self.changes = changes
        self._takes_back = takes_back
        self.fields: list[pa.Field] = []
        """Fields that the state of a key or window has for it."""
        if changes:
            self.fields = [pa.field("result", pa.struct(self._results))]
        elif takes_back:
            self.fields = [pa.field("shown", pa.bool_())]

    def emit(
        self,
        prefix: Sequence[pa.Array],
        results: Sequence[pa.Array],
        exists: Bools,
        before: Sequence[pa.Array],
    ) -> tuple[list[pa.Array], list[pa.Array]]:
        """Return the columns of the rows to emit, and what state has to hold of them.

        `prefix` are keys and bounds of windows. `exists` marks those that have rows; `before` is
        what state holds.
        """
        if self.changes:
            return self._emit_changes(prefix, results, exists, before[0])
        if not self._takes_back:
            return [*prefix, *results], []
        # A result that was shown and has no rows left is shown once more, empty.
        was = np.asarray(before[0].fill_null(False))
        rows = pa.array(np.flatnonzero(exists | was))
        return [column.take(rows) for column in (*prefix, *results)], [pa.array(exists)]

    def withdraw(self, prefix: Sequence[pa.Array], before: pa.Array) -> list[pa.Array]:
        """Return the columns of rows that take back what was emitted."""
        rows = pa.array(np.flatnonzero(validity(before)))
        columns = [column.take(rows) for column in (*prefix, *before.flatten())]
        return [*columns, pa.array(np.full(len(rows), -1, np.int8))]

    def _emit_changes(
        self,
        prefix: Sequence[pa.Array],
        results: Sequence[pa.Array],
        exists: Bools,
        before: pa.Array,
    ) -> tuple[list[pa.Array], list[pa.Array]]:
        count = len(exists)
        was = validity(before)
        is_same = was & exists
        after = [c.cast(f.type) for c, f in zip(results, self._results, strict=True)]
        both = [join_rows(b, a) for b, a in zip(before.flatten(), after, strict=True)]
        for column in both:
            numbers, _ = number_values(column)
            is_same &= numbers[:count] == numbers[count:]
        # A pair is two neighbours: the row before, the row after.
        wanted = np.column_stack([was & ~is_same, exists & ~is_same]).ravel()
        rows = np.column_stack([np.arange(count), np.arange(count) + count]).ravel()[wanted]
        kinds = np.tile(np.array([-1, 1], np.int8), count)[wanted]
        columns = [column.take(pa.array(rows % max(count, 1))) for column in prefix]
        columns += [column.take(pa.array(rows)) for column in both]
        mask = None if exists.all() else pa.array(~exists)
        held = pa.StructArray.from_arrays(after, fields=self._results, mask=mask)
        return [*columns, pa.array(kinds)], [held]
