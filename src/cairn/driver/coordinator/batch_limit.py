"""The limit of bytes in a batch that Spark sends to Python.

Spark compares a batch with the limit after every row, which takes about a microsecond. So the
limit is lifted where rows are known to be small. The number of rows in a batch has a limit in any
case.

Always true here:
- it holds as long as the size of rows is unknown, and in every attempt after a failed one;
- it holds in jobs with other Python functions in Spark's plan: nobody measures what they get.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

BATCH_BYTES_MAX = 16 * 1024 * 1024
NO_LIMIT = 2**31 - 1
"""The value for which Spark does not look."""
SMALL_ROW_BYTES = 1024


class BatchLimit:
    """The limit, epoch by epoch."""

    def __init__(self, types: Iterable[pa.DataType], *, has_other_functions: bool) -> None:
        """`types` are those of all columns that travel to slots."""
        self._is_fixed = has_other_functions
        self._row_bytes = _count_bytes(types)
        """The largest mean of a batch that was seen last; None if it is not known."""

    def choose(self, attempt: int) -> int:
        """Return the limit for an attempt."""
        is_small = self._row_bytes is not None and self._row_bytes <= SMALL_ROW_BYTES
        return NO_LIMIT if is_small and attempt == 0 and not self._is_fixed else BATCH_BYTES_MAX

    def learn(self, row_bytes: Iterable[int]) -> None:
        """Take note of the means that subtasks have seen in an attempt; 0 without rows."""
        seen = max(row_bytes, default=0)
        if seen:
            self._row_bytes = seen


def _count_bytes(types: Iterable[pa.DataType]) -> int | None:
    """Return the bytes of a row; None if they vary."""
    total = 0
    for type_ in types:
        try:
            total += type_.bit_width // 8 + 1
        except ValueError:
            return None
    return total
