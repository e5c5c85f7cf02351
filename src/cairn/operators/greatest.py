"""Rows that a join with their own maximum can use, chosen before the shuffle.

A job that asks for the greatest rows of each window joins a stream with `max(...)` of itself. All
rows would travel to the join and wait there. Of rows in one slot with one window, those that have
less than another one cannot be the greatest, so they need not leave the slot: see `plan/greatest`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cairn.functions import BatchContext, Hooks, PartialProcess
from cairn.operators.aggregates.grouping import number_pairs, number_values
from cairn.operators.aggregates.parts import plain, validity


class KeepGreatest(Hooks, PartialProcess):
    """Emits the rows of each batch that none of the same group exceeds in an integer column."""

    ignores_time: bool = True
    wants_order: bool = False

    def __init__(self, column: str, groups: Sequence[str]) -> None:
        self._column = column
        self._groups = tuple(groups)

    def row_count(self, rows: pa.StructArray) -> int:
        return len(rows)

    def process(self, batch: pa.RecordBatch, ctx: BatchContext) -> pa.RecordBatch:
        at, count = np.zeros(batch.num_rows, np.int64), 1
        for name in self._groups:
            at, count = number_pairs(at, count, *number_values(batch[name]))
        values = plain(batch[self._column]).astype(np.int64)
        is_there = validity(batch[self._column])
        greatest = np.full(count, np.iinfo(np.int64).min)
        np.maximum.at(greatest, at[is_there], values[is_there])
        kept = (values == greatest[at]) & is_there
        return batch if kept.all() else batch.filter(pa.array(kept))
