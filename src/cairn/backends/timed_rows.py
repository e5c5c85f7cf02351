"""State that operators of cairn's own use: rows of a key, each with a time.

A map in all files: from (pane, number) to (time, waiting, row). A pane is a stretch of time, the
number is unique within the key and pane. `waiting` is -1 while a row has found no match. Other
numbers were written by earlier versions, which listed such rows in a state of its own.

Functions use it by the batch (`handles/rows`), over runs in Arrow (`columnar/row_table`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.backends.columnar.name_parts import Ints
from cairn.state import Map

Bools = npt.NDArray[np.bool_]


WAITING = -1


class TimedRows(Map[tuple[int, int], tuple[int, int | None, object]]):
    """Rows of one schema. `step_us` is the length of a pane, in whatever unit times have."""

    def __init__(self, schema: pa.Schema, *, step_us: int, pane: str = "pane") -> None:
        self.row_type = pa.struct(list(schema))
        self.step_us = step_us
        super().__init__(
            pa.struct([(pane, pa.int64()), ("number", pa.int64())]),
            pa.struct([("time", pa.int64()), ("waiting", pa.int64()), ("row", self.row_type)]),
        )

    def panes(self, times: Ints) -> Ints:
        return times - times % self.step_us

    def make_values(
        self, times: Ints, waiting: Bools, rows: pa.StructArray, live: Bools | None = None
    ) -> pa.StructArray:
        """Return stored values; null where not `live`."""
        flags = pa.array(np.full(len(waiting), WAITING), mask=~waiting)
        mask = None if live is None or live.all() else pa.array(~live)
        columns = [pa.array(times), flags, rows]
        return pa.StructArray.from_arrays(columns, fields=list(self.type), mask=mask)

    def read_waiting(self, values: pa.StructArray) -> Bools:
        flags = values.field("waiting").fill_null(0).to_numpy(zero_copy_only=False)
        waiting: Bools = flags == WAITING
        return waiting
