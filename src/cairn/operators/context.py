"""The contexts of the functions in this folder: more than the user's functions see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from cairn.functions import BatchContext, Context


class RowContext(Context, Protocol):
    """The context of a function that handles late rows itself."""

    late_ms: int | None
    """Rows older than this are late."""
    row_times_us: Iterator[int] | None
    """Event times of the rows, one for each, in their order; None without event time."""
    sides: Mapping[str, Callable[[Any], None]]
    """Side outputs that are read."""

    def count_late(self, rows: int) -> None: ...


class ColumnContext(BatchContext, Protocol):
    """The context of a function by the batch."""

    floor_ms: int
    """The watermark that the epoch before ran with."""
    sides: Mapping[str, Callable[[Any], None]]
    """Side outputs that are read."""
