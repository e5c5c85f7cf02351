"""Rows on their way to a function, gathered and put in order of their key groups.

State is held by key group. A function that goes through the rows of one group after those of
another finds the group's part of the state in the processor's caches; in the order of arrival
nearly each look-up would go to memory, and those cost more than everything else in a row.

Always true here:
- rows of a key keep their order;
- what is gathered is bounded in rows and in bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

ROWS_MAX = 128 * 1024
BYTES_MAX = 8 * 1024 * 1024
SORT_ROWS_MIN = 4 * 1024
"""Fewer rows gain nothing from another order, so they keep the one they came in."""


class Rows(NamedTuple):
    """Rows with their key groups and, where there is event time, their times in microseconds."""

    groups: pa.Array
    times: pa.Array | None
    rows: pa.StructArray

    def slice(self, start: int, count: int) -> Rows:
        """Return some of the rows."""
        times = None if self.times is None else self.times.slice(start, count)
        return Rows(self.groups.slice(start, count), times, self.rows.slice(start, count))


class Gather:
    """Collects rows until there are enough of them."""

    def __init__(
        self,
        rows_max: int = ROWS_MAX,
        bytes_max: int = BYTES_MAX,
        sort_rows_min: int = SORT_ROWS_MIN,
    ) -> None:
        self._rows_max = rows_max
        self._sort_rows_min = sort_rows_min
        self._bytes_max = bytes_max
        self.reset()

    def reset(self) -> None:
        self._parts: list[Rows] = []
        self._row_count = self._byte_count = 0

    def add(self, groups: pa.Array, times: pa.Array | None, rows: pa.StructArray) -> bool:
        """Add rows; return True if there are enough now to be taken."""
        self._parts.append(Rows(groups, times, rows))
        self._row_count += len(rows)
        self._byte_count += rows.nbytes
        return self._row_count >= self._rows_max or self._byte_count >= self._bytes_max

    def take(self) -> Rows | None:
        """Return the gathered rows, sorted by key group if they are many; None without rows."""
        if not self._parts:
            return None
        if len(self._parts) == 1 and self._byte_count >= self._bytes_max:
            # Wide rows: copying them costs more than the caches give.
            (part,) = self._parts
            self.reset()
            return part
        groups = pa.concat_arrays([part.groups for part in self._parts])
        rows = pa.concat_arrays([part.rows for part in self._parts])
        timed = [part.times for part in self._parts if part.times is not None]
        times = pa.concat_arrays(timed) if timed else None
        self.reset()
        if len(rows) < self._sort_rows_min:
            return Rows(groups, times, rows)
        # numpy sorts 16-bit numbers in linear time, and all key groups fit into 16 bits.
        order = pa.array(np.argsort(groups.to_numpy().astype(np.int16), kind="stable"))
        return Rows(
            groups.take(order), None if times is None else times.take(order), rows.take(order)
        )
