"""Windows of many keys as columns: what state has of them."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from cairn.operators.aggregates.accumulate import Accumulators
from cairn.operators.aggregates.parts import Bools, Columns, Ints

NEVER = 2**63 - 1
META = [
    pa.field("start", pa.int64()),
    pa.field("rows", pa.int64()),
    pa.field("fired", pa.bool_()),
    pa.field("early_at", pa.int64()),
]
"""The fields of a window before its accumulators."""


class Held(NamedTuple):
    starts: Ints
    rows: Ints
    """Rows since the last result."""
    fired: Bools
    """The window is complete and its result is emitted."""
    early_at: Ints
    """Time of the next early result, in milliseconds; NEVER if there is none."""
    columns: list[Columns]
    shown: list[pa.Array]
    """The fields of `Emitter`."""

    def take(self, accumulators: Accumulators, rows: Ints) -> Held:
        return Held(
            self.starts[rows],
            self.rows[rows],
            self.fired[rows],
            self.early_at[rows],
            accumulators.take(self.columns, rows),
            self.take_shown(pa.array(rows)),
        )

    def take_shown(self, rows: pa.Array) -> list[pa.Array]:
        return [column.take(rows) for column in self.shown]
