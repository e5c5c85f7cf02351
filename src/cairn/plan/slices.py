"""The rows of a batch, kept on the executors' disks to be read in slices.

A slice has the next rows of every partition of the batch, so it is what a source with a lower
limit would have given.

Always true here:
- each row is in one slice, even if the batch would give other rows when it is computed again: it
  is computed once, and a batch of which an executor has lost rows fails.
"""

from __future__ import annotations

from contextlib import suppress

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cairn.plan.sql import quote
from cairn.protocol.messages import Slice

_IN_PARTITION = (1 << 33) - 1
"""The bits of Spark's row numbers that count within a partition."""


class SlicedRows:
    """The rows of one attempt at a batch."""

    def __init__(self, rows: DataFrame) -> None:
        """Compute the rows: one Spark action, and another one that counts them."""
        self._names = rows.columns
        self._place = "place"
        while self._place in self._names:
            self._place += "_"
        place = F.monotonically_increasing_id().bitwiseAND(F.lit(_IN_PARTITION))
        numbered = rows.select("*", place.alias(self._place))
        self._kept = numbered.localCheckpoint(eager=True, storageLevel=StorageLevel.DISK_ONLY)
        (last,) = self._kept.agg(F.max(self._place)).collect()
        self._longest = 0 if last[0] is None else last[0] + 1

    def take(self, slice: Slice) -> DataFrame:
        """Return the rows of a slice."""
        size = -(-self._longest // slice.count)
        at = F.col(self._place)
        first = slice.index * size
        mine = self._kept.where((at >= first) & (at < first + size))
        return mine.select(*(F.col(quote(name)) for name in self._names))

    def close(self) -> None:
        """Remove the rows from the executors."""
        # Spark removes them as well, some time after nobody knows of them any more.
        with suppress(Exception):
            self._kept._jdf.queryExecution().logical().rdd().unpersist(False)


__all__ = ["SlicedRows"]
