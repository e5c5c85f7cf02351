"""Times and rows that Spark observes in an epoch while it computes it.

Always true here:
- a stage that runs twice observes the same times; rows are counted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pyspark.sql import DataFrame

from cairn.plan.columns import Columns
from cairn.plan.measures import Measure, Observed

_NAME = "cairn"


class Observations:
    """The observations of the epoch that was planned last."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._measures: dict[str, Sequence[Measure]] = {}
        self._is_on = True

    def begin(self, *, is_on: bool) -> None:
        """Begin a plan. With `is_on=False` nothing is observed."""
        self._measures.clear()
        self._is_on = is_on

    def observe(self, rows: DataFrame, measures: Sequence[Measure]) -> DataFrame:
        """Return the rows as they are; what is measured of them can be read later."""
        if not measures or not self._is_on:
            return rows
        name = f"{_NAME}-{len(self._measures)}"
        self._measures[name] = measures
        texts = [f"{measure.sql} AS m{index}" for index, measure in enumerate(measures)]
        return rows.observe(name, *self._columns.parse(*texts))

    def read(self, frames: Iterable[DataFrame]) -> Observed:
        """Return what was observed, once the frames of the epoch are computed."""
        found = Observed({}, {})
        # Read from the query that ran: listeners are called later, and for failures too. The driver
        # collects it as tasks end, so an executor that is lost later takes nothing along.
        for frame in frames:
            metrics = frame._jdf.queryExecution().observedMetrics()
            for name, measures in self._measures.items():
                row = metrics.get(name)
                if row.isEmpty():
                    continue  # It belongs to another frame, or Spark knew of no rows.
                for index, measure in enumerate(measures):
                    if row.get().isNullAt(index):
                        continue
                    value = row.get().getLong(index)
                    if measure.kind == "time":
                        found.times[measure.name] = max(value, found.times.get(measure.name, value))
                    else:
                        found.rows[measure.name] = found.rows.get(measure.name, 0) + value
        return found
